"""Operations on arrays that are split over two devices, inside `jax.shard_map`, with and without `check_vma`.

If sequences or heads are split, results equal single-device calls on the parts bit for bit. If contexts (the pages of a
sequence) are split, partial results are merged, and results are close.

The Mosaic interpreter runs the kernel of one device at a time. Mosaic kernels are therefore only traced here; they run
on a mesh of one device in test_surroundings.py, and are compiled for two GPUs in tests/aot. tests/test_parallel.py has
more tests of split contexts, and tests/runtime/test_sharded_calls.py tests operations outside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_attn import HeadWindow, PagedIndexKeys, PagedKV, PagedLatent, parallel
from tests.contract import backends
from tests.contract.backends import Backend
from tests.contract.targets import TARGETS, ints
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

# Inputs have NaN at masked keys. NumPy warns about matrix products with NaN; the mask discards these products.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices"),
]

SHARED = (PagedKV, PagedLatent, PagedIndexKeys, HeadWindow)
ROWS, TOKENS = P(None, None, "x"), P(None, "x")
HEADS: dict[str, tuple[dict[str, P], P]] = {
    "decode": ({"q": ROWS, "kv": TOKENS}, ROWS),
    "decode, int8": ({"q": ROWS, "kv": TOKENS}, ROWS),
    "latents, few heads": ({"q_latent": ROWS, "q_rope": ROWS}, ROWS),
    "latents, many heads": ({"q_latent": ROWS, "q_rope": ROWS}, ROWS),
    "latents, 8 bits": ({"q_latent": ROWS, "q_rope": ROWS}, ROWS),
    "prefill": ({"q": TOKENS, "kv": TOKENS}, TOKENS),
    "prefill, int8": ({"q": TOKENS, "kv": TOKENS}, TOKENS),
    "ragged": ({"q": TOKENS, "k": TOKENS, "v": TOKENS}, TOKENS),
    "write": ({"kv": TOKENS, "k": TOKENS, "v": TOKENS}, TOKENS),
    "chosen latents": ({"q_latent": TOKENS, "q_rope": TOKENS}, TOKENS),
    "chosen latents, 8 bits": ({"q_latent": TOKENS, "q_rope": TOKENS}, TOKENS),
}
"""For each test call of tests/contract/targets.py: partition specs of arguments and results if heads are split."""

IN_EVERY_RUN = {
    "reference": ("heads-write",),
    "xla": ("heads-prefill, int8", "heads-write", "sequences-latents, 8 bits", "sequences-write of index keys, 8 bits"),
    "mosaic": (),
    "triton": ("heads-write", "sequences-choice"),
}
"""Cases of `make test`, except cases that `slow_cases` marks. Few are enough: tests/runtime/test_sharded_calls.py runs
all operations of `xla` in `jax.shard_map`, too, and all kernels of one language use the same code inside
`jax.shard_map`. Interpreted kernels are slow.
"""


def params() -> list[Any]:
    """Return parameters for each test call, backend and split. Slow cases have alternating values of `check_vma`; cases
    of `make test` have both values.
    """
    found, turn = [], 0
    for name, target in TARGETS.items():
        for backend in backends.backends_of(target.op):
            if not target.supports(backend):
                continue
            for split in ("sequences", *["heads"] * (name in HEADS)):
                turn += 1
                quick = f"{split}-{name}" in IN_EVERY_RUN.get(backend.id, ())
                for check_vma in (True, False) if quick else (turn % 2 == 0,):
                    mark = () if quick else pytest.mark.slow
                    of = f"{backend.id}-{split}-{name}-{'checked' if check_vma else 'unchecked'}"
                    found.append(pytest.param(backend, split, name, check_vma, id=of, marks=mark))
    return found


def split_of(split: str, name: str) -> tuple[dict[str, Any], dict[str, P], Any]:
    """Return the arguments of both devices, and the partition specs of arguments and results."""
    arrays = jax.tree.map(jnp.asarray, dict(TARGETS[name].arrays))
    if split == "heads":
        specs, results = HEADS[name]
        return arrays, {key: specs.get(key, P()) for key in arrays}, results
    both = {
        key: x if isinstance(x, SHARED) else jnp.concatenate([x, -x if jnp.issubdtype(x.dtype, jnp.floating) else x])
        for key, x in arrays.items()
    }
    return both, {key: P() if isinstance(x, SHARED) else P("x") for key, x in arrays.items()}, P("x")


def part(tree: Any, spec: P, device: int) -> Any:
    """Return one device's part of arrays that are split over two devices."""
    if "x" not in spec:
        return tree
    axis = spec.index("x")
    return jax.tree.map(lambda x: jnp.split(x, 2, axis=axis)[device], tree)


