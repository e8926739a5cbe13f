"""What the self-check finds in the installed SGLang: a verdict per feature, and the table of every name.

Reads SGLang's sources; imports neither torch nor SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_ext.errors import UnsupportedError
from hicache_ext.packages import how_to_install, installed_version
from hicache_ext.sglang.releases import TESTED, comes_with, is_tested, other_release, untested
from hicache_ext.sglang.self_check import Checked, check_installed, lacking
from hicache_ext.sglang.used_names import FEATURES, HOOKED, STORAGE, Feature
from hicache_ext.storage.contract.diagnosis import Finding, Level


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
    checked = _checked()
    for feature in FEATURES if checked else ():
        words = lacking(checked, feature)
        names = sum(len(one.use.names) for one in checked if one.expected and feature in one.use.features)
        if words is None:
            yield Finding(feature.name, Level.OK, f"SGLang has all {names} names that it uses")
        elif feature is STORAGE:
            yield Finding(feature.name, Level.ERROR, f"SGLang lacks {words}: {feature.loss}", "use another release")
        else:
            yield Finding(feature.name, Level.WARNING, f"off, since SGLang lacks {words}: {feature.loss}")


def table() -> list[dict[str, str]]:
    """Every name that is used: whether it was found, what needs it, its kind; names of one owner in a row."""
    return [row for one in _checked() for row in _rows(one)]


def table_in_words(rows: Sequence[dict[str, str]]) -> str:
    """One sentence: what is not there, which is what somebody has to know; ``--json`` has all of it."""
    lost = [row["of SGLang"] for row in rows if row["found"] == "NO"]
    found = f"not found: {'; '.join(lost)}" if lost else "all that this release is to have is found"
    return f"{len(rows)} places of SGLang were looked at, {found} (--json lists each)"


def _checked() -> tuple[Checked, ...]:
    try:
        return check_installed()
    except UnsupportedError:
        return ()


def _rows(one: Checked) -> Iterator[dict[str, str]]:
    """One for what was found of an owner's names, one for what was not."""
    use = one.use
    lost = {
        name
        for name in use.names
        for text in one.missing
        if text.split(" ")[0] in (f"{use.owner}.{name.partition('|')[0]}", use.owner)
    }
    kind = f"hook {use.hook}" if use.hook else "signature" if use.takes or use.answered else "name"
    parameters = f"({', '.join(use.takes)})" if use.takes or use.answered else ""
    parameters += f", ignored: {', '.join(one.new)}" if one.new else ""
    for names, found in (
        ([name for name in use.names if name in lost], "NO" if one.expected else f"not before {use.since}"),
        ([name for name in use.names if name not in lost], "yes"),
    ):
        if names:
            yield {
                "found": found,
                "kind": kind,
                "needed by": _features(use.features),
                "of SGLang": f"{use.owner.removeprefix('sglang.srt.')}: {', '.join(names)}{parameters}",
            }


def _features(features: Sequence[Feature]) -> str:
    return "every hook" if tuple(features) == HOOKED else ", ".join(feature.name for feature in features)
