"""The slab layout of the file tier: pages in slots of preallocated files, an index in LMDB. For local file systems."""
