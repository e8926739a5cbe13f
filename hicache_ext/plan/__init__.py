"""What a tier of a given size would do, before anybody buys it: simulated traces, models, caches and fleets."""
