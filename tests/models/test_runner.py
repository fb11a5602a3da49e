"""The runner: transfers to the device, padding of steps, and in-place updates of caches."""

import contextlib
import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL
from pallas_attn.models.config import HeadWindows
from pallas_attn.models.engine import SamplingParams
from pallas_attn.models.engine.compile_options import (
    CONCURRENT,
    CONCURRENT_TOKENS,
    GPU_OPTIONS,
    MESH_OPTIONS,
    WITH_PROMPTS,
    WITHOUT_TRITON,
    gpu_options,
)
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.group_sizes import GroupSizes
from pallas_attn.models.engine.logit_edits import pack_writes
from pallas_attn.models.engine.request import Request
from pallas_attn.models.engine.runner import Runner
from pallas_attn.models.engine.step.packed import PackedStep, RowParameters
from pallas_attn.models.engine.step.plan import ScheduledRow, StepPlan
from tests.kit.shared_steps import ALIKE
from tests.models.engine_case import CONFIG, compile_events, model
from tests.models.filter_case import Third

SIZES = RunnerConfig(
    num_pages=24,
    page_size=4,
    table_pages=6,
    max_num_seqs=4,
    max_prefill_seqs=2,
    decode_buckets=(1, 4),
    prefill_buckets=(8, 16),
)


def row(slot, start, num_tokens, *, samples=True, params=SamplingParams(), prompt=tuple(range(20))):
    return ScheduledRow(Request(slot, prompt, params), slot, start, num_tokens, samples)


def tables(*pages: list[int]) -> np.ndarray:
    return np.array([[[*of_row, *[-1] * (SIZES.table_pages - len(of_row))]] for of_row in pages], np.int32)


MIXED = StepPlan(
    decode=(row(2, 9, 1, params=SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=2**32 - 1)),),
    prefill=(row(0, 4, 5), row(3, 0, 2, samples=False)),
    tables=(tables([5, 1, 7], [3, 9, 2], [11]),),
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(model(), SIZES)


@pytest.mark.parametrize(
    ("num_decode", "prefill", "bucket"),
    [
        (1, [], Bucket(1, 0)),
        (2, [], Bucket(4, 0)),
        (0, [3], Bucket(0, 8)),
        (0, [8, 1], Bucket(0, 16)),
        (1, [2], Bucket(4, 8)),
        (4, [16], Bucket(4, 16)),
    ],
)
def test_step_uses_the_smallest_bucket_that_holds_it(runner, num_decode, prefill, bucket):
    decode = tuple(row(i, 3, 1) for i in range(num_decode))
    plan = StepPlan(decode, tuple(row(i, 0, n) for i, n in enumerate(prefill)), ())
    assert runner.bucket_of([plan]) == bucket
    assert bucket in runner.buckets()


