"""Copies between host pools and device pools: geometry, engines, and the hooks that give them to SGLang."""
