"""`ragged_paged_attention` on the caches of tpu-inference: one array with keys and values, and flat tables of pages.

The expected results are computed in float64 by loops over tpu-inference's layout.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_attn import HeadWindow, PagedKV, explain, ragged_paged_attention, token_tables, view_fused, view_nhd
from tests.kit import harness
from tests.kit.slow_cases import slow_cases

N, PS, T, P, SM_SCALE = 12, 4, 12, 5, 0.3
NEW, LENS = (1, 6, 1, 0), (18, 6, 3, 9)
DISTRIBUTION = np.array([1, 2, 4], np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a cache array.

    Attributes:
      heads, group, width: Hkv, query heads per KV head, D.
      shape: axes after N and ps.
      alternating: whether keys and values are separate rows that alternate; otherwise a row has a key and its value.
    """

    heads: int
    group: int
    width: int
    shape: tuple[int, ...]
    alternating: bool

    def places(self, head: int) -> tuple[tuple[int, slice], tuple[int, slice]]:
        """Return row and columns of the key and of the value of a head."""
        if self.alternating:
            return (2 * head, slice(self.width)), (2 * head + 1, slice(self.width))
        return (head, slice(self.width)), (head, slice(self.width, 2 * self.width))


LAYOUTS = {
    "v3": Layout(2, 2, 16, (2, 2, 24), alternating=True),
    "v3, one head": Layout(1, 4, 16, (1, 2, 16), alternating=True),
    "v3, padded heads": Layout(3, 2, 16, (2, 4, 16), alternating=True),
    "heads of 64": Layout(2, 2, 64, (1, 2, 128), alternating=False),
    "heads of 64, padded heads": Layout(3, 2, 64, (2, 2, 128), alternating=False),
    "heads of 64 in rows of keys and values": Layout(2, 1, 64, (2, 2, 128), alternating=True),
    "v2": Layout(2, 1, 16, (4, 16), alternating=True),
}


def rows_of(pages: Any, layout: Layout) -> np.ndarray:
    """Return an array as [slots, rows, columns] in float64."""
    return np.asarray(pages).astype(np.float64).reshape(N * PS, -1, layout.shape[-1])


