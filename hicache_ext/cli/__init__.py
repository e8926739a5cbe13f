"""The command line ``hicache-ext``."""
