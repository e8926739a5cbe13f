"""What a tier of a given size would do, before anybody buys it: traces, models, caches and fleets on paper."""
