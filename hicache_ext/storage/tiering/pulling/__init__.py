"""Pull or recompute: what tiers and prefill batches take, and the rule that compares them."""
