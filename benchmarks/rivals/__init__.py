"""The strongest rivals that can be installed, as contenders that the package's own harness (hicache_ext.bench) runs."""