@slow_cases("xla-sequences-latents, 8 bits-unchecked", "reference-heads-write-unchecked")
@slow_cases(
    "xla-heads-prefill, int8-unchecked", "triton-sequences-choice-unchecked", "xla-sequences-latents, 8 bits-checked",
    "xla-heads-prefill, int8-checked", "triton-heads-write-checked",
)  # fmt: skip
@pytest.mark.parametrize(("backend", "split", "name", "check_vma"), params(), indirect=["backend"])
def test_parts_on_two_devices(backend: Backend, split: str, name: str, check_vma: bool) -> None:
    target = TARGETS[name]
    arrays, specs, results = split_of(split, name)

    def function(arrays: dict[str, Any]) -> Any:
        with backend.variant.settings():
            return target.function(**arrays, **target.static, implementation=backend.name)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=check_vma)
    join = functools.partial(np.concatenate, axis=results.index("x"))
    own = [{key: part(x, specs[key], device) for key, x in arrays.items()} for device in range(2)]
    if backend.name == "mosaic":
        shapes = jax.tree.map(lambda x: join([np.empty(x.shape, x.dtype)] * 2), jax.eval_shape(function, own[0]))
        got = jax.eval_shape(shard(function), arrays)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
        return
    want = jax.tree.map(lambda *x: join(x), *(jax.device_get(jax.jit(function)(arrays)) for arrays in own))
    harness.assert_same_bits(jax.device_get(jax.jit(shard(function))(arrays)), want)


# --- split contexts

DEALT = ints([0, 6, 1, 7], [2, 8, 3, 9], [4, 10, 5, 11])
"""Block tables over 12 pages, of which device 0 has pages 0 to 5. Entry j of a table is a page of device j % 2."""
CONTEXTS = ("decode", "decode, int8", "latents, few heads", "latents, 8 bits")


def context_params() -> list[Any]:
    found = []
    for turn, (name, backend) in enumerate(
        (target, backend) for target in CONTEXTS for backend in backends.backends_of(TARGETS[target].op)
    ):
        if TARGETS[name].supports(backend):
            quick = (backend.id, name) in (("reference", "decode, int8"), ("xla", "latents, 8 bits"))
            of = f"{backend.id}-{name}-{'checked' if turn % 2 else 'unchecked'}"
            found.append(pytest.param(backend, name, turn % 2 == 1, id=of, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name", "check_vma"), context_params(), indirect=["backend"])
def test_contexts_on_two_devices(backend: Backend, name: str, check_vma: bool) -> None:
    """Decode with the pages of each sequence split over two devices equals `reference`. tests/test_parallel.py has more
    cases of `xla`.
    """
    target = TARGETS[name]
    arrays = jax.tree.map(jnp.asarray, {**target.arrays, "block_tables": DEALT})
    static = {key: value for key, value in target.static.items() if key != "return_lse"}
    cache = next(x for x in arrays.values() if isinstance(x, SHARED))
    queries = [x for key, x in arrays.items() if key in ("q", "q_latent", "q_rope")]

    def decode(queries: Any, cache: Any, *metadata: Any) -> Any:
        operation = functools.partial(target.function, **static, implementation=backend.name)
        tables, lens, q_lens = metadata
        with backend.variant.settings():
            return parallel.decode_over_contexts(operation, queries, cache, tables, lens, axis="x", q_lens=q_lens)

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = (P(), jax.tree.map(lambda x: P("x") if x.ndim > 2 else P(), cache), P(), P(), P())
    run = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma)
    given = (queries, cache, *(arrays[key] for key in ("block_tables", "kv_lens", "q_lens")))
    if backend.name == "mosaic":
        assert jax.eval_shape(run, *given)[0].shape == queries[0].shape
        return
    got = jax.jit(run)(*given)
    want = target.function(**arrays, **target.static, out_dtype=jnp.float32, implementation="reference")
    harness.assert_attention_close(got, want, (harness.HALF_OUT, harness.HALF_LSE))
