"""Tests of the Mosaic kernels of `write_latent` and `gather_latent` in addition to test_latent.py: odd widths,
dispatch, and real sizes on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import PagedLatent, explain, gather_latent, write_latent
from pallas_attn.mosaic.primitives.row_io import RowLayout
from pallas_attn.ops.gather_latent.mosaic import MAX_SEQUENCES
from tests.kit import harness
from tests.kit.harness import Variant, assert_same_bits, compiled, fresh_rng
from tests.kit.slow_cases import slow_cases
from tests.ops import test_latent as contract
from tests.ops.test_latent import NUM_PAGES, PAGE_SIZE, WIDTH, any_bits, holding, numpy_write

MOSAIC = Variant("mosaic")


@pytest.fixture
def interpreter(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    with harness.interpreting(capsys):
        yield


@slow_cases("6")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("width", [1, 6, 192])
def test_rows_of_any_width(width: int) -> None:
    """The widths are odd, even, and so large that a thread copies its columns in several steps (`HELD_BYTES` is
    patched).
    """
    rng = fresh_rng()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pallas_attn.mosaic.primitives.row_io.HELD_BYTES", 32)
        pages, latent = any_bits(rng, (6, 4, width), jnp.bfloat16), any_bits(rng, (5, width), jnp.bfloat16)
        slots = np.array([7, 0, 23, -1, 2], np.int32)
        write = jax.jit(functools.partial(write_latent, implementation="mosaic"))
        written = write(holding(pages), latent, slots)
        assert_same_bits(written.pages, numpy_write(pages, latent, slots))
        gather = jax.jit(functools.partial(gather_latent, length=9, implementation="mosaic"))
        lens = np.array([2, 6], np.int32), np.array([0, 1, 3], np.int32)
        got = gather(written, latent, np.array([[5, -1], [0, -1]], np.int32), lens[1], lens[0])
    rows = np.asarray(written.pages)
    want = np.concatenate([rows[5, :1], latent[:1], rows[0, :4], latent[1:3], np.zeros((1, width), rows.dtype)])
    assert_same_bits(got, want)


@pytest.mark.usefixtures("interpreter")
def test_scans_equal_separate_calls() -> None:
    """The scan has the cache as carry, or slices a cache from a stack in each iteration."""
    rng = fresh_rng()
    pages = any_bits(rng, (3, NUM_PAGES, PAGE_SIZE, WIDTH), np.float32)
    latent = any_bits(rng, (3, 2, WIDTH), np.float32)
    slots = rng.permutation(NUM_PAGES * PAGE_SIZE)[:6].reshape(3, 2).astype(np.int32)
    carried = jax.jit(contract.steps_of_writes, static_argnums=0, donate_argnums=1)
    want = numpy_write(pages[0], latent.reshape(-1, WIDTH), slots.reshape(-1))
    assert_same_bits(carried(MOSAIC, holding(pages[0]), latent, slots).pages, want)

    def step(_: None, call: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, write_latent(PagedLatent(call[0]), *call[1:], implementation="mosaic").pages

    got = jax.jit(lambda calls: jax.lax.scan(step, None, calls)[1])((pages, latent, slots))
    assert_same_bits(got, np.stack([numpy_write(*call) for call in zip(pages, latent, slots, strict=True)]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_threads_divide_rows_evenly(dtype: Any) -> None:
    """Threads divide rows of every width evenly. Rows of DeepSeek's latents have 16-byte accesses."""
    for width in range(1, 600):
        layout = RowLayout.for_copies(width, dtype)
        assert width % layout.columns == 0
        assert layout.threads <= 32
        assert layout.vector * jnp.dtype(dtype).itemsize <= 16
    assert RowLayout.for_copies(576, dtype).vector * jnp.dtype(dtype).itemsize == 16


# --- dispatch


def arguments(op: str, num_pages: int = 100, sequences: int = 4) -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct
    cache = PagedLatent(shape((num_pages, 64, 576), jnp.bfloat16))  # pyrefly: ignore[bad-argument-type]
    new, ints = shape((64, 576), jnp.bfloat16), functools.partial(shape, dtype=jnp.int32)
    if op == "write_latent":
        return {"cache": cache, "latent": new, "slots": ints((64,))}
    ragged = {"block_tables": ints((sequences, 8)), "cu_q_lens": ints((sequences + 1,)), "kv_lens": ints((sequences,))}
    return {"cache": cache, "latent_new": new, **ragged, "length": 256}


