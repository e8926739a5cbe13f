"""FIXED: the module that ``module_path`` of SGLang's configuration names."""

from hicache_ext.sglang.backend import HiCacheExtBackend

__all__ = ["HiCacheExtBackend"]
