"""The PageStore contract: what a tier promises, its wrapper, the registry of tier types, diagnosis."""
