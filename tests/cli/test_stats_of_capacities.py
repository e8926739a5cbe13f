"""The lines of ``hicache-ext stats`` that say what other capacities of a tier would serve."""

from __future__ import annotations

from hicache_ext.cli.stats_command import figures, read_samples, table

KNOWS = """\
hicache_ext_tier_up{tier="local",tp_rank="0"} 1
hicache_ext_capacity_bytes{tier="local",tp_rank="0"} 1073741824
hicache_ext_hit_share_at_half{tier="local",tp_rank="0"} 0.1
hicache_ext_hit_share_at_capacity{tier="local",tp_rank="0"} 0.2
hicache_ext_hit_share_at_twice{tier="local",tp_rank="0"} 0.3
hicache_ext_hit_share_at_four_times{tier="local",tp_rank="0"} 0.5
hicache_ext_hit_share_at_half{tier="pool",tp_rank="0"} NaN
"""


def test_stats_has_a_line_of_it() -> None:
    lines = table(None, read_samples(KNOWS))
    assert "local: 10.0 % at half of it, 20.0 % at this one, 30.0 % at twice, 50.0 % at four times" in lines
    assert not any(line.startswith("pool: ") for line in lines)


def test_the_json_of_stats_has_the_shares_and_none_where_a_tier_does_not_know() -> None:
    tiers = {tier["tier"]: tier["hit_share_at"] for tier in figures(None, read_samples(KNOWS))["tiers"]}
    assert tiers == {"local": {"half": 0.1, "capacity": 0.2, "twice": 0.3, "four_times": 0.5}, "pool": {}}
