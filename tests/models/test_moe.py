"""Routing compared with a loop over tokens, and expert GEMMs compared with a loop over experts.

A pair is a token and one of the experts that the router selected for the token.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn import Capability
from pallas_attn.models.config import PRESETS, DeepSeekConfig
from pallas_attn.models.decoder.layers import MLP
from pallas_attn.models.moe import dispatch, expert_gemms, router, split_experts
from pallas_attn.models.moe.experts import ClampedSwiglu, Experts, SharedExperts
from pallas_attn.models.moe.kernels import all_expert_gemm, gather_gemm, grouped_gemm, pipeline, row_tiles, swap_ab_gemm
from pallas_attn.models.moe.layer import MoE
from pallas_attn.models.moe.router import Router
from tests.kit.slow_cases import slow_cases
from tests.models import oracle

V3 = PRESETS["v3-tiny"]
V2 = dataclasses.replace(PRESETS["v2-lite-tiny"], n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4)
ROUTINGS = {
    "greedy": V2,
    "group_limited_greedy": dataclasses.replace(V2, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    "noaux_tc": V3,
    "noaux_tc, all groups": dataclasses.replace(V3, topk_group=4, norm_topk_prob=False),
}


def compile_for(monkeypatch, version: tuple[int, int]) -> None:
    """Make the code under test see a GPU of this compute capability with 132 multiprocessors."""
    for module in (dispatch, expert_gemms, pipeline):
        monkeypatch.setattr(module, "capability", lambda: Capability("gpu", version, 132))


def route(config: DeepSeekConfig, x: jax.Array, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Route tokens whose router logits are `x`. Return the selected experts and their weights."""
    config = dataclasses.replace(config, hidden_size=x.shape[1])
    gate = Router(config)
    gate.weight[...] = jnp.eye(x.shape[1], dtype=jnp.float32)
    if gate.e_score_correction_bias is not None:
        gate.e_score_correction_bias[...] = jnp.asarray(bias)
    experts, weights = gate(x)
    assert weights.dtype == jnp.float32
    return np.asarray(experts), np.asarray(weights)


@pytest.mark.parametrize("config", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["distinct scores", "all scores equal"])
def test_router_equals_loop_over_tokens(rng, config: DeepSeekConfig, spread: float):
    logits = (spread * rng.standard_normal((33, 16))).astype(np.float32)
    # All biased scores are negative. If masked groups had score 0 instead of -inf, their experts would be selected.
    bias = (spread * (rng.standard_normal(16) - 1)).astype(np.float32)
    experts, weights = route(config, jnp.asarray(logits), bias)
    for row in range(len(logits)):
        biased = bias if config.topk_method == "noaux_tc" else None
        wanted = oracle.route(config, logits[row].astype(np.float64), biased)
        np.testing.assert_array_equal(experts[row], list(wanted))
        np.testing.assert_allclose(weights[row], list(wanted.values()), rtol=1e-5)


def test_bias_affects_only_selection():
    config = dataclasses.replace(V3, norm_topk_prob=False, routed_scaling_factor=1.0, num_experts_per_tok=1)
    bias = np.zeros(16, np.float32)
    bias[5] = 10.0
    experts, weights = route(config, jnp.zeros((1, 16), jnp.float32), bias)
    assert experts.tolist() == [[5]]
    assert weights.tolist() == [[0.5]]


def test_router_computes_in_float32(rng):
    logits = jnp.asarray(rng.standard_normal((9, 16)), jnp.bfloat16)
    bias = rng.standard_normal(16).astype(np.float32)
    for exact, routed in zip(route(V3, logits.astype(jnp.float32), bias), route(V3, logits, bias), strict=True):
        np.testing.assert_array_equal(routed, exact)


