"""The CPU rig's Gated DeltaNet: the same numbers in one piece, in two, token by token, and in transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from hicache_ext.testing.sglang_cpu import declare_torchvision_operators
from tests.rigs.gdn_reference import (
    CHUNK,
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    rms_norm_gated,
    track_mamba_states,
)

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # importing transformers' model takes its time

HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
LENGTHS = (150, 70)
CU_SEQLENS = torch.tensor([0, 150, 220])
SLOTS = torch.tensor([3, 1])


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(LENGTHS)
    return {
        "q": noise(1, tokens, HEADS, KEY_DIM),
        "k": noise(1, tokens, HEADS, KEY_DIM),
        "v": noise(1, tokens, VALUE_HEADS, VALUE_DIM),
        "a": noise(tokens, VALUE_HEADS),
        "b": noise(tokens, VALUE_HEADS),
        "A_log": noise(VALUE_HEADS),
        "dt_bias": noise(VALUE_HEADS),
        "states": noise(5, VALUE_HEADS, VALUE_DIM, KEY_DIM),
    }


def step_by_step(inputs: dict[str, torch.Tensor], begin: int, end: int, state: torch.Tensor) -> torch.Tensor:
    """Transformers' recurrence over the tokens of one sequence: the last state, [V, D, K]."""
    declare_torchvision_operators()
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    g, beta = fused_gdn_gating_cpu(inputs["A_log"], inputs["a"], inputs["b"], inputs["dt_bias"])
    share = VALUE_HEADS // HEADS
    _, last = torch_recurrent_gated_delta_rule(
        inputs["q"][:, begin:end].repeat_interleave(share, 2),
        inputs["k"][:, begin:end].repeat_interleave(share, 2),
        inputs["v"][:, begin:end],
        g[:, begin:end],
        beta[:, begin:end],
        initial_state=state.transpose(-1, -2).unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return last[0].transpose(-1, -2)


def whole(inputs: dict[str, torch.Tensor], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    declare_torchvision_operators()
    g, beta = fused_gdn_gating_cpu(inputs["A_log"], inputs["a"], inputs["b"], inputs["dt_bias"])
    output, _, before = chunk_gated_delta_rule_cpu(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g,
        beta,
        initial_state=states,
        initial_state_indices=SLOTS,
        cu_seqlens=CU_SEQLENS,
        use_qk_l2norm_in_kernel=True,
    )
    return output, before


def test_sequences_end_in_the_states_of_transformers_recurrence(inputs: dict[str, torch.Tensor]) -> None:
    states = inputs["states"].clone()
    _, before = whole(inputs, states)
    for number, slot in enumerate(SLOTS.tolist()):
        begin, end = CU_SEQLENS[number].item(), CU_SEQLENS[number + 1].item()
        expected = step_by_step(inputs, int(begin), int(end), inputs["states"][slot])
        torch.testing.assert_close(states[slot], expected, rtol=1e-4, atol=1e-4)
    for untouched in (0, 2, 4):
        assert torch.equal(states[untouched], inputs["states"][untouched])
    # Before chunks 0, 1, 2 of the first sequence and 0, 1 of the second: what SGLang keeps for its prefix cache.
    assert before.shape[1] == 5
    expected = step_by_step(inputs, 0, 2 * CHUNK, inputs["states"][3])
    torch.testing.assert_close(before[0, 2], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(before[0, 3], inputs["states"][1])


def test_a_token_at_a_time_gives_what_the_whole_sequence_gives(inputs: dict[str, torch.Tensor]) -> None:
    at_once, stepped = inputs["states"].clone(), inputs["states"].clone()
    output, _ = whole(inputs, at_once)
    for token in range(LENGTHS[1]):
        # The first sequence is padding here.
        rows = torch.tensor([0, LENGTHS[0] + token])
        step = fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=inputs["A_log"],
            dt_bias=inputs["dt_bias"],
            q=inputs["q"][:, rows],
            k=inputs["k"][:, rows],
            v=inputs["v"][:, rows],
            a=inputs["a"][rows],
            b=inputs["b"][rows],
            initial_state_source=stepped,
            initial_state_indices=torch.tensor([-1, 1]),
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(step[0, 1], output[0, LENGTHS[0] + token], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(stepped[1], at_once[1], rtol=1e-4, atol=1e-4)
    for untouched in (0, 2, 3, 4):
        assert torch.equal(stepped[untouched], inputs["states"][untouched])


def test_a_convolution_continues_from_its_state() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(5, 40, generator=generator), torch.randn(5, 4, generator=generator)
    states = torch.randn(3, 5, 3, generator=generator)

    def convolve(begin: int, end: int, *, continues: bool) -> torch.Tensor:
        return causal_conv1d_fn_cpu(
            x[:, begin:end],
            weight,
            None,
            activation="silu",
            conv_states=states,
            has_initial_state=torch.tensor([continues]),
            cache_indices=torch.tensor([2]),
            query_start_loc=torch.tensor([0, end - begin]),
        )

    expected = functional.silu(functional.conv1d(functional.pad(x, (3, 0)).unsqueeze(0), weight.unsqueeze(1), groups=5))
    # Two tokens are fewer than a state holds; the last ones come one by one.
    parts = [convolve(0, 2, continues=False), convolve(2, 30, continues=True)]
    for token in range(30, 40):
        row = x[:, token].unsqueeze(0)
        step = causal_conv1d_update_cpu(row, states, weight, None, "silu", conv_state_indices=torch.tensor([2]))
        parts.append(step.transpose(0, 1))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected[0])
    assert torch.equal(states[2], x[:, -3:])


def test_the_gated_norm_is_that_of_transformers() -> None:
    declare_torchvision_operators()
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    generator = torch.Generator().manual_seed(2)
    x, gate = torch.randn(7, VALUE_DIM, generator=generator), torch.randn(7, VALUE_DIM, generator=generator)
    norm = Qwen3NextRMSNormGated(VALUE_DIM)
    norm.weight.data.copy_(torch.randn(VALUE_DIM, generator=generator))
    torch.testing.assert_close(rms_norm_gated(x, gate, norm.weight, None, eps=1e-6), norm(x, gate))


@pytest.mark.parametrize("all_layers", [False, True])
def test_tracked_states_are_copied_to_their_slots_and_no_others(all_layers: bool) -> None:
    conv, recurrent = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 4, 6, 8)
    if not all_layers:
        conv, recurrent = conv[0], recurrent[0]
    before = [conv.clone(), recurrent.clone()]
    sources, targets = torch.tensor([1, 2, 0]), torch.tensor([3, 4, 0])
    track_mamba_states(conv, recurrent, sources, torch.tensor([True, False, False]), targets, 2)
    slot_axis = 1 if all_layers else 0
    for old, new in zip(before, (conv, recurrent), strict=True):
        expected = old.clone()
        expected.select(slot_axis, 3).copy_(old.select(slot_axis, 1))
        assert torch.equal(new, expected)
