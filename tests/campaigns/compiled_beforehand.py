"""Imported by the process that a campaign forks its processes from: the file tier's code, and its compiled code."""

from hicache_ext.storage.tiers.file.slab.compiled_code import wait_for_compiled_code

wait_for_compiled_code()
