"""FIXED: where users and checks outside the project import the contract from."""

from hicache_ext.storage.contract.store import GetResult, PageBatch, PageStore, SetResult

__all__ = ["GetResult", "PageBatch", "PageStore", "SetResult"]
