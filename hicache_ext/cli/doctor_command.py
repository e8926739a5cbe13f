"""``hicache-ext doctor``: examine a configuration and everything it depends on, and say what to do.

Exit codes: 0 nothing is wrong (notes and warnings may be there), 1 at least one error was found, 2 wrong usage or wrong
configuration.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import shutil
import socket
import stat
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hicache_ext
from hicache_ext.cli.config_command import notes_on
from hicache_ext.cli.inputs import FILE_HELP, read_configuration
from hicache_ext.cli.output import argument, command, show
from hicache_ext.config import ExtraConfig, HicacheExtConfig, TierConfig, check_document
from hicache_ext.config.model import SGLANG
from hicache_ext.config.secrets import SealKeyReference
from hicache_ext.errors import ConfigError, MissingPackageError, StoreError, UnsupportedError
from hicache_ext.packages import how_to_install, installed_version
from hicache_ext.page.recording import SUFFIX
from hicache_ext.page.transforms.sealing import CipherKind, fastest_cipher
from hicache_ext.runtime.commands import print_json, terminated_in_order
from hicache_ext.runtime.shown import shown_text
from hicache_ext.sglang.releases import TESTED, comes_with, is_tested, other_release, untested
from hicache_ext.sglang.used_names import FEATURES, STORAGE, check_installed, lacking
from hicache_ext.storage.contract.diagnosis import Finding, Level
from hicache_ext.storage.contract.registry import broken_tier_types, examine_tier
from hicache_ext.storage.tiering.recording import SALT_FILE
from hicache_ext.storage.tiering.reload import used_tiers
from hicache_ext.storage.tiering.tier_use import tier_use
from hicache_ext.storage.tiering.tracing import check_packages


@command(
    argument("file", metavar="CONFIG", help=FILE_HELP),
    argument("--tier", action="append", metavar="NAME", help="look at this tier alone; may be repeated"),
    examples=("hicache.yaml", "hicache.yaml --tier pool"),
    problem="an error was found",
)
def doctor_command(arguments: argparse.Namespace) -> int:
    """Examine and print; return 0, 1 or 2 as the module docstring says."""
    inline = arguments.file.lstrip().startswith("{")
    try:
        document = read_configuration(arguments.file)
        checked = check_document(document)
        for name in arguments.tier or ():
            if name not in checked.hicache_ext.tiers:
                raise ConfigError("--tier", f"no tier is named {name!r}", ", ".join(checked.hicache_ext.tiers))
    except ConfigError as error:
        if arguments.json:
            print_json({"level": "error", "configuration": list(map(str, error.errors)), "sections": []})
            return 2
        raise
    sections: list[dict[str, Any]] = []
    level = Level.OK
    with terminated_in_order():
        for title, findings in examine(checked, inline=inline, only=arguments.tier):
            told = [asdict(finding) | {"level": finding.level.value} for finding in findings]
            sections.append({"title": title, "findings": told})
            level = max((level, *(one.level for one in findings)), key=list(_SUMMARY).index)
            if not arguments.json:
                # Printed one by one: a tier that hangs until its timeout must not hide earlier findings.
                print("\n".join([title, *(line for one in findings for line in _lines(one)), ""]), flush=True)
    show(arguments, {"level": level.value, "configuration": [], "sections": sections}, [_SUMMARY[level]])
    return 1 if level is Level.ERROR else 0


_SUMMARY = {
    Level.OK: "Nothing is wrong.",
    Level.NOTE: "Nothing is wrong; see the notes.",
    Level.WARNING: "It works; see the warnings.",
    Level.ERROR: "Something is wrong; see the errors.",
}
"""From the best level to the worst."""
_LONGEST_FINDING = 2000
_MARKS = {Level.OK: "ok     ", Level.NOTE: "note   ", Level.WARNING: "WARNING", Level.ERROR: "ERROR  "}


def _lines(finding: Finding) -> Iterator[str]:
    seen = "; ".join(shown_text(line, _LONGEST_FINDING) for line in finding.seen.split("\n"))
    yield f"  {_MARKS[finding.level]} {shown_text(finding.subject)}: {seen}"
    if finding.remedy:
        yield f"          -> {shown_text(finding.remedy, _LONGEST_FINDING)}"


# -- the examination ---------------------------------------------------------------------------------------------------


Section = tuple[str, Sequence[Finding]]
"""A title and its findings."""


def examine(checked: ExtraConfig, *, inline: bool, only: Sequence[str] | None = None) -> Iterator[Section]:
    """One section after the other, as they are found; ``only`` names the tiers to look at (None: all)."""
    yield "installation", list(installation_findings())
    if of_features := list(feature_findings()):
        yield "what is used of SGLang", of_features
        if only is None:
            yield "page hashes", [page_hash_finding()]
    yield "configuration", list(setting_findings(checked, inline=inline))
    tiers = checked.hicache_ext.tiers
    for name, tier in {**tiers, **used_tiers(checked.hicache_ext)}.items():
        if only is None or name in only:
            yield f"tier {name}: {tier.summary()}", _tier_findings(name, tier)


def _tier_findings(name: str, tier: TierConfig) -> Sequence[Finding]:
    try:
        return [Finding("open", Level.OK, "the tier can be opened"), *seal_findings(tier), *examine_tier(name, tier)]
    except ConfigError as error:
        return [Finding("open", Level.ERROR, str(error), "servers do not start with it, required or not")]
    except StoreError as error:
        if tier.required:
            return [Finding("open", Level.ERROR, str(error), "servers do not start until this is mended")]
        level = Level.ERROR if tier.remote else Level.WARNING
        return [Finding("open", level, str(error), "servers start without it (required: false)")]
    except Exception as error:  # noqa: BLE001 - the other tiers are to be looked at all the same
        return [Finding("diagnosis", Level.ERROR, f"it ended in {type(error).__name__}", "please report it")]


# -- the installation --------------------------------------------------------------------------------------------------

_PLUGIN_GROUP = "sglang.srt.plugins"


def installation_findings() -> Iterator[Finding]:
    """Yield findings on the installation. Imports neither torch nor SGLang."""
    yield Finding("hicache_ext", Level.OK, hicache_ext.__version__)
    yield Finding("python", Level.OK, platform.python_version())
    yield release_finding()
    if (torch := installed_version("torch")) is None:
        yield Finding("torch", Level.ERROR, "not installed", "install it with SGLang")
    else:
        yield Finding("torch", Level.OK, torch)
    yield _plugin()
    for error in broken_tier_types():
        yield Finding("tier types", Level.ERROR, str(error), "servers start without it while no tier is of that type")


def _plugin() -> Finding:
    """The entry point through which SGLang calls this package in each of its processes."""
    points = [p for p in importlib.metadata.entry_points(group=_PLUGIN_GROUP) if p.name == "hicache_ext"]
    if not points:
        checkout = Path(hicache_ext.__file__).parents[1]
        what = f"pip install {shlex.quote(str(checkout))}" if (checkout / "setup.py").is_file() else "install it again"
        remedy = f"{what}, with the Python that SGLang is installed in"
        return Finding("plugin", Level.ERROR, f"SGLang finds no entry point hicache_ext in {_PLUGIN_GROUP}", remedy)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed is not None and "hicache_ext" not in [word.strip() for word in allowed.split(",")]:
        seen = "SGLANG_PLUGINS is set and does not name hicache_ext: its hooks will not run"
        return Finding("plugin", Level.WARNING, seen, "add hicache_ext to SGLANG_PLUGINS")
    try:
        points[0].load()
    except Exception as error:  # noqa: BLE001 - whatever an import of the installed SGLang or torch raises
        seen = f"{points[0].value} cannot be imported ({type(error).__name__})"
        return Finding("plugin", Level.ERROR, seen, "install the package again, or see docs/troubleshooting.md")
    return Finding("plugin", Level.OK, "the hooks can be imported")


# -- what is used of SGLang --------------------------------------------------------------------------------------------


def release_finding() -> Finding:
    """Whether this release is served."""
    release = installed_version("sglang")
    if release is None:
        return Finding("sglang", Level.ERROR, "not installed here", how_to_install("sglang"))
    if not comes_with(release, TESTED[0]):
        return Finding("sglang", Level.ERROR, f"{release}; {TESTED[0]} or newer is needed", other_release())
    if is_tested(release):
        return Finding("sglang", Level.OK, release)
    return Finding("sglang", Level.WARNING, untested(release) or release, other_release())


def feature_findings() -> Iterator[Finding]:
    """One line for each feature; none where SGLang is not installed."""
    try:
        checked = check_installed()
    except UnsupportedError:
        return
    for feature in FEATURES:
        words = lacking(checked, feature)
        names = sum(len(use.names) for use, _ in checked if feature in use.features)
        if words is None:
            yield Finding(feature.name, Level.OK, f"SGLang has all {names} names that it uses")
        elif feature is STORAGE:
            yield Finding(feature.name, Level.ERROR, f"SGLang lacks {words}: {feature.loss}", "use another release")
        else:
            yield Finding(feature.name, Level.WARNING, f"off, since SGLang lacks {words}: {feature.loss}")


# -- page hashes -------------------------------------------------------------------------------------------------------

_TO_BUILD_HASHES = "apt-get install ninja-build g++ libssl-dev python3-dev, or what another system calls these"


def page_hash_finding() -> Finding:
    """Whether SGLang finds the tools that build its extension for page hashes. A server tries it at its start and logs
    what fails."""
    compiler, *_ = os.environ.get("CXX", "").split() or ["c++"]
    missing = [tool for tool in ("ninja", compiler) if shutil.which(tool) is None]
    if not missing:
        seen = "ninja and a C++ compiler are here; SGLang's page hashes need OpenSSL's and Python's headers, too"
        return Finding("extension", Level.OK, seen)
    from torch.utils.cpp_extension import get_default_build_root

    seen = f"SGLang cannot build its extension for page hashes without {' and '.join(missing)}"
    # What was built before is loaded by ninja alone.
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()).glob("**/hicache_hash_cpp.so")
    level = Level.WARNING if "ninja" not in missing and any(built) else Level.ERROR
    return Finding("extension", level, f"{seen}, and HiCache ends the server at the first prompt", _TO_BUILD_HASHES)


# -- settings ----------------------------------------------------------------------------------------------------------

_DEFAULT_THRESHOLD = 256
"""Tokens; SGLang 0.5.23."""
_CONNECT_TIMEOUT = 2.0


def setting_findings(checked: ExtraConfig, *, inline: bool) -> Iterator[Finding]:
    """``inline``: the configuration is given as JSON on the command line, not as a file."""
    config = checked.hicache_ext
    yield Finding("configuration", Level.OK, f"valid; role {config.role}, {len(config.tiers)} tier(s)")
    threshold = checked.prefetch_threshold
    if threshold is None:
        seen = f"SGLang asks storage for spans of {_DEFAULT_THRESHOLD} tokens or more only (its default)"
        remedy = "set prefetch_threshold lower if prompts share less than that"
        yield Finding("prefetch_threshold", Level.NOTE, seen, remedy)
    else:
        yield Finding("prefetch_threshold", Level.OK, f"{threshold} tokens; shorter spans never ask storage")
    if config.role != "decode":
        seen = "a prompt is stored and restored only as far as host memory (the linker: linker.staging) holds it"
        remedy = "--hicache-ratio or --hicache-size beyond the longest prompt; the log at the start has both numbers"
        yield Finding("host memory", Level.NOTE, seen, remedy)
    notes = list(notes_on(checked, inline))
    for subject, note in notes:
        # Of a secret that is missing the opening of its tier tells.
        if not subject.startswith("hicache_ext."):
            yield Finding(subject, Level.WARNING, note)
    if checked.allocator is None:
        seen = "host pages are not page-aligned"
        yield Finding("allocator", Level.NOTE, seen, "allocator: shm in inline JSON aligns them, for direct I/O")
    elif "allocator" not in dict(notes):
        yield Finding("allocator", Level.OK, checked.allocator)
    yield _events(config)
    yield _tracing(config)
    yield _record(config)
    for line in tier_use(config).lines():
        yield Finding("tiers", Level.OK, line)
    for name in config.tiers:
        if name in config.store_locations and name not in config.retrieve_locations and config.role != "decode":
            yield Finding("tiers", Level.NOTE, f"tier {name} is written and never read by this node", "")


def _events(config: HicacheExtConfig) -> Finding:
    """Check what KV-aware routers learn about the tiers."""
    if config.events is None:
        seen = "KV-aware routers learn nothing of the tiers, and SGLang's /get_hicache_l3_cache_layout answers disabled"
        return Finding("events", Level.OK, f"off: {seen} (docs/pd.md)")
    where = f"at {config.events.endpoint}, replay at {config.events.replay_endpoint}"
    silent = [name for name in config.retrieve_locations if not config.tiers[name].tells_pages]
    if silent:
        seen = f"{where}; nothing is told of {', '.join(silent)}: they do not say which pages they hold"
        return Finding("events", Level.NOTE, seen, "docs/pd.md says what a router does about them")
    return Finding("events", Level.OK, where)


def _tracing(config: HicacheExtConfig) -> Finding:
    """Whether spans can be made, and go anywhere."""
    if config.tracing is None:
        return Finding("tracing", Level.OK, "off (docs/plan.md)")
    try:
        check_packages()
    except MissingPackageError as error:
        seen = f"the server will not start: {error}"
        return Finding("tracing", Level.ERROR, seen, "install it, or leave it out")
    endpoint = config.tracing.endpoint
    if endpoint == SGLANG:
        seen = "to the collector of SGLang's --enable-trace, without which the server does not start"
        return Finding("tracing", Level.NOTE, seen, "start it with --enable-trace --otlp-traces-endpoint HOST:PORT")
    parts = urllib.parse.urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    try:
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        return Finding("tracing", Level.WARNING, f"{endpoint}: {error}", "start the collector; servers run without it")
    return Finding("tracing", Level.OK, f"to {endpoint}, where somebody listens")


def _record(config: HicacheExtConfig) -> Finding:
    """Whether recordings can be written, and who may read what tells prompts by them."""
    if config.record is None:
        return Finding("record", Level.OK, "off (docs/plan.md)")
    directory = Path(config.record.path)
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        seen = f"the server will not start: this account may not write to {nearest}"
        return Finding("record", Level.ERROR, seen, "give it another directory, or leave record out")
    salt = directory / SALT_FILE
    try:
        told = salt.exists() and bool(salt.stat().st_mode & 0o077)
        files = [path.stat().st_size for path in directory.glob(f"*{SUFFIX}")]
        free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding("record", Level.WARNING, f"{directory}: {error.strerror}", "")
    if told:
        seen = f"other accounts may read {salt}: with it and a prompt, a recording says whether that was asked"
        return Finding("record", Level.WARNING, seen, f"chmod 600 {salt}")
    room = config.record.size - sum(files)
    if free < room:
        seen = f"{directory} may grow by {room:,} bytes, and {free:,} are free"
        return Finding("record", Level.WARNING, seen, "a smaller record.size; what does not fit is not recorded")
    return Finding("record", Level.OK, f"{len(files)} files of {sum(files):,} bytes in {directory}")


# -- seals -------------------------------------------------------------------------------------------------------------


def seal_findings(tier: TierConfig) -> Iterator[Finding]:
    """Names files and ids, never a key."""
    if tier.seal is None:
        return
    seal = tier.seal
    writes = seal.keys[0].id
    others = ", ".join(key.id for key in seal.keys[1:])
    read = f" and read with {others}, too" if others else ""
    yield Finding("seal", Level.OK, f"{seal.mode}, pages are written with key {writes}{read}")
    for key in seal.keys:
        if key.kind == "env":
            seen = "it is in the environment: processes that the server starts, and crash dumps, have it, too"
            yield Finding(f"seal key {key.id}", Level.NOTE, seen, "keep it in a file of mode 0600")
        else:
            yield from _of_file(key)
    if fastest_cipher() is not CipherKind.AES_256_GCM:
        seen = "this processor has no instructions for AES: pages are sealed with ChaCha20-Poly1305, which is slower"
        yield Finding("seal cipher", Level.NOTE, seen)


def _of_file(key: SealKeyReference) -> Iterator[Finding]:
    """The tier says itself where a file cannot be read."""
    name = key.name
    try:
        status = os.stat(name)
    except OSError:
        return
    mode = stat.S_IMODE(status.st_mode)
    can = []
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        can.append("every account")
    elif mode & (stat.S_IRGRP | stat.S_IWGRP):
        can.append(f"group {status.st_gid}")
    if status.st_uid not in (0, os.geteuid()):
        can.append(f"account {status.st_uid}, whose it is")
    if can:
        # A secret of a pod with fsGroup is its group's.
        of_all = mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP) or len(can) > 1
        seen = f"{name} has mode {mode:04o}: {' and '.join(can)} can read or change it"
        remedy = "chmod 600, and the server's account as owner; in Kubernetes defaultMode: 0400"
        yield Finding(f"seal key {key.id}", Level.WARNING if of_all else Level.NOTE, seen, remedy)
