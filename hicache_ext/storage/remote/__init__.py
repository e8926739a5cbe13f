"""Tiers that are reached over the network and that people already run: Redis/Valkey, object stores."""
