"""Tiers whose pages are encoded or sealed on their way: a wrapper around any store, and what it needs."""
