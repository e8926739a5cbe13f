"""Hints: a decode node tells prefill nodes over the pool's own engine that a conversation's pages are in the pool."""
