"""The Mooncake tier: pages in the memory of a Mooncake Store cluster that runs already."""
