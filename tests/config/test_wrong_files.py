"""Every wrong file an operator is likely to write, and the exact sentence that answers it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hicache_ext.config import load_config, tier_types
from hicache_ext.errors import ConfigError

HEAD = """\
backend_name: hicache_ext
module_path: hicache_ext.storage.backend
class_name: HiCacheExtBackend
interface_v1: 1
"""
NVME = "nvme: {type: file, path: /mnt/a, capacity: 1GiB}"
POOL = "pool: {type: file, path: /mnt/b, capacity: 1GiB}"

TYPES = ", ".join(tier_types())
TIER_KEYS = (
    "type, required, timeout, codec, seal, admission, write_budget, path, capacity, layout, "
    "io, threads, ttl, shared, mode, group, require_mount"
)
SECTION_KEYS = (
    "role, tiers, retrieve_locations, store_locations, store_policies, promote_to, model, pd, kv_dtype, longest_lease, "
    "tenants, watch_config, kernels, prefetch, background, linker, events, tracing, record, roles"
)
TOP_KEYS = (
    "backend_name, module_path, class_name, interface_v1, hicache_ext, prefetch_threshold, prefetch_timeout_base, "
    "prefetch_timeout_per_ki_token, hicache_storage_pass_prefix_keys, tp_lcm_size, allocator"
)
SIZE = "whole bytes such as 1048576, or a size such as 512MiB, 2TiB or 1.5GB, or 'unlimited'"
CAPACITY = "a size such as 512GiB, or 'unlimited'"
TTL = "a duration from 1s to 365d, such as 7d, or none"
PATH = "an absolute path, or a list of them"
BUDGET = "a size per day, hour or second, such as 20TiB/day or 200MB/s"
TEMPLATES = "{hostname}, {env:NAME}, and {{ or }} for plain braces"
TIERS = "a mapping of names to tiers, such as nvme: {type: file, path: /mnt/nvme0/hicache, capacity: 512GiB}"
INTERFACE = (
    "1 or true, without which SGLang never uses the zero-copy calls that this backend serves; no text,"
    " of which SGLang takes any, even '0', for on"
)


class Wrong(NamedTuple):
    """A file and its sentence; FILE in the sentence stands for the path of the file."""

    name: str
    suffix: str
    text: str
    sentence: str


def tier(name: str, settings: str, sentence: str) -> Wrong:
    """A wrong setting in the one tier of an otherwise right file."""
    complete = {"type": "file", "path": "/mnt/a", "capacity": "1GiB"}
    given = {line.split(":")[0]: line.split(":", 1)[1] for line in settings.splitlines()}
    merged = {key: value for key, value in (complete | given).items() if value.strip() != "-"}
    lines = "".join(f"      {key}: {value}\n" for key, value in merged.items())
    return Wrong(name, "yaml", f"{HEAD}hicache_ext:\n  tiers:\n    nvme:\n{lines}", sentence)


def section(name: str, text: str, sentence: str) -> Wrong:
    """A wrong section ``hicache_ext`` in an otherwise right file."""
    lines = "".join(f"  {line}\n" for line in text.splitlines())
    return Wrong(name, "yaml", f"{HEAD}hicache_ext:\n{lines}", sentence)


def around(name: str, text: str, sentence: str, without: str = "-") -> Wrong:
    """Something wrong at the top level around a right section."""
    head = "".join(line for line in HEAD.splitlines(True) if not line.startswith(without))
    return Wrong(name, "yaml", f"{head}{text}hicache_ext: {{tiers: {{{NVME}}}}}\n", sentence)


def two(more: str) -> str:
    return f"tiers:\n  {NVME}\n  {POOL}\n{more}"


N = "hicache_ext.tiers.nvme"

WRONG_FILES = [
    # Recordings
    section(
        "recordings in a tier's directory",
        f"tiers: {{{NVME}}}\nrecord: {{path: /mnt/a/../a/recordings}}",
        "hicache_ext.record.path: '/mnt/a/../a/recordings' is inside a directory of tier 'nvme'; "
        "allowed: a directory for recordings alone",
    ),
    section(
        "a tier among recordings",
        f"tiers: {{{NVME}}}\nrecord: {{path: /mnt}}",
        "hicache_ext.record.path: '/mnt' contains a directory of tier 'nvme'; "
        "allowed: a directory for recordings alone",
    ),
    # The file itself
    Wrong("an empty YAML file", "yaml", "", "FILE: is empty"),
    Wrong("an empty JSON file", "json", " \n", "FILE: is empty"),
    Wrong("an empty TOML file", "toml", "", "FILE: is empty"),
    Wrong("only comments", "yaml", "# nothing yet\n", "FILE: is empty"),
    Wrong("a list", "yaml", "- hicache_ext\n", "FILE: holds a list, not a mapping"),
    Wrong("a word", "json", '"hunter2"', "FILE: holds text, not a mapping"),
    Wrong(
        "an unknown extension",
        "conf",
        HEAD,
        "FILE: unknown file extension '.conf'; allowed: .json, .yaml, .yml, .toml",
    ),
    Wrong(
        "bad YAML",
        "yaml",
        f"{HEAD}hicache_ext: tiers: nvme\n",
        "FILE: not valid YAML in line 5: mapping values are not allowed here",
    ),
    Wrong(
        "a tab in YAML",
        "yaml",
        "a:\n\tb: 1\n",
        "FILE: not valid YAML in line 2: found character '\\t' that cannot start any token",
    ),
    Wrong(
        "an alias that is a password",
        "yaml",
        "password: *hunter2\n",
        "FILE: not valid YAML in line 1: found undefined alias",
    ),
    Wrong(
        "two YAML documents", "yml", "a: 1\n---\nb: 2\n", "FILE: not valid YAML in line 2: but found another document"
    ),
    Wrong("bad JSON", "json", '{"a": 1,\n "b" 2}', "FILE: not valid JSON in line 2: Expecting ':' delimiter"),
    Wrong("NaN in JSON", "json", '{"a": NaN}', "FILE: not valid JSON: NaN is not a number"),
    Wrong("bad TOML", "toml", "a = 1\nb = \n", "FILE: not valid TOML in line 2: Invalid value"),
    Wrong("unclosed TOML", "toml", "a = [1", "FILE: not valid TOML at the end: Unclosed array"),
    Wrong(
        "a YAML key written twice",
        "yaml",
        f"{HEAD}hicache_ext:\n  tiers:\n    nvme:\n      capacity: 1GiB\n      path: /a\n      capacity: 2GiB\n",
        "FILE: the key 'capacity' in line 10 is already set in line 8",
    ),
    Wrong("a JSON key written twice", "json", '{"a": 1, "a": 2}', "FILE: the key 'a' is written twice in one mapping"),
    Wrong(
        "a TOML key written twice", "toml", "a = 1\na = 2\n", "FILE: not valid TOML in line 2: Cannot overwrite a value"
    ),
    Wrong("a number as a key", "yaml", "1: x\n", "the number 1 is used as a key; put it in quotes; allowed: text"),
    section(
        "a YAML switch as a key",
        "tiers: {on: {type: file}}",
        "hicache_ext.tiers: the value true is used as a key; put it in quotes; allowed: text",
    ),
    # The level that SGLang reads
    around("no backend_name", "", "backend_name: required; allowed: hicache_ext", "backend_name"),
    around(
        "another module",
        "module_path: hicache_ext.backend\n",
        "module_path: the text 'hicache_ext.backend' is not accepted; did you mean 'hicache_ext.storage.backend'?; "
        "allowed: hicache_ext.storage.backend",
        "module_path",
    ),
    around(
        "another class",
        "class_name: HiCacheFile\n",
        "class_name: the text 'HiCacheFile' is not accepted; allowed: HiCacheExtBackend",
        "class_name",
    ),
    around("no interface_v1", "", f"interface_v1: required; allowed: {INTERFACE}", "interface_v1"),
    around(
        "interface_v1 0",
        "interface_v1: 0\n",
        f"interface_v1: the number 0 is not accepted; allowed: {INTERFACE}",
        "interface_v1",
    ),
    around(
        "interface_v1 false",
        "interface_v1: false\n",
        f"interface_v1: the value false is not accepted; allowed: {INTERFACE}",
        "interface_v1",
    ),
    around(
        "interface_v1 the text 0",
        "interface_v1: '0'\n",
        f"interface_v1: the text '0' is not accepted; allowed: {INTERFACE}",
        "interface_v1",
    ),
    around(
        "interface_v1 the text 1",
        "interface_v1: '1'\n",
        f"interface_v1: the text '1' is not accepted; allowed: {INTERFACE}",
        "interface_v1",
    ),
    around(
        "a misspelt SGLang key",
        "prefetch_treshold: 128\n",
        f"prefetch_treshold: unknown key; did you mean 'prefetch_threshold'?; allowed: {TOP_KEYS}",
    ),
    around(
        "our key at the top",
        f"tiers: {{{NVME}}}\n",
        f"tiers: unknown key; it belongs under 'hicache_ext'; allowed: {TOP_KEYS}",
    ),
    around(
        "a threshold in words",
        "prefetch_threshold: '256'\n",
        "prefetch_threshold: the text '256' is not accepted; allowed: a whole number of tokens",
    ),
    around(
        "a timeout that is a switch",
        "prefetch_timeout_base: true\n",
        "prefetch_timeout_base: the value true is not accepted; allowed: a number of seconds",
    ),
    around(
        "prefix keys that are a number",
        "hicache_storage_pass_prefix_keys: 1\n",
        "hicache_storage_pass_prefix_keys: the number 1 is not accepted; allowed: true or false",
    ),
    around(
        "seconds that are left empty, which SGLang refuses",
        "prefetch_timeout_base:\n",
        "prefetch_timeout_base: an empty value is not accepted; allowed: a number of seconds",
    ),
    around(
        "prefix keys that are left empty",
        "hicache_storage_pass_prefix_keys:\n",
        "hicache_storage_pass_prefix_keys: an empty value is not accepted; allowed: true or false",
    ),
    around(
        "tp_lcm_size 0",
        "tp_lcm_size: 0\n",
        "tp_lcm_size: the number 0 is not accepted; allowed: a positive whole number",
    ),
    around(
        "a misspelt allocator",
        "allocator: smh\n",
        "allocator: the text 'smh' is not accepted; did you mean 'shm'?; allowed: shm",
    ),
    Wrong("no section", "yaml", HEAD, f"hicache_ext: required; allowed: a mapping with {SECTION_KEYS}"),
    Wrong(
        "an empty section",
        "yaml",
        f"{HEAD}hicache_ext:\n",
        f"hicache_ext: an empty value is not accepted; allowed: a mapping with {SECTION_KEYS}",
    ),
    # The section
    section("no tiers", "role: both", f"hicache_ext.tiers: required; allowed: {TIERS}"),
    section(
        "an empty tiers",
        "tiers: {}",
        "hicache_ext.tiers: at least one tier is needed; allowed: a mapping of names to tiers",
    ),
    section("tiers as a list", f"tiers: [{{{NVME}}}]", f"hicache_ext.tiers: a list is not accepted; allowed: {TIERS}"),
    section(
        "a misspelt key of the section",
        f"tiers: {{{NVME}}}\nretreive_locations: [nvme]",
        f"hicache_ext.retreive_locations: unknown key; did you mean 'retrieve_locations'?; allowed: {SECTION_KEYS}",
    ),
    section(
        "no staging memory for the linker",
        f"tiers: {{{NVME}}}\nlinker: {{staging: 0}}",
        "hicache_ext.linker.staging: the number 0 is less than 1MiB; allowed: a size such as 2GiB, at least 1MiB",
    ),
    section(
        "a load that is not waited for",
        f"tiers: {{{NVME}}}\nlinker: {{load_timeout: 1ms}}",
        "hicache_ext.linker.load_timeout: the text '1ms' is less than 10ms; "
        "allowed: a duration from 10ms to 1h, such as 5s",
    ),
    section(
        "an SGLang key inside the section",
        f"tiers: {{{NVME}}}\ninterface_v1: 1",
        "hicache_ext.interface_v1: unknown key; it belongs at the top level of the file; allowed: " + SECTION_KEYS,
    ),
    section(
        "a misspelt role",
        f"tiers: {{{NVME}}}\nrole: prefil",
        "hicache_ext.role: the text 'prefil' is not accepted; did you mean 'prefill'?; "
        "allowed: auto, prefill, decode, both",
    ),
    section(
        "a tier name with a capital",
        "tiers: {NVMe: {type: file, path: /mnt/a, capacity: 1GiB}}",
        "hicache_ext.tiers.NVMe: not a tier name; allowed: a lower-case letter, then lower-case letters, digits, '_' "
        "and '-'",
    ),
    section(
        "a location that does not exist",
        two("retrieve_locations: [nvme, pol]"),
        "hicache_ext.retrieve_locations[1]: no tier is named 'pol'; did you mean 'pool'?; allowed: nvme, pool",
    ),
    section(
        "a location listed twice",
        two("store_locations: [nvme, nvme]"),
        "hicache_ext.store_locations[1]: 'nvme' is listed twice; allowed: each tier once",
    ),
    section(
        "a location that is not in a list",
        two("store_locations: nvme"),
        "hicache_ext.store_locations: the text 'nvme' is not accepted; allowed: a list of tier names",
    ),
    section(
        "a prefill node that reads nowhere",
        two("retrieve_locations: []\nrole: prefill"),
        "hicache_ext.retrieve_locations: must not be empty with role prefill: only a decode node may read from no "
        "tier; allowed: nvme, pool",
    ),
    section(
        "a decode node that neither reads nor writes",
        two("retrieve_locations: []\nstore_locations: []\nrole: decode"),
        "hicache_ext.store_locations: retrieve_locations and store_locations are both empty, so that no tier is ever "
        "used; allowed: nvme, pool",
    ),
    section(
        "promotion to no tier",
        two("promote_to: ssd"),
        "hicache_ext.promote_to: no tier is named 'ssd'; allowed: nvme, pool",
    ),
    section(
        "promotion to a tier that is not read",
        two("promote_to: pool\nretrieve_locations: [nvme]"),
        "hicache_ext.promote_to: 'pool' is not in retrieve_locations, so that what is promoted would never be read; "
        "allowed: leave it out",
    ),
    section(
        "promotion with a single tier",
        f"tiers: {{{NVME}}}\npromote_to: nvme",
        "hicache_ext.promote_to: 'nvme' is the last of retrieve_locations, so that nothing is ever promoted to it; "
        "allowed: leave it out with one location",
    ),
    section(
        "promotion to the last tier",
        two("promote_to: pool"),
        "hicache_ext.promote_to: 'pool' is the last of retrieve_locations, so that nothing is ever promoted to it; "
        "allowed: nvme",
    ),
    section(
        "a model that is a name",
        f"tiers: {{{NVME}}}\nmodel: llama",
        "hicache_ext.model: text is not accepted; allowed: a mapping with id, revision, fingerprint, weights_epoch",
    ),
    section(
        "a revision that YAML reads as a number",
        f"tiers: {{{NVME}}}\nmodel: {{revision: 1234567}}",
        "hicache_ext.model.revision: the number 1234567 is not text; put it in quotes; allowed: text",
    ),
    section(
        "a revision that YAML reads as a date",
        f"tiers: {{{NVME}}}\nmodel: {{revision: 2026-01-02}}",
        "hicache_ext.model.revision: a date is not text; put it in quotes; allowed: text",
    ),
    section(
        "an empty model name",
        f"tiers: {{{NVME}}}\nmodel: {{id: ''}}",
        "hicache_ext.model.id: the text '' is empty or has unprintable characters; allowed: text",
    ),
    section(
        "a short dtype",
        f"tiers: {{{NVME}}}\nkv_dtype: fp8",
        "hicache_ext.kv_dtype: the text 'fp8' is not accepted; "
        "allowed: the whole name of a dtype, such as bfloat16, float16, fp8_e4m3 or fp8_e5m2",
    ),
    # A tier
    section(
        "a tier that is a path",
        "tiers: {nvme: /mnt/a}",
        f"{N}: text is not accepted; allowed: a mapping with a type and its settings",
    ),
    section(
        "a password among the tiers",
        f"tiers: {{{NVME}, password: hunter2}}",
        "hicache_ext.tiers.password: text is not accepted; allowed: a mapping with a type and its settings",
    ),
    section("a tier without a type", "tiers: {nvme: {path: /mnt/a}}", f"{N}.type: required; allowed: {TYPES}"),
    section(
        "a type of tier that does not exist",
        "tiers: {pool: {type: teapot, master: '10.0.0.1:50051'}}",
        f"hicache_ext.tiers.pool.type: unknown tier type 'teapot'; allowed: {TYPES}",
    ),
    tier(
        "a misspelt tier type",
        "type: fille",
        f"{N}.type: unknown tier type 'fille'; did you mean 'file'?; allowed: {TYPES}",
    ),
    tier(
        "a misspelt capacity",
        "capacity: -\ncapcity: 1GiB",
        f"{N}.capacity: required; allowed: {CAPACITY}\n"
        f"{N}.capcity: unknown key; did you mean 'capacity'?; allowed: {TIER_KEYS}",
    ),
    tier(
        "an unknown key that holds a password", "password: hunter2", f"{N}.password: unknown key; allowed: {TIER_KEYS}"
    ),
    tier("no capacity", "capacity: -", f"{N}.capacity: required; allowed: {CAPACITY}"),
    tier(
        "slabs without a capacity",
        "capacity: unlimited\nlayout: slab",
        f"{N}.capacity: the slab layout preallocates its files; allowed: a size such as 512GiB",
    ),
    tier(
        "page files past the page cache",
        "layout: pages\nio: direct",
        f"{N}.io: 'direct' needs layout slab: page files are not aligned; allowed: auto, buffered",
    ),
    tier("no path", "path: -", f"{N}.path: required; allowed: {PATH}"),
    tier("an empty capacity", "capacity: ~", f"{N}.capacity: an empty value is not accepted; allowed: {CAPACITY}"),
    tier(
        "an ambiguous unit",
        "capacity: 512M",
        f"{N}.capacity: the unit 'M' is ambiguous; write MB or MiB; allowed: {SIZE}",
    ),
    tier(
        "a unit in the wrong case",
        "capacity: 2tib",
        f"{N}.capacity: unknown unit 'tib'; did you mean 'TiB'?; allowed: {SIZE}",
    ),
    tier(
        "a size in quotes without a unit",
        "capacity: '1048576'",
        f"{N}.capacity: the text '1048576' has no unit; allowed: {SIZE}",
    ),
    tier("a negative size", "capacity: -1GiB", f"{N}.capacity: the text '-1GiB' is negative; allowed: {CAPACITY}"),
    tier(
        "a size that is too small",
        "capacity: 1000",
        f"{N}.capacity: the number 1000 is less than 1MiB; allowed: {CAPACITY}",
    ),
    tier(
        "a size that is a switch",
        "capacity: true",
        f"{N}.capacity: the value true is not accepted; allowed: {CAPACITY}",
    ),
    tier(
        "a size that is infinite",
        "capacity: .inf",
        f"{N}.capacity: the number inf is not accepted; allowed: {CAPACITY}",
    ),
    tier(
        "a size of ten exbibytes",
        "capacity: 10EiB",
        f"{N}.capacity: the text '10EiB' is 8EiB or more; allowed: {CAPACITY}",
    ),
    tier("a ttl without a value", "ttl: ~", f"{N}.ttl: an empty value is not accepted; allowed: {TTL}"),
    tier("a ttl that is a switch", "ttl: true", f"{N}.ttl: the value true is not accepted; allowed: {TTL}"),
    tier("a ttl without a unit", "ttl: '7'", f"{N}.ttl: the text '7' has no unit; allowed: {TTL}"),
    tier("a ttl in weeks", "ttl: 1w", f"{N}.ttl: unknown unit 'w'; did you mean days? A week is 7d; allowed: {TTL}"),
    tier("no ttl at all", "ttl: 0", f"{N}.ttl: the number 0 is less than 1s; allowed: {TTL}"),
    tier("a ttl of two years", "ttl: 730d", f"{N}.ttl: the text '730d' is longer than a year (8760h); allowed: {TTL}"),
    tier(
        "admission that learns nothing",
        "admission: learn",
        f"{N}.admission: the text 'learn' is not accepted; did you mean 'learned'?; allowed: all, learned",
    ),
    tier(
        "a budget for ever",
        "write_budget: 20TiB",
        f"{N}.write_budget: the text '20TiB' does not say in what time; allowed: {BUDGET}",
    ),
    tier(
        "a budget by the week",
        "write_budget: 20TiB/week",
        f"{N}.write_budget: the text '20TiB/week' has an unknown unit of time; allowed: {BUDGET}",
    ),
    tier(
        "a budget of nothing", "write_budget: 0B/day", f"{N}.write_budget: nothing could be written; allowed: {BUDGET}"
    ),
    tier(
        "a budget in disk writes",
        "dwpd: 1",
        f"{N}.dwpd: there is no such key any more: write_budget bounds what is written, and one disk write a day of"
        " 3.84TB is 3.84TB/day; remove it",
    ),
    tier(
        "the size of a disk",
        "disk_size: 4TB",
        f"{N}.disk_size: there is no such key any more: write_budget bounds what is written; remove it",
    ),
    tier("a relative path", "path: cache", f"{N}.path: 'cache' is not an absolute path; allowed: {PATH}"),
    tier("a path with a tilde", "path: ~/cache", f"{N}.path: '~/cache' is not an absolute path; allowed: {PATH}"),
    tier("a path that goes up", "path: /mnt/a/../b", f"{N}.path: '/mnt/a/../b' contains '..'; allowed: {PATH}"),
    tier(
        "the root directory", "path: //", f"{N}.path: the root directory cannot be a cache directory; allowed: {PATH}"
    ),
    tier("no paths", "path: []", f"{N}.path: the list is empty; allowed: {PATH}"),
    tier("a path that is a number", "path: [/mnt/a, 5]", f"{N}.path[1]: the number 5 is not accepted; allowed: {PATH}"),
    tier(
        "the same path twice",
        "path: [/mnt/a, /mnt/b, /mnt/a/]",
        f"{N}.path[2]: '/mnt/a/' is the same directory as path[0]; allowed: distinct directories",
    ),
    tier(
        "a path inside another",
        "path: [/mnt/a, /mnt/a/b]",
        f"{N}.path[1]: '/mnt/a/b' is inside path[0]; allowed: distinct directories",
    ),
    section(
        "two tiers in one directory",
        f"tiers:\n  {NVME}\n  pool: {{type: file, path: [/mnt/b, /mnt/a/x], capacity: 1GiB}}",
        "hicache_ext.tiers.pool.path: a directory of this tier is inside one of tier 'nvme'; "
        "allowed: directories of one tier only",
    ),
    tier(
        "a template per process",
        "path: '/mnt/{pid}'",
        f"{N}.path: the template {{pid}} is not offered: a cache directory serves all ranks and starts of "
        f"a server; allowed: {TEMPLATES}",
    ),
    tier("an unknown template", "path: '/mnt/{host}'", f"{N}.path: unknown template '{{host}}'; allowed: {TEMPLATES}"),
    tier(
        "half a template",
        "path: '/mnt/{hostname'",
        f"{N}.path: '/mnt/{{hostname' has a single '{{'; allowed: {TEMPLATES}",
    ),
    tier(
        "a template of an unset variable",
        "path: '/mnt/{env:HICACHE_EXT_TEST_UNSET}'",
        f"{N}.path: the environment variable HICACHE_EXT_TEST_UNSET is not set; allowed: a variable with a value",
    ),
    tier(
        "a misspelt layout",
        "layout: page",
        f"{N}.layout: the text 'page' is not accepted; did you mean 'pages'?; allowed: auto, pages, slab",
    ),
    tier("io that is a switch", "io: on", f"{N}.io: the value true is not accepted; allowed: auto, direct, buffered"),
    tier("no threads", "threads: 0", f"{N}.threads: the number 0 is not accepted; allowed: 1 to 64, or auto"),
    tier(
        "a key that is gone",
        "open_files: 512",
        f"{N}.open_files: there is no such key any more: "
        "a process keeps at most 512 files of slabs open per path; remove it",
    ),
    tier("too many threads", "threads: 65", f"{N}.threads: the number 65 is not accepted; allowed: 1 to 64, or auto"),
    tier(
        "a switch in words", "required: 'yes'", f"{N}.required: the text 'yes' is not accepted; allowed: true or false"
    ),
    Wrong(
        "a wrong tier in JSON",
        "json",
        '{"backend_name": "hicache_ext", "module_path": "hicache_ext.storage.backend", "class_name": '
        '"HiCacheExtBackend", "interface_v1": 1, "hicache_ext": {"tiers": {"nvme": {"type": "file", "path": "/a", '
        '"capacity": 1e12}}}}',
        f"{N}.capacity: the number 1000000000000.0 is not accepted; allowed: {CAPACITY}",
    ),
    Wrong(
        "a wrong tier in TOML",
        "toml",
        HEAD.replace(": ", " = '").replace("\n", "'\n").replace("'1'", "1")
        + "[hicache_ext.tiers.nvme]\ntype = 'file'\npath = '/mnt/a'\ncapacity = '1Gi'\n",
        f"{N}.capacity: the unit 'Gi' is ambiguous; write GB or GiB; allowed: {SIZE}",
    ),
]


@pytest.mark.parametrize("wrong", WRONG_FILES, ids=lambda wrong: wrong.name)
def test_a_wrong_file_is_answered_with_one_exact_sentence(wrong: Wrong, tmp_path: Path) -> None:
    file = tmp_path / f"hicache.{wrong.suffix}"
    file.write_text(wrong.text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    said = str(raised.value).replace(str(file), "FILE")
    expected = wrong.sentence
    assert said == expected
    assert "hunter2" not in said
    assert "pydantic" not in said.lower()


def test_the_names_of_the_wrong_files_are_distinct() -> None:
    assert len({wrong.name for wrong in WRONG_FILES}) == len(WRONG_FILES) >= 30


def test_every_wrong_place_of_a_file_is_reported_in_one_error(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(
        HEAD.replace("interface_v1: 1", "interface_v1: '1'")
        + "hicache_ext:\n  role: prefil\n  tiers:\n    nvme: {type: file, path: cache, capacity: 1G, io: fast}\n"
        "    pool: {type: teapot}\n  retrieve_locations: [nvme, pol]\n  promote: nvme\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    keys = [error.key for error in raised.value.errors]
    assert keys == [
        "interface_v1",
        "hicache_ext.role",
        "hicache_ext.tiers.nvme.path",
        "hicache_ext.tiers.nvme.capacity",
        "hicache_ext.tiers.nvme.io",
        "hicache_ext.tiers.pool.type",
        "hicache_ext.promote",
    ]
    assert str(raised.value).splitlines() == [str(error) for error in raised.value.errors]
    assert raised.value.key == "interface_v1"


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (
            "retrieve_locations: [nvme, pol]\nstore_locations: [nvme, nvme]\n"
            "promote_to: ssd\nstore_policies: {p: sync}",
            ["retrieve_locations[1]", "store_locations[1]", "store_policies", "promote_to"],
        ),
        (
            "record: {path: /mnt/a}\ntenants: {a: {lease: 2h, share: 90%}, b: {share: 20%}}\n"
            "roles: {prefill: {retrieve_locations: []}, decode: {retrieve_locations: [], store_locations: []}}",
            [
                "record.path",
                "tenants.a.lease",
                "tenants",
                "roles.prefill.retrieve_locations",
                "roles.decode.store_locations",
            ],
        ),
    ],
    ids=["names", "contradictions"],
)
def test_everything_that_does_not_fit_together_is_reported_in_one_error(section: str, keys: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(yaml.safe_load(HEAD) | {"hicache_ext": yaml.safe_load(two(section))})
    assert [error.key for error in raised.value.errors] == [f"hicache_ext.{key}" for key in keys]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file or directory\)$"):
        load_config(tmp_path / "none.yaml")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "dir.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read \(it is no plain file\)$"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"dir\.yaml: cannot be read \(it is no plain file\)$"):
        load_config(tmp_path / "dir.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(HEAD)
    file.chmod(0)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied\)$"):
        load_config(file)


def test_a_file_that_the_system_cannot_read_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"hicache\.yaml: cannot be read \(Permission denied\)$"):
        load_config(tmp_path / "hicache.yaml")


def test_a_file_without_an_extension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory\)$"):
        load_config(tmp_path / "hicache")
    (tmp_path / "hicache").touch()
    with pytest.raises(ConfigError, match=r"the file has no extension; allowed: \.json, \.yaml, \.yml, \.toml$"):
        load_config(tmp_path / "hicache")


def test_a_file_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_bytes(HEAD.encode() + "# für\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"is not UTF-8 text in line 5$"):
        load_config(file)


def test_a_file_of_megabytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hicache.json"
    file.write_bytes(b" " * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="is larger than 1MiB"):
        load_config(file)


@pytest.mark.parametrize(("suffix", "text"), [("json", "[" * 100_000), ("yaml", "[" * 3_000 + "]" * 3_000)])
def test_deep_nesting_is_a_sentence_and_not_a_recursion_error(suffix: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"hicache.{suffix}"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"is nested too deeply$"):
        load_config(file)


def test_a_yaml_alias_to_its_own_parent_ends(tmp_path: Path) -> None:
    file = tmp_path / "hicache.yaml"
    file.write_text(f"{HEAD}hicache_ext: &self\n  tiers: *self\n")
    with pytest.raises(ConfigError, match=r"hicache_ext\.tiers\.tiers"):
        load_config(file)


@pytest.mark.parametrize("source", [None, 5, []])
def test_a_source_that_is_neither_a_mapping_nor_a_path_is_refused(source: object) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a mapping, or a path to a file$"):
        load_config(source)  # type: ignore[arg-type]
