"""Imported by the process that a campaign forks its processes from: what they import, and compiled code."""

import tests.campaigns.slab_insides
import tests.campaigns.slab_workers  # noqa: F401
from hicache_ext.storage.tiers.file.slab.loading import wait_for_compiled_code

wait_for_compiled_code()
