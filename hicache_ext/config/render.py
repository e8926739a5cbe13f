"""The output of ``hicache-ext config``: an example, a schema for editors, a document as YAML or one line of JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic.json_schema import models_json_schema

from hicache_ext.config.model import ExtraConfig
from hicache_ext.config.tier import tier_types

_STORAGE_FLAGS = "--hicache-storage-backend dynamic --hicache-storage-backend-extra-config"

_EXAMPLE = """\
# Given to SGLang as:
#   --page-size 64 --enable-hierarchical-cache --hicache-storage-backend dynamic \\
#     --hicache-storage-backend-extra-config @hicache.yaml
# Check it with: hicache-ext config check hicache.yaml
backend_name: hicache_ext
module_path: hicache_ext.storage.backend
class_name: HiCacheExtBackend
interface_v1: 1

hicache_ext:
  role: both                       # auto | prefill | decode | both
  tiers:
    nvme:
      type: file
      path: /mnt/nvme0/hicache     # or a list; {hostname} and {env:NAME} are replaced on each node
      capacity: 512GiB             # the whole tier: all paths, ranks and processes; or unlimited
      layout: auto                 # auto | pages | slab; auto: slab on local file systems
      io: auto                     # auto | direct | buffered; auto: measured at start
      threads: auto                # 1 to 64, or auto: measured at start
      # ttl: 7d                    # pages written longer ago are misses; left out: kept until room is needed
      required: true               # false: the server starts even if this tier cannot, and opens it later
      timeout: auto                # of one call: a duration | off | auto (off on local disks, else 1s, writes 5s)
  retrieve_locations: [nvme]       # the order in which tiers are read
  store_locations: [nvme]          # the tiers a write goes to
  model:
    fingerprint: auto              # auto: a digest of the weight files | off | any other text, used as it is
    weights_epoch: "0"             # change it when the weights change under the same name
  kernels:
    engine: auto                   # auto | sglang | reference | batched_dma | triton
"""


def example_config() -> str:
    """Return a complete, commented YAML file to start from."""
    return _EXAMPLE


def json_schema() -> dict[str, Any]:
    """Return a JSON Schema of the document, for editors. ``load_config`` checks more than a schema can express."""
    schema = ExtraConfig.model_json_schema()
    definitions = schema["$defs"]
    definitions.pop("TierConfig", None)
    models = tier_types().values()
    # All at once: pydantic keeps classes of one name apart.
    references, tiers = models_json_schema([(model, "validation") for model in models])
    definitions.update(tiers["$defs"])
    for reference in references.values():
        tier = definitions[reference["$ref"].rpartition("/")[2]]
        tier["required"] = ["type", *tier.get("required", [])]
    definitions["HicacheExtConfig"]["properties"]["tiers"]["additionalProperties"] = {"oneOf": [*references.values()]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hicache_ext"}


def as_yaml(document: Mapping[str, Any]) -> str:
    """Format ``document`` as YAML, keys in written order."""
    return yaml.safe_dump(dict(document), sort_keys=False, width=120, allow_unicode=True)


def as_inline_json(document: Mapping[str, Any]) -> str:
    """Format ``document`` as one line of JSON for the launch flag, in place of a file."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


_PAGES = {
    "--page-size 64": "whole pages are stored: larger ones are fewer reads, smaller ones lose less of a prompt",
    "--hicache-mem-layout page_first": "a page lies in one or two pieces per pool, not in two per layer",
    "--hicache-io-backend kernel": "what page_first is copied with",
}
"""Flags that affect the bytes of a page: they must be equal on all servers that share pages."""
_SERVING = {
    "--hicache-ratio 2": "host memory (L2) for twice the device's tokens",
    "--hicache-write-policy write_through": "a page is stored when it is computed, not when the device is full",
    "--hicache-storage-prefetch-policy timeout": "best_effort would read nothing on an idle server",
}
_WATCHING = {"--enable-metrics": "what hicache-ext stats, alerts and the dashboard look at"}
_NOT_WITH_LINKER = {
    "without --enable-hierarchical-cache, --hicache-storage-backend": "SGLang takes one door of the two",
}
_DECODING = {"--hicache-ratio 1": "host memory for pages on their way to the pool"}


def chosen_flags(role: str, *, linker: bool = False) -> dict[str, str]:
    """Return SGLang's own flags for a server of this role, and the reasons; ``linker``: with the external linker."""
    if linker:
        return {"--page-size 64": _PAGES["--page-size 64"], **_WATCHING, **_NOT_WITH_LINKER}
    return {**_PAGES, **(_DECODING if role == "decode" else _SERVING), **_WATCHING}


def launch_lines(file: str, role: str, *, linker: bool = False) -> list[str]:
    """Return the launch arguments of a server with the configuration in ``file``, one line per element; ``linker``:
    with SGLang's external linker in place of its host cache."""
    parts = ["python -m sglang.launch_server --model-path MODEL"]
    if role in ("prefill", "decode"):
        parts.append(f"--disaggregation-mode {role}")
    if linker:
        given = shlex.quote(as_inline_json(linker_config({"config_file": file})))
        return [*parts, "--page-size 64", *_WATCHING, _LINKER_FLAGS, f"{_LINKER_CONFIG} {given}"]
    door = "--disaggregation-decode-enable-offload-kvcache" if role == "decode" else "--enable-hierarchical-cache"
    return [*parts, door, *chosen_flags(role), f"{_STORAGE_FLAGS} {shlex.quote('@' + file)}"]


LINKER_MODULE, LINKER_CLASS = "hicache_ext.sglang.linker", "HiCacheExtLinker"
_LINKER_FLAGS = "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic"
_LINKER_CONFIG = "--unified-cache-external-linker-config"


def linker_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of ``--unified-cache-external-linker-config`` around our part."""
    return {"linker": LINKER_CLASS, "linker_module_path": LINKER_MODULE, "linker_extra_config": dict(extra)}
