"""The slab layout of the file tier: slots of preallocated files, an index in memory. For local file systems."""
