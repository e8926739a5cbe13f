"""Imported by the process that a campaign forks its processes from: what they import."""

import tests.campaigns.crew  # noqa: F401
