"""hicache_ext: a storage layer for SGLang's hierarchical KV cache (HiCache)."""

from __future__ import annotations

__version__ = "0.3.0"