def step(layout: Layout, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Return random arguments with flat tables of pages. Table entries without a token have any value."""
    rng = harness.fresh_rng()

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    tables = rng.permutation(N)[:10].astype(np.int32)
    flat = np.full((len(NEW), P), 2**31 - 1, np.int32)
    used = 0
    for s, length in enumerate(LENS):
        count = -(-length // PS)
        flat[s, :count] = tables[(used + np.arange(count)) % 10]
        used += count
    return {
        "q": normal(T, layout.heads * layout.group, layout.width).astype(jnp.float32),
        "k": normal(T, layout.heads, layout.width),
        "v": normal(T, layout.heads, layout.width),
        "kv": normal(N, PS, *layout.shape),
        "kv_lens": jnp.array(LENS, jnp.int32),
        "page_indices": jnp.asarray(flat.reshape(-1)),
        "cu_q_lens": jnp.asarray(np.cumsum((0, *NEW)), jnp.int32),
        "distribution": jnp.asarray(DISTRIBUTION),
    }


def expected(arguments: dict[str, Any], layout: Layout, scales: tuple[float, float] = (1, 1)) -> Any:
    """Return the output, and the rows [slots, rows, columns] after the call."""
    rows = rows_of(arguments["kv"], layout)
    q, k, v = (np.asarray(arguments[name]).astype(np.float64) for name in ("q", "k", "v"))
    tables = np.asarray(arguments["page_indices"]).reshape(len(NEW), P)
    out, start = np.zeros(q.shape), 0
    for table, count, length in zip(tables, NEW, LENS, strict=True):
        slots = [int(table[t // PS]) * PS + t % PS for t in range(length)]
        for head in range(layout.heads):
            (k_row, k_columns), (v_row, v_columns) = layout.places(head)
            for i in range(count):
                rows[slots[length - count + i], k_row, k_columns] = k[start + i, head]
                rows[slots[length - count + i], v_row, v_columns] = v[start + i, head]
            for i in range(count):
                seen = slots[: length - count + i + 1]
                keys, values = rows[seen, k_row, k_columns] * scales[0], rows[seen, v_row, v_columns] * scales[1]
                for g in range(head * layout.group, (head + 1) * layout.group):
                    scores = keys @ q[start + i, g] * SM_SCALE
                    weights = np.exp(scores - scores.max())
                    out[start + i, g] = weights @ values / weights.sum()
        start += count
    return out, rows


def run(*args: Any, update_kv_cache: Any = True, **kwargs: Any) -> Any:
    options = {"sm_scale": SM_SCALE, "update_kv_cache": update_kv_cache, "implementation": "xla"}
    return jax.jit(functools.partial(ragged_paged_attention, **options))(*args, **kwargs)


def check(got: Any, arguments: dict[str, Any], layout: Layout, **options: Any) -> None:
    out, pages = got
    want, rows = expected(arguments, layout, **options)
    assert pages.shape == arguments["kv"].shape
    assert pages.dtype == arguments["kv"].dtype
    real = [place for head in range(layout.heads) for place in layout.places(head)]
    for row, columns in real:
        np.testing.assert_array_equal(rows_of(pages, layout)[:, row, columns], rows[:, row, columns])
    harness.assert_close("output", out, want, harness.F32_OUT)


# --- arrays


@slow_cases(
    "v3", "v3, one head", "v3, padded heads", "heads of 64", "heads of 64 in rows of keys and values",
    "v2",
)  # fmt: skip
@pytest.mark.parametrize("name", LAYOUTS)
def test_flat_tables_of_pages(name: str) -> None:
    arguments = step(LAYOUTS[name])
    check(run(**arguments), arguments, LAYOUTS[name])


@pytest.mark.slow
def test_tables_of_rank_two_and_positional_arguments() -> None:
    layout = LAYOUTS["v3"]
    arguments = step(layout) | {"page_indices": step(layout)["page_indices"].reshape(-1, P)}
    check(run(*arguments.values()), arguments, layout)


@pytest.mark.slow
def test_columns_of_the_padding_do_not_change() -> None:
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    _, pages = run(**arguments)
    harness.assert_same_bits(pages[..., layout.width :], arguments["kv"][..., layout.width :])


def test_8_bit_array_without_scales_has_scales_of_1() -> None:
    layout = Layout(1, 2, 16, (1, 4, 16), alternating=True)  # four rows, of which two are padding
    arguments = step(layout, jnp.float8_e4m3fn)
    check(run(**arguments), arguments, layout)
    scales = {"k_scale": jnp.float32(0.5), "v_scale": jnp.array([0.25], jnp.float32)}
    check(run(**arguments, **scales), arguments, layout, scales=(0.5, 0.25))


@pytest.mark.slow
def test_padded_heads_with_a_sink_and_a_window_per_head() -> None:
    """The arguments with an entry per head are padded like the heads: results equal the results of an array without
    padded heads.
    """
    layout = LAYOUTS["v3, padded heads"]
    arguments = step(layout)
    arguments["attention_sink"] = jnp.linspace(-1, 1, layout.heads * layout.group)
    window = HeadWindow(jnp.array([3, 5, 7], jnp.int32), jnp.array([1, 0, 2], jnp.int32))
    whole = arguments["kv"].reshape(N, PS, 8, 16)[:, :, :6]
    got, pages = run(**arguments, sliding_window=window)
    want, after = run(**arguments | {"kv": whole}, sliding_window=window)
    harness.assert_close("output", got, want, harness.F32_OUT)
    harness.assert_same_bits(pages.reshape(N, PS, 8, 16)[:, :, :6], after)


@pytest.mark.slow
def test_without_an_update_an_array_does_not_change() -> None:
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    out, pages = run(**arguments)
    again = run(**arguments | {"kv": pages, "v": None}, update_kv_cache=False)
    harness.assert_same_bits(again, (out, pages))


@pytest.mark.slow
def test_a_donated_array_stays_where_it_is() -> None:
    """A compiled loop over steps does not copy the array."""
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    pages = jax.ShapeDtypeStruct((4096, PS, *layout.shape), jnp.float32)
    rest = {name: x for name, x in arguments.items() if name != "kv"}

    def steps(pages: jax.Array, rest: dict[str, Any]) -> Any:
        return jax.lax.scan(lambda pages, _: run(**rest, kv=pages)[::-1], pages, length=2)

    harness.assert_stays_put(jax.jit(steps, donate_argnums=0), pages, pages, rest)


def test_explanation_of_a_call_with_an_array() -> None:
    assert explain("ragged_paged_attention", **step(LAYOUTS["v3"])).chosen == "xla"


@slow_cases("Auto", "Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, None], ids=["Auto", "Explicit", "shard_map"])
def test_array_split_over_devices(kind: AxisType | None) -> None:
    """Each of two devices has one KV head, as in tpu-inference."""
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind or AxisType.Auto,), devices=jax.devices()[:2])
    heads = {"q": (None, "x"), "k": (None, "x"), "v": (None, "x"), "kv": (None, None, "x")}
    specs = {name: PartitionSpec(*heads.get(name, ())) for name in arguments}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arguments.items()}

    def call(arguments: dict[str, Any]) -> Any:
        return run(**arguments)

    if kind is None:
        call = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=(specs["q"], specs["kv"]))
    compiled = jax.jit(call).lower(placed).compile()
    assert "all-gather" not in str(compiled.as_text())
    got = compiled(placed)
    assert got[1].sharding.is_equivalent_to(placed["kv"].sharding, got[1].ndim)
    check(got, arguments, layout)


ARRAY_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "no keys": ({"k": None}, r"k: expected the new keys.*Pass kv=view_fused\(kv, num_kv_heads\) and token_tables"),
    "rows of other heads": (
        {"kv": jnp.zeros((N, PS, 3, 2, 16))},
        r"kv: expected 4 rows of at least 16 columns.* got shape \[12, 4, 3, 2, 16\].*view_nhd\(k, v\)",
    ),
    "two possible layouts": (
        {"q": jnp.zeros((T, 2, 16)), "k": jnp.zeros((T, 1, 16)), "kv": jnp.zeros((N, PS, 1, 2, 32))},
        r"kv: expected a shape that tells how keys and values are stored, got \[12, 4, 1, 2, 32\] for num_kv_heads=1"
        r" and D=16\. If keys and values alternate, pass kv\.reshape\(12, 4, 2, 32\)\..* 1 heads are padding",
    ),
    "narrow rows": ({"kv": jnp.zeros((N, PS, 2, 2, 8))}, "kv: expected 4 rows of at least 16 columns"),
    "one axis less": ({"kv": jnp.zeros((N, PS, 64))}, r"kv: expected a PagedKV, or a nonempty array \[N, ps, rows"),
    "dtype": ({"kv": jnp.zeros((N, PS, 2, 2, 16), jnp.int16)}, "kv: expected dtype"),
    "tables of heads": (
        {"page_indices": jnp.zeros((4, 2, P), jnp.int32)},
        r"page_indices: expected shape \[S=4, P\], got \[4, 2, 5\]",
    ),
    "table entries": ({"page_indices": jnp.zeros(21, jnp.int32)}, r"page_indices: expected \[S·P\] with S=4"),
    "heads": ({"k": jnp.zeros((T, 3, 16))}, "q: its 4 heads must be a multiple of the 3 KV heads"),
}


@pytest.mark.slow
def test_shapes_that_tell_apart_both_layouts_of_one_head() -> None:
    """The fixes that the error for two possible layouts names give the results of the two layouts."""
    shape = (1, 2, 32)
    alternating = Layout(1, 2, 16, shape, alternating=True)
    arguments = step(alternating)
    four_axes = arguments["kv"].reshape(N, PS, 2, 32)
    out, pages = run(**arguments | {"kv": four_axes})
    check((out, pages.reshape(N, PS, *shape)), arguments, alternating)
    joined = dataclasses.replace(alternating, alternating=False)
    padded = {name: jnp.concatenate([arguments[name], 0 * arguments[name]], axis=1) for name in ("q", "k", "v")}
    out, pages = run(**arguments | padded)
    check((out[:, :2], pages), arguments, joined)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ARRAY_ERRORS)
def test_errors_name_the_argument_and_the_fix(name: str) -> None:
    changed, message = ARRAY_ERRORS[name]
    with pytest.raises(ValueError, match=f"(?s)^{message}"):
        run(**step(LAYOUTS["v3"]) | changed)


# --- views


@slow_cases("True", "False")
@pytest.mark.parametrize("flat", [True, False])
def test_view_with_tables_of_tokens(flat: bool) -> None:
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    tables = token_tables(arguments["page_indices"].reshape(-1, P), page_size=PS)
    if flat:
        tables = token_tables(arguments["page_indices"], page_size=PS)
        assert tables.shape == (len(NEW) * P * PS,)
    out, view = run(**arguments | {"kv": view_fused(arguments["kv"], layout.heads), "page_indices": tables})
    check((out, view.k.reshape(arguments["kv"].shape)), arguments, layout)


@pytest.mark.parametrize("shape", [(-1,), (-1, P)], ids=["flat", "rank 2"])
def test_view_with_tables_of_pages(shape: tuple[int, ...]) -> None:
    """Tables of pages used to be read as tables of tokens, without an error."""
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    arguments["kv"] = view_fused(arguments["kv"], layout.heads)
    arguments["page_indices"] = arguments["page_indices"].reshape(shape)
    message = (
        r"^page_indices: expected an entry for each token, a multiple of 4 per row.* got \[4, 5\]\."
        r".*token_tables\(page_indices, page_size=4\)"
    )
    with pytest.raises(ValueError, match=message):
        run(**arguments)


def test_table_of_a_view_that_ends_inside_a_page() -> None:
    """Without its page size, a view accepts tables of any number of tokens."""
    layout = LAYOUTS["v3"]
    arguments = step(layout)
    tables = token_tables(arguments["page_indices"].reshape(-1, P), page_size=PS)[:, :18]
    kv = dataclasses.replace(view_fused(arguments["kv"], layout.heads), view_page_size=None)
    out, _ = run(**arguments | {"kv": kv, "page_indices": tables})
    harness.assert_close("output", out, expected(arguments, layout)[0], harness.F32_OUT)


def test_operations_return_views_and_keep_their_page_size() -> None:
    k = jnp.zeros((N, PS, 2, 8))
    kv = view_nhd(k, k)
    assert kv.view_page_size == PS
    _, after = run(
        **step(Layout(2, 2, 8, (), alternating=True)) | {"kv": kv, "page_indices": jnp.zeros(4 * P * PS, jnp.int32)}
    )
    assert isinstance(after, PagedKV)
    assert after.view_page_size == PS
