"""Guards: wrappers around any PageStore that keep inference alive when a tier is slow, dead or failing.

``composition.guarded`` puts them around a tier. What each does: docs/guards.md; why: docs/decisions.
"""
