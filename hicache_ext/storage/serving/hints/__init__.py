"""Hints: a decode node tells prefill nodes, over the pool itself, that a conversation's pages are in the pool."""