def every_expert(x: np.ndarray, experts: np.ndarray, weights: np.ndarray, gate_up, down) -> np.ndarray:
    out = np.zeros(x.shape)
    for row, (chosen, weight) in enumerate(zip(experts, weights, strict=True)):
        for expert, share in zip(chosen, weight, strict=True):
            gate, up = np.split(x[row].astype(np.float64) @ gate_up[expert], 2)
            out[row] += share * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


def draw_experts(rng, width: int, hidden: int, dtype=np.float32) -> tuple[jax.Array, jax.Array]:
    shapes = (4, width, 2 * hidden), (4, hidden, width)
    gate_up, down = (jnp.asarray(rng.standard_normal(s) * s[1] ** -0.5, dtype) for s in shapes)
    return gate_up, down


CHOICES = {
    "one token": lambda rng: rng.permutation(4)[None, :2],
    "spread": lambda rng: np.stack([rng.permutation(4)[:2] for _ in range(75)]),
    "one expert each": lambda rng: rng.integers(0, 4, (75, 1)),
    "all at one": lambda rng: np.full((75, 1), 3),
    "one left out": lambda rng: np.stack([rng.permutation([0, 1, 3])[:2] for _ in range(75)]),
}


@slow_cases("one token")
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_routed_experts_equal_loop(rng, choose):
    experts = choose(rng)
    gate_up, down = draw_experts(rng, 24, 12)
    x = rng.standard_normal((len(experts), 24)).astype(np.float32)
    weights = rng.uniform(0.1, 1, experts.shape).astype(np.float32)
    out = split_experts.routed_experts(
        jnp.asarray(x), jnp.asarray(experts, jnp.int32), jnp.asarray(weights), Experts(gate_up, down)
    )
    wanted = every_expert(x, experts, weights, np.asarray(gate_up), np.asarray(down))
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_token_of_nans_does_not_affect_others(rng):
    experts = np.tile([[1, 2]], (20, 1))
    gate_up, down = draw_experts(rng, 24, 12)
    x = rng.standard_normal((20, 24)).astype(np.float32)
    weights = jnp.full((20, 2), 0.5, jnp.float32)
    clean = split_experts.routed_experts(
        jnp.asarray(x), jnp.asarray(experts, jnp.int32), weights, Experts(gate_up, down)
    )
    x[7] = np.nan
    out = split_experts.routed_experts(jnp.asarray(x), jnp.asarray(experts, jnp.int32), weights, Experts(gate_up, down))
    others = np.arange(20) != 7
    np.testing.assert_array_equal(np.asarray(out)[others], np.asarray(clean)[others])


