"""Imported by the process that a campaign forks its processes from: what they import."""

import tests.campaigns.slab_insides
import tests.campaigns.slab_workers  # noqa: F401
