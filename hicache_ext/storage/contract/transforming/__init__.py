"""Tiers whose pages are encoded or sealed: a wrapper around any store, and its helpers."""