def test_packed_step_unpacks_to_the_plan():
    bucket = Bucket(4, 8)
    packed = PackedStep.pack(SIZES, bucket, MIXED)
    assert packed.dtype == np.int32
    assert packed.shape == (PackedStep.size(SIZES, bucket),)
    step = PackedStep.of(SIZES, bucket, jnp.asarray(packed))
    np.testing.assert_array_equal(step.decode_request_slots, [2, -1, -1, -1])
    np.testing.assert_array_equal(step.decode_kv_lens, [10, 0, 0, 0])
    np.testing.assert_array_equal(step.decode_tables[0][0], [5, 1, 7, -1, -1, -1])
    np.testing.assert_array_equal(step.prefill_tables[0], [[3, 9, 2, -1, -1, -1], [11, *[-1] * 5]])
    np.testing.assert_array_equal(step.prefill_ids[:7], [4, 5, 6, 7, 8, 0, 1])
    np.testing.assert_array_equal(step.cu_q_lens, [0, 5, 7])
    np.testing.assert_array_equal(step.prefill_kv_lens, [9, 2])
    np.testing.assert_array_equal(step.prefill_request_slots, [0, -1])
    parameters = step.row_parameters()
    rows = RowParameters.of(SIZES, parameters.pack()).sampling_rows()
    np.testing.assert_array_equal(rows.temperature, np.array([0.5, 0, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(rows.top_p, np.array([0.25, 0, 0, 0, 1, 1], np.float32))
    assert int(rows.seed[0]) == 2**32 - 1
    np.testing.assert_array_equal(rows.position, [10, 0, 0, 0, 9, 2])


def test_positions_and_slots_of_a_plan():
    step = PackedStep.of(SIZES, Bucket(4, 8), jnp.asarray(PackedStep.pack(SIZES, Bucket(4, 8), MIXED)))
    metadata = step.metadata(SIZES.page_size, jnp.arange(1, dtype=jnp.int32))
    np.testing.assert_array_equal(metadata.positions, [9, 0, 0, 0, 4, 5, 6, 7, 8, 0, 1, 0])
    decode_request_slots = [7 * 4 + 1, -1, -1, -1]
    [group] = metadata.groups
    np.testing.assert_array_equal(group.slots, [*decode_request_slots, 36, 37, 38, 39, 8, 44, 45, -1])


def test_tables_and_slots_of_several_cache_groups():
    heads = HeadWindows((FULL, 4), (0, 0))
    groups = (GroupSizes((0, 2), HeadWindows((FULL,), (0,)), False, 24), GroupSizes((1,), heads, True, 16))
    sizes, bucket = dataclasses.replace(SIZES, groups=groups), Bucket(4, 8)
    assert sizes.layer_pages(3) == [24, 16, 24]
    rows = np.full((3, 2, SIZES.table_pages), -1, np.int32)
    rows[0, :, :3] = [[20, 3, 9], [-1, 7, 30]]
    rows[1, :, :3] = [[1, 2, 4], [-1, 11, 12]]
    rows[2, :, 0] = [5, 6]
    plan = dataclasses.replace(MIXED, tables=(*MIXED.tables, rows))
    packed = PackedStep.pack(sizes, bucket, plan)
    assert packed.shape == (PackedStep.size(sizes, bucket),)
    step = PackedStep.of(sizes, bucket, jnp.asarray(packed))
    plain, head_wise = step.metadata(SIZES.page_size, jnp.arange(1, dtype=jnp.int32)).groups
    [alone] = (
        PackedStep.of(SIZES, bucket, jnp.asarray(PackedStep.pack(SIZES, bucket, MIXED)))
        .metadata(SIZES.page_size, jnp.arange(1, dtype=jnp.int32))
        .groups
    )
    jax.tree.map(np.testing.assert_array_equal, plain, alone)
    np.testing.assert_array_equal(head_wise.decode_block_tables[:1], rows[:1])
    assert bool(jnp.all(head_wise.decode_block_tables[1:] == -1))
    np.testing.assert_array_equal(head_wise.prefill_block_tables, rows[1:])
    decoded = [[9 * 4 + 1, 30 * 4 + 1], *[[-1, -1]] * 3]
    prefilled = [*([2 * 4 + i, 11 * 4 + i] for i in range(4)), [4 * 4, 12 * 4], [5 * 4, 6 * 4], [5 * 4 + 1, 6 * 4 + 1]]
    np.testing.assert_array_equal(head_wise.slots, [*decoded, *prefilled, [-1, -1]])


@pytest.mark.parametrize(
    "bucket",
    [
        *(pytest.param(bucket, marks=pytest.mark.slow) for bucket in (Bucket(4, 0), Bucket(0, 16))),
        Bucket(4, 16),  # this bucket has decode rows and prompt tokens
    ],
    ids=str,
)
def test_compiled_step_copies_no_cache(runner, bucket):
    """The output caches, and the states of request slots, of a compiled step use the memory of the donated ones, and
    none of them is copied."""
    runner.compile([bucket])
    forward, sample = (
        runner._programs.forward[bucket],
        runner._programs.shared[runner._programs.shared_program("sample", bucket)],
    )
    edits = runner._edits
    of_edits = sum(leaf.nbytes for leaf in jax.tree.leaves(edits))
    assert forward.memory_analysis().alias_size_in_bytes >= runner.cache_bytes
    assert sample.memory_analysis().alias_size_in_bytes >= of_edits
    for program, dtype, shape in (
        (forward, "f32", (SIZES.num_pages, SIZES.page_size, CONFIG.latent_width)),
        (sample, "s32", edits.counts.shape),
        (sample, "s32", edits.ids.shape),
    ):
        copies = re.findall(rf"= {dtype}\[{','.join(map(str, shape))}\]\S* copy\(", program.as_text())
        assert not copies


def test_step_is_lowered_without_source_locations(runner):
    limit = jax.config.jax_traceback_in_locations_limit
    text = runner._programs.lower("forward", Bucket(4, 8), runner._state()).as_text(debug_info=True)
    assert "mla_prefill/while" in text
    assert ".py" not in text
    assert jax.config.jax_traceback_in_locations_limit == limit > 0


def test_runner_can_start_over_after_a_failed_step(runner):
    before = runner.launch([MIXED]).sampled()
    for cache in runner._caches:
        cache.pages.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        runner.launch([MIXED])
    runner.reset()
    assert runner.launch([MIXED]).sampled()[1:] == before[1:]  # reset loses the last token of the decode row
    assert all(bool(jnp.all(jnp.isfinite(cache.pages))) for cache in runner._caches)


class Recorded:
    """Replacement of `Processes` that records what several processes compare."""

    def __init__(self) -> None:
        self.points: list[tuple[str, tuple[bytes, ...]]] = []
        self.busy = self.blamed = contextlib.nullcontext

    def announce(self, name: str, *contents: bytes) -> Callable[[jax.Array], np.ndarray]:
        self.points.append((name, contents))
        return np.asarray


@pytest.mark.usefixtures("unchecked_shapes")
def test_several_processes_compare_all_arguments_of_a_step(runner):
    """The arguments are the metadata of the step, the written states of request slots, and the token masks."""
    processes, bucket = Recorded(), Bucket(4, 8)
    runner.compile([bucket])
    one = Runner(model(), SIZES, processes)  # pyrefly: ignore[bad-argument-type]
    one._programs.forward, one._programs.shared = runner._programs.forward, runner._programs.shared
    request = Request(0, tuple(range(20)), SamplingParams(logit_bias={3: 1.0}), token_filter=Third())
    plan = dataclasses.replace(MIXED, prefill=(ScheduledRow(request, 0, 4, 5, samples=True), MIXED.prefill[1]))
    result = one.launch([plan])
    assert not result.is_sampled
    with pytest.raises(ValueError, match="step: expected a step whose tokens are sampled"):
        result.sampled()
    assert one.sample(result) == []
    (step, (of_bucket, packed, written)), (of_masks, (masks,)) = processes.points
    assert (step, of_bucket.decode(), of_masks) == ("step 0", repr(bucket), "token masks 0")
    assert packed == PackedStep.pack(SIZES, bucket, plan).tobytes()
    assert written == pack_writes(request, 0, CONFIG.eos_token_ids, CONFIG.vocab_size)[0].tobytes()
    expected = np.zeros((6, 2), np.uint32)
    expected[4] = np.asarray(Third().allowed([]))
    assert masks == expected.tobytes()
    assert len(result.sampled()) == 2


def test_padding_writes_nothing(runner):
    runner.reset()
    runner.launch([MIXED])
    written = np.zeros((SIZES.num_pages, SIZES.page_size), bool)
    for page, offset in [(7, 1), (9, 0), (9, 1), (9, 2), (9, 3), (2, 0), (11, 0), (11, 1)]:
        written[page, offset] = True
    for cache in jax.device_get(runner._caches):
        np.testing.assert_array_equal(np.any(cache.pages != 0, axis=-1), written)


@pytest.mark.parametrize("bucket", [pytest.param(Bucket(1, 0), marks=pytest.mark.slow), Bucket(4, 8)], ids=str)
def test_step_without_rows_leaves_caches_and_tokens(bucket: Bucket):
    fresh = Runner(model(), SIZES)
    fresh.launch([MIXED]).sampled()
    before = jax.tree.map(np.array, (fresh._caches, fresh._last_tokens))
    assert any(leaf.any() for leaf in jax.tree.leaves(before))
    fresh.compile([bucket])
    fresh.run_idle(bucket)
    jax.tree.map(np.testing.assert_array_equal, (fresh._caches, fresh._last_tokens), before)


@pytest.mark.slow
def test_shared_steps_are_compiled_once_for_equal_runners(shared_steps):
    first, second, other = (Runner(model(), sizes) for sizes in (SIZES, SIZES, dataclasses.replace(SIZES, page_size=8)))
    first.compile([Bucket(1, 0)])
    with compile_events() as events:
        second.compile([Bucket(1, 0)])
    assert events == []
    assert second._programs.forward == first._programs.forward
    assert ALIKE[other] != ALIKE[first]


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", True),
        ("--xla_dump_to=/tmp/x", True),
        ("--xla_gpu_enable_command_buffer=", False),
        ("--xla_dump_to='a b'  --xla_gpu_enable_command_buffer=FUSION,CUBLAS", False),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_xla_flags_take_precedence(monkeypatch, tmp_path, flags, kept, in_file):
    if in_file:  # XLA_FLAGS may be the name of a file with flags
        (tmp_path / "flags").write_text(flags + "\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if in_file else flags)
    assert gpu_options() == (GPU_OPTIONS if kept else {})


def test_options_depend_on_the_number_of_prompt_tokens_and_the_mesh(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert gpu_options(Bucket(8, 0)) == GPU_OPTIONS | CONCURRENT
    assert gpu_options(Bucket(8, CONCURRENT_TOKENS)) == GPU_OPTIONS | CONCURRENT | WITH_PROMPTS
    assert gpu_options(Bucket(8, CONCURRENT_TOKENS + 1)) == GPU_OPTIONS | WITHOUT_TRITON
    assert gpu_options(Bucket(8, 0), on_mesh=True) == gpu_options(on_mesh=True) == GPU_OPTIONS | MESH_OPTIONS