@slow_cases("grouped", "swap-AB, more steps than stages", "swap-AB, biased, one block")
@pytest.mark.parametrize(
    ("width", "hidden", "biased", "few"),
    [
        # Slow, because the kernel of the biased case also has one consumer warpgroup.
        pytest.param(128, 64, False, True, id="swap-AB, one consumer", marks=pytest.mark.slow),
        pytest.param(512, 128, False, True, id="swap-AB, more steps than stages"),
        pytest.param(192, 64, True, True, id="swap-AB, biased, one block"),
        pytest.param(256, 128, False, False, id="grouped"),
        pytest.param(192, 64, True, False, id="grouped, biased, three blocks"),
    ],
)
def test_hopper_grouped_equals_blockwise(rng, monkeypatch, width: int, hidden: int, biased: bool, few: bool):
    """The interpreted Hopper kernels equal the portable loop over blocks of rows.

    The groups of rows per expert have partial tiles, and one group is empty.
    """
    monkeypatch.setattr(expert_gemms, "MAX_SWAP_AB_ROWS", 64 if few else 1)
    experts = Experts(*draw_experts(rng, width, hidden, jnp.bfloat16))
    if biased:
        experts = biased_experts(rng, experts)
    sizes = jnp.asarray([21, 0, 74, 5] if few else [21, 0, 204, 69], jnp.int32)
    x = jnp.asarray(rng.standard_normal((100, width)), jnp.bfloat16)
    source = jnp.asarray(rng.integers(0, 100, int(sizes.sum())), jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, row = expert_gemms.hopper_grouped(x, source, experts, sizes)
    x, experts = jax.tree.map(lambda a: a.astype(jnp.float32), (x, experts))
    want, place = expert_gemms.blockwise(x, source, experts, sizes)
    np.testing.assert_allclose(out[row].astype(jnp.float32), want[place], atol=0.06 if biased else 0.03)


def test_hopper_grouped_pairs_in_any_order(rng, monkeypatch):
    """The grouped kernel gives the right results for pairs in any order.

    One of the four experts has no pair. Some pairs have an expert id out of range; their results are undefined.
    """
    experts = Experts(*draw_experts(rng, 128, 64, jnp.bfloat16))
    x = jnp.asarray(rng.standard_normal((50, 128)), jnp.bfloat16)
    expert = jnp.asarray(rng.choice([0, 2, 3, 4], 100), jnp.int32)
    groups, row = dispatch.ExpertGroups.of(expert, 4), jnp.arange(100, dtype=jnp.int32) // 2
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, place = expert_gemms.hopper_grouped_pairs(x, row, expert, groups.place, experts, groups.sizes)
    x, experts = jax.tree.map(lambda a: a.astype(jnp.float32), (x, experts))
    want, places = expert_gemms.blockwise(x, groups.row // 2, experts, groups.sizes)
    has_expert = np.asarray(expert) < 4
    got, want = out[place].astype(jnp.float32), want[places[groups.place]]
    np.testing.assert_allclose(got[has_expert], want[has_expert], atol=0.03)


def test_row_tiles_are_within_groups():
    sizes = np.array([24, 0, 300, 1], np.int32)
    tiles = row_tiles.RowTiles.of(jnp.asarray(sizes), 325, grouped_gemm.TILE_ROWS)
    count = int(tiles.count[0])
    assert [int(x) for x in row_tiles.first_rows(jnp.asarray(sizes))] == [0, 24, 24, 328]
    assert np.asarray(tiles.group)[:count].tolist() == [0, 2, 2, 2, 3]
    assert np.asarray(tiles.start)[:count].tolist() == [0, 24, 152, 280, 328]
    assert np.asarray(tiles.rows)[:count].tolist() == [24, 128, 128, 48, 8]
    assert tiles.start[count - 1] + grouped_gemm.TILE_ROWS <= row_tiles.padded_rows(325, 4, grouped_gemm.TILE_ROWS)


@pytest.mark.parametrize(
    ("columns", "gated", "blocks"),
    [(2816, True, (2, 128)), (2880, False, (3, 64)), (128, True, (2, 64)), (64, False, (1, 64))],
)
def test_column_blocks_of_grouped_gemm(columns: int, gated: bool, blocks: tuple[int, int]):
    assert grouped_gemm.column_blocks(columns, gated=gated) == blocks


def test_unsupported_columns_of_grouped_gemm_raise():
    with pytest.raises(NotImplementedError, match="expected a number of columns divisible by 128, got 192"):
        grouped_gemm.column_blocks(192, gated=True)


@pytest.mark.parametrize(
    ("columns", "gated", "split"),
    [
        (2816, True, (2, 2)),
        (128, True, (1, 2)),
        (2048, False, (2, 2)),
        (128, False, (2, 1)),
        (2880, False, (1, 1)),
    ],
)
def test_column_split_of_swap_ab_gemm(columns: int, gated: bool, split: tuple[int, int]):
    assert swap_ab_gemm.column_split(columns, gated=gated) == split


def test_unsupported_columns_of_swap_ab_gemm_raise():
    with pytest.raises(NotImplementedError, match="expected a number of columns divisible by 64, got 96"):
        swap_ab_gemm.column_split(96, gated=False)


def test_tile_rows_of_swap_ab_gemm():
    rows = [swap_ab_gemm.tile_rows_of(num_rows, 64) for num_rows in (64, 1920, 3456, 4096, 8192)]
    assert rows == [64, 64, 96, 96, 128]


def biased_experts(rng, experts: Experts) -> Experts:
    def draw(weights: jax.Array) -> jax.Array:
        return jnp.asarray(rng.standard_normal((weights.shape[0], weights.shape[2])), weights.dtype)

    return Experts(experts.gate_up, experts.down, draw(experts.gate_up), draw(experts.down), ClampedSwiglu(1.702, 1.5))


def test_biased_experts_equal_loop(rng):
    """Results of experts with biases equal a loop over tokens and their experts."""
    experts = biased_experts(rng, Experts(*draw_experts(rng, 24, 12)))
    x = rng.standard_normal((40, 24)).astype(np.float32)
    chosen = np.stack([rng.permutation(4)[:2] for _ in x])
    weights = rng.uniform(0.1, 1, chosen.shape).astype(np.float32)
    out = split_experts.routed_experts(jnp.asarray(x), jnp.asarray(chosen, jnp.int32), jnp.asarray(weights), experts)
    wanted = np.zeros(x.shape)
    gate_up, down, gate_up_bias, down_bias = (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(experts))
    clamped = 0
    for row, pick in np.ndindex(chosen.shape):
        expert = chosen[row, pick]
        gate, up = np.split(x[row] @ gate_up[expert] + gate_up_bias[expert], 2)
        clamped += np.sum(gate > 1.5) + np.sum(np.abs(up) > 1.5)
        gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        wanted[row] += weights[row, pick] * (hidden @ down[expert] + down_bias[expert])
    assert clamped > 100
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("version", "width", "dtype", "takes"),
    [
        ((9, 0), 128, jnp.bfloat16, True),
        ((9, 0), 192, jnp.bfloat16, True),
        ((8, 0), 128, jnp.bfloat16, False),
        ((9, 0), 128, jnp.float32, False),
        ((9, 0), 96, jnp.bfloat16, False),
    ],
)
def test_hopper_supports_device_and_weights(monkeypatch, version: tuple[int, int], width: int, dtype, takes: bool):
    gate_up, down = (jnp.zeros(shape, dtype) for shape in ((4, width, 128), (4, 64, width)))
    compile_for(monkeypatch, version)
    assert expert_gemms.hopper_supports(Experts(gate_up, down)) == takes


def test_row_by_row_for_few_pairs(monkeypatch, rng):
    """On a GPU, rows are multiplied one by one if there are not more pairs than experts."""
    experts = biased_experts(rng, Experts(*draw_experts(rng, 24, 12)))
    compile_for(monkeypatch, (8, 0))
    assert [rows for rows in range(6) if dispatch.few_rows_method(rows, rows, experts) is expert_gemms.row_by_row] == [
        0,
        1,
        2,
        3,
        4,
    ]
    x, chosen = jnp.asarray(rng.standard_normal((1, 24)), jnp.float32), jnp.asarray([[3, 1]], jnp.int32)
    weights = jnp.asarray([[0.25, 0.75]], jnp.float32)
    few = split_experts.routed_experts(x, chosen, weights, experts)
    monkeypatch.setattr(dispatch, "few_rows_method", lambda *_, **__: None)
    np.testing.assert_allclose(few, split_experts.routed_experts(x, chosen, weights, experts), atol=1e-5)


def test_no_few_rows_method_on_cpu(rng):
    assert dispatch.few_rows_method(1, 1, Experts(*draw_experts(rng, 24, 12))) is None


def test_few_rows_method_on_hopper(monkeypatch):
    experts = Experts(jnp.zeros((160, 128, 128), jnp.bfloat16), jnp.zeros((160, 64, 128), jnp.bfloat16))
    compile_for(monkeypatch, (9, 0))
    sizes = (1, 1), (64, 559), (65, 128), (65, 130), (80, 160), (81, 162)
    ways = [dispatch.few_rows_method(rows, pairs, experts) for rows, pairs in sizes]
    assert ways == [expert_gemms.hopper_gather] * 3 + [expert_gemms.row_by_row] * 2 + [None]
    biased = dataclasses.replace(experts, down_bias=jnp.zeros((160, 128), jnp.bfloat16))
    assert dispatch.few_rows_method(64, 560, biased) is None


def test_all_experts_are_read_for_many_pairs_per_expert(monkeypatch):
    experts = Experts(jnp.zeros((160, 128, 128), jnp.bfloat16), jnp.zeros((160, 64, 128), jnp.bfloat16))
    compile_for(monkeypatch, (9, 0))
    assert dispatch.few_rows_method(64, 560, experts) is expert_gemms.hopper_all_experts
    assert dispatch.few_rows_method(64, 559, experts) is expert_gemms.hopper_gather
    assert dispatch.few_rows_method(64, 960, experts, expected=560) is expert_gemms.hopper_all_experts
    assert dispatch.few_rows_method(64, 960, experts, expected=559) is expert_gemms.hopper_gather
    narrow = Experts(jnp.zeros((160, 64, 128), jnp.bfloat16), jnp.zeros((160, 64, 64), jnp.bfloat16))
    assert dispatch.few_rows_method(64, 560, narrow) is expert_gemms.hopper_gather


@slow_cases("one token", "more steps than stages", "biased, odd number of blocks")
@pytest.mark.parametrize(
    ("tokens", "copies", "width", "biased", "most_rows"),
    [(1, 3, 128, False, 128), (9, 2, 640, False, 128), (9, 2, 128, False, 16), (5, 2, 192, True, 128)],
    ids=["one token", "more steps than stages", "more pairs than tile rows", "biased, odd number of blocks"],
)
def test_hopper_gather_equals_row_by_row(
    rng, monkeypatch, tokens: int, copies: int, width: int, biased: bool, most_rows: int
):
    """The interpreted gather GEMM kernel equals XLA's row-by-row products.

    The cases have pairs that share an expert, a pair whose expert id is out of range, and few pairs.
    """
    monkeypatch.setattr(gather_gemm, "MAX_ROWS", most_rows)
    monkeypatch.setattr(expert_gemms, "MAX_PACKED_PAIRS", most_rows)
    experts = Experts(*draw_experts(rng, width, 64, jnp.bfloat16))
    if biased:
        experts = biased_experts(rng, experts)
    x = jnp.asarray(rng.standard_normal((tokens, width)), jnp.bfloat16)
    chosen = np.asarray([rng.permutation([0, 1, 3])[:copies] for _ in range(tokens)], np.int32).reshape(-1)
    chosen[-1] = 4
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = expert_gemms.hopper_gather(x, experts, jnp.asarray(chosen))
    x, experts = jax.tree.map(lambda a: a.astype(jnp.float32), (x, experts))
    want = expert_gemms.row_by_row(x, experts, jnp.asarray(chosen))
    has_expert = chosen < 4
    assert out.shape == want.shape
    np.testing.assert_allclose(out[has_expert].astype(jnp.float32), want[has_expert], atol=0.06 if biased else 0.03)


@slow_cases("True")
@pytest.mark.parametrize("split_k", [False, True])
def test_hopper_gather_with_distinct_experts(rng, monkeypatch, split_k: bool):
    """Results with `are_distinct`, which promises that all pairs have different experts, equal results without it.

    The kernel with `are_distinct` runs with and without split-K.
    """
    monkeypatch.setattr(gather_gemm, "split_k_helps", lambda pairs, shape, are_distinct: split_k and are_distinct)
    experts = Experts(*draw_experts(rng, 128, 128, jnp.bfloat16))
    x, chosen = jnp.asarray(rng.standard_normal((1, 128)), jnp.bfloat16), jnp.asarray([2, 0, 3], jnp.int32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out, want = (
            expert_gemms.hopper_gather(x, experts, chosen, are_distinct=distinct) for distinct in (True, False)
        )
    np.testing.assert_allclose(out.astype(jnp.float32), want.astype(jnp.float32), atol=0.01 * split_k)


def test_split_k_helps_if_ctas_would_be_idle(monkeypatch):
    compile_for(monkeypatch, (9, 0))
    assert gather_gemm.split_k_helps(6, (1408, 2048), True)  # 96 work items for 132 CTAs
    assert not gather_gemm.split_k_helps(6, (1408, 2048), False)
    assert not gather_gemm.split_k_helps(33, (1408, 512), True)  # 132 work items


def test_pairs_link_equal_experts():
    pairs = gather_gemm.Pairs.of(jnp.asarray([5, 2, 9, 5, 2, 5, 0], jnp.int32), 9)
    expert, following, first, count = (np.asarray(array) for array in pairs)
    assert count.tolist() == [3]
    assert first[:3].tolist() == [0, 1, 6]
    assert expert.tolist() == [5, 2, 9, 5, 2, 5, 0]
    assert [following.tolist()[pair] for pair in (0, 1, 3, 4, 5, 6)] == [3, 4, 5, 7, 7, 7]


@pytest.mark.parametrize(("multiprocessors", "ctas"), [(78, 78), (None, pipeline.DEFAULT_CTAS)])
def test_num_ctas_is_number_of_multiprocessors(monkeypatch, multiprocessors: int | None, ctas: int):
    monkeypatch.setattr(pipeline, "capability", lambda: Capability("gpu", (9, 0), multiprocessors))
    assert pipeline.num_ctas() == ctas


@pytest.mark.parametrize("num_shared", [0, 2])
def test_hopper_all_experts_equals_loop(rng, monkeypatch, num_shared: int):
    """The interpreted all-expert GEMM kernel equals a loop over experts.

    The case has an expert without pairs, a pair whose expert id is out of range, more loop iterations than pipeline
    stages, and a number of rows that is not a multiple of 8.
    """
    monkeypatch.setattr(all_expert_gemm, "STAGES", 3)
    experts = Experts(*draw_experts(rng, 256, 64, jnp.bfloat16))
    mlp = shared_experts(rng, 256, 64 * num_shared) if num_shared else None
    x = jnp.asarray(rng.standard_normal((9, 256)), jnp.bfloat16)
    chosen = np.stack([rng.permutation([0, 1, 3])[:2] for _ in range(9)]).astype(np.int32)
    chosen[-1, 0] = 4
    weights = jnp.asarray(rng.uniform(0.1, 1, (9, 2)) * (chosen < 4), jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        shared = None if mlp is None else SharedExperts.of(mlp)
        y = expert_gemms.hopper_all_experts(x, experts, jnp.asarray(chosen.reshape(-1)), shared)
    assert y.shape[0] == (18 if mlp is None else 24 + 2 * 16)
    y = jnp.where(jnp.asarray(np.append(chosen.reshape(-1) < 4, np.ones(len(y) - 18, bool)))[:, None], y, 0)
    out = (
        dispatch.weighted_sum(y, weights, jnp.float32)
        if mlp is None
        else dispatch.sum_with_shared(y, weights, jnp.float32)
    )
    gate_up, down = (np.asarray(w, np.float32) for w in (experts.gate_up, experts.down))
    want = every_expert(np.asarray(x, np.float32), np.minimum(chosen, 3), np.asarray(weights), gate_up, down)
    if mlp is not None:
        want += np.asarray(mlp(x), np.float32)
    np.testing.assert_allclose(out, want, atol=0.05)


def shared_experts(rng, width: int, hidden: int) -> MLP:
    mlp = MLP(width, hidden, jnp.bfloat16)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        shape = linear.weight.shape
        linear.weight[...] = jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.bfloat16)
    return mlp


@pytest.mark.slow
def test_shared_experts_as_more_routed_experts(rng, monkeypatch):
    """Two shared experts give the same results as a separate MLP and as two additional routed experts."""
    config = dataclasses.replace(PRESETS["v2-lite-tiny"], hidden_size=128, moe_intermediate_size=64, n_shared_experts=2)
    layer = MoE(dataclasses.replace(config, n_routed_experts=4, num_experts_per_tok=2), jnp.bfloat16)
    layer.gate.weight[...] = jnp.asarray(rng.standard_normal((128, 4)), jnp.float32)
    gate_up, down = draw_experts(rng, 128, 64, jnp.bfloat16)
    layer.gate_up_proj[...], layer.down_proj[...] = gate_up, down
    layer.shared_experts = shared_experts(rng, 128, 128)
    x = jnp.asarray(rng.standard_normal((5, 128)), jnp.bfloat16)
    want = layer(x)
    monkeypatch.setattr(dispatch, "few_rows_method", lambda *_, **__: expert_gemms.hopper_all_experts)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = layer(x)
    np.testing.assert_allclose(out.astype(jnp.float32), want.astype(jnp.float32), atol=0.05)


def test_shared_experts_of_other_width_do_not_fit(rng):
    experts = Experts(*draw_experts(rng, 128, 64, jnp.bfloat16))
    assert SharedExperts.of(shared_experts(rng, 128, 128)).fit(experts)
    assert not SharedExperts.of(shared_experts(rng, 128, 96)).fit(experts)


def test_chains_link_equal_experts():
    chains = all_expert_gemm.Chains.of(jnp.asarray([3, 1, 3, 4, 1], jnp.int32), 4)
    assert chains.first.tolist() == [5, 1, 5, 0]
    assert chains.next.tolist() == [2, 4, 5, 5, 5]


def test_unsupported_gather_gemm_raises():
    zeros = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    pairs = gather_gemm.Pairs.of(jnp.zeros(136, jnp.int32), 1)
    with pytest.raises(NotImplementedError, match="expected at most 128 rows, got 136"):
        gather_gemm.gather_gemm(gather_gemm.GatherGemm(zeros((136, 64)), zeros((1, 64, 128)), pairs, 136, 1))
    with pytest.raises(NotImplementedError, match="expected a number of columns divisible by 128, got 192"):
        gather_gemm.column_blocks(192, gated=True)


@pytest.mark.parametrize("ties", [False, True])
def test_counting_and_sorting_select_equal_experts(rng, monkeypatch, ties: bool):
    scores = jnp.asarray(rng.integers(0, 9, (7, 24)) / 8 if ties else rng.random((7, 24)), jnp.float32)
    choice = scores + 1
    few = router.best_experts(choice, scores, 5)
    monkeypatch.setattr(router, "MAX_COMPARISONS", 6 * 24**2)
    many = router.best_experts(choice, scores, 5)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one, other)


def test_row_of_nans_selects_valid_experts():
    experts, _ = router.best_experts(jnp.full((2, 8), jnp.nan), jnp.full((2, 8), jnp.nan), 3)
    assert ((experts >= 0) & (experts < 8)).all()


@pytest.mark.parametrize("counted", [0, 1000])
@pytest.mark.parametrize("num_rows", [1, 2, 257])
def test_expert_groups_are_stable_sorted(counted, num_rows, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_COUNTED_PAIRS", counted)
    expert = np.random.default_rng(num_rows).integers(0, 9, num_rows).astype(np.int32)
    groups = dispatch.ExpertGroups.of(jnp.asarray(expert), 11)
    np.testing.assert_array_equal(groups.row, np.argsort(expert, kind="stable"))
    np.testing.assert_array_equal(np.asarray(groups.row)[groups.place], np.arange(num_rows))
    np.testing.assert_array_equal(groups.sizes, np.bincount(expert, minlength=11))
    assert {array.dtype for array in groups} == {jnp.dtype(jnp.int32)}
