"""Guards: what keeps inference alive when a tier is slow, dead or failing.

``pipeline.GuardedStore`` applies them to a tier. What each does: docs/guards.md; why: docs/decisions.
"""
