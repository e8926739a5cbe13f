"""Several tiers as one: order, promotion, writing behind, prefetch, pull or recompute, hot swap."""
