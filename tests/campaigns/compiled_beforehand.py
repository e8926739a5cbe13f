"""Imported by the process that a campaign forks its processes from: the file tier's code, and its compiled code."""

from hicache_ext.storage.file.slab.page_moves import compiled_code

compiled_code()
