"""What all ranks of a deployment must decide alike."""

from __future__ import annotations

from typing import Any

import torch


def agreed(params: Any, mine: bool) -> bool:
    """Whether it is so on every rank that computes the same requests; each of them must ask.

    The groups are those in which SGLang's cache agrees (``UnifiedRadixCache._all_reduce_attn_groups``).
    """
    ranks = torch.distributed
    groups = [
        group
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group)
        if group is not None and ranks.get_world_size(group=group) > 1
    ]
    if not groups and params.tp_cache_group is not None and ranks.get_world_size(group=params.tp_cache_group) > 1:
        groups = [params.tp_cache_group]
    answer = torch.tensor([int(mine)], dtype=torch.int)
    for group in groups:
        ranks.all_reduce(answer, op=ranks.ReduceOp.MIN, group=group)
    return bool(answer.item())