OPS = pytest.mark.parametrize("op", ["write_latent", "gather_latent"])


@OPS
@pytest.mark.usefixtures("interpreter")
def test_default_on_hopper(op: str) -> None:
    assert explain(op, **arguments(op)).chosen == "mosaic"


@OPS
def test_unsupported_on_a_cpu_without_interpreter(op: str) -> None:
    refused = explain(op, **arguments(op)).refused
    assert refused["mosaic"] == "needs a GPU of compute capability 9.0 (H100, H200) or 10.0 (B200, GB200), this is cpu"


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("op", "sizes", "reason"),
    [
        ("write_latent", {"num_pages": 2**25}, "takes pools of less than 2**31 rows, got 2147483648"),
        ("gather_latent", {"num_pages": 2**25}, "takes pools of less than 2**31 rows, got 2147483648"),
        ("gather_latent", {"sequences": MAX_SEQUENCES + 1}, "takes up to 1024 sequences, got 1025"),
    ],
)
def test_unsupported_calls_state_the_reason(op: str, sizes: dict[str, int], reason: str) -> None:
    explanation = explain(op, **arguments(op, **sizes))
    assert explanation.chosen != "mosaic"
    assert explanation.refused["mosaic"] == reason


# --- real sizes, on a GPU

WIDTHS = [576, 288, 160, 320, 512]


def both(op: Callable[..., Any], **call: Any) -> None:
    static = {"length": call.pop("length")} if "length" in call else {}
    got, want = (compiled(op, Variant(name), **static)(**call) for name in ("mosaic", "xla"))
    assert_same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 4099])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_writes_of_real_sizes(dtype: Any, width: int, num_tokens: int) -> None:
    rng = fresh_rng()
    pages, latent = any_bits(rng, (128, 64, width), dtype), any_bits(rng, (num_tokens, width), dtype)
    slots = rng.permutation(128 * 64)[:num_tokens].astype(np.int32)
    slots[rng.integers(0, num_tokens, num_tokens // 8)] = -1
    both(write_latent, cache=holding(pages), latent=latent, slots=slots)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("sequences", [1, 8, 300, MAX_SEQUENCES])
def test_gathers_of_real_sizes(sequences: int, page_size: int) -> None:
    rng, num_tokens, table_width = fresh_rng(), 2048, 32
    pages = any_bits(rng, (4096, page_size, 576), jnp.bfloat16)
    new = rng.multinomial(num_tokens - 1, np.full(sequences, 1 / sequences))
    cached = rng.integers(0, table_width * page_size + 1, sequences) * rng.integers(0, 2, sequences)
    tables = rng.integers(0, 4096, (sequences, table_width), np.int32)
    tables[np.arange(table_width) * page_size >= cached[:, None]] = harness.GARBAGE
    both(
        gather_latent,
        cache=holding(pages),
        latent_new=any_bits(rng, (num_tokens, 576), jnp.bfloat16),
        block_tables=tables,
        cu_q_lens=np.cumsum([0, *new], dtype=np.int32),
        kv_lens=(cached + new).astype(np.int32),
        length=int((cached + new).sum()) + 100,
    )


@pytest.mark.gpu
def test_scans_on_a_gpu() -> None:
    test_scans_equal_separate_calls()


@pytest.mark.gpu
def test_pool_of_more_than_2_to_the_32_elements() -> None:
    num_pages, page_size, width = 117_000, 64, 576
    assert num_pages * page_size * width > 2**32
    latent = jnp.asarray(any_bits(fresh_rng(), (3, width), jnp.bfloat16))
    pages = jnp.asarray([num_pages - 1, 0, 116_900], jnp.int32)
    slots = pages * page_size + 3
    write = jax.jit(functools.partial(write_latent, implementation="mosaic"), donate_argnums=0)
    empty = jax.jit(lambda: jnp.zeros((num_pages, page_size, width), jnp.bfloat16))
    cache = write(PagedLatent(empty()), latent, slots)
    assert_same_bits(cache.pages[pages, 3], latent)
    written = sum(int(jnp.count_nonzero(cache.pages[i : i + 1000])) for i in range(0, num_pages, 1000))
    assert written == int(jnp.count_nonzero(latent))
    none, lens = jnp.zeros((0, width), jnp.bfloat16), jnp.full((3,), 4, jnp.int32)
    got = gather_latent(
        cache, none, pages[:, None], jnp.zeros((4,), jnp.int32), lens, length=12, implementation="mosaic"
    )
    assert_same_bits(got[3::4], latent)
