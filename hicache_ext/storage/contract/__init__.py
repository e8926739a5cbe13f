"""The PageStore contract: the promises of a tier, its wrapper, the registry of tier types, diagnosis."""
