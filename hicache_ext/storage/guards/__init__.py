"""Guards: wrappers around any PageStore that keep inference alive when a tier is slow, dead or failing.

``composition.guarded`` puts them around a tier; docs/guards.md says what each does and why in that order.
"""
