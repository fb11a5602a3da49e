"""The command `pallas-attn info`: print the device, versions of packages, and the implementation that would run a
typical call of each operation on this device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import PagedIndexKeys, PagedKV, PagedLatent, __version__, explain
from pallas_attn.jax_patches.kernel_shapes import without_bodies
from pallas_attn.runtime import device, dispatch
from pallas_attn.runtime.explain import CANDIDATES_OF

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "numpy")
WIDTH = 80
"""Maximum number of characters in a line of the report."""

DESCRIPTION = (
    "Print the device, versions of packages, and for each operation the implementation that would run a typical"
    " bfloat16 call on this device. A number in brackets refers to the reason, below the table, why an implementation"
    " does not run."
)
LOWER_HELP = (
    "also trace and lower the kernels, as the first call of an operation does; this takes about 10 seconds longer on a"
    " GPU, and finds kernels that the installed version of jax or triton cannot lower"
)
VARIABLES = (
    dispatch.ENVIRONMENT_VARIABLE,
    device.INTERPRET_VARIABLE,
    device.TRITON_INTERPRET_VARIABLE,
    device.JAX_TRITON_VARIABLE,
)

SEQUENCES, TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 4, 256, 32, 8, 128, 64, 4
LATENT_DIM, ROPE_DIM, NOPE_DIM = 512, 64, 128
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
STREAM_LOGITS = 24  # 4 residual streams


def typical_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the positional and keyword arguments of a typical bfloat16 call of each operation.

    Arrays are `jax.ShapeDtypeStruct`s.
    """

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    pages = floats(SEQUENCES * PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    kv = PagedKV(pages, pages)
    cache = PagedLatent(floats(SEQUENCES * PAGES, PAGE_SIZE, LATENT_DIM + ROPE_DIM))
    tables, lens, offsets = ints(SEQUENCES, PAGES), ints(SEQUENCES), ints(SEQUENCES + 1)
    decoded = floats(SEQUENCES, 1, Q_HEADS, HEAD_DIM)
    packed, packed_kv = floats(TOKENS, Q_HEADS, HEAD_DIM), floats(TOKENS, KV_HEADS, HEAD_DIM)
    latents, rotated = (floats(SEQUENCES, 1, Q_HEADS, width) for width in (LATENT_DIM, ROPE_DIM))
    latent_new, slots = floats(TOKENS, LATENT_DIM + ROPE_DIM), ints(TOKENS)
    up_projection = floats(Q_HEADS, NOPE_DIM, LATENT_DIM)
    expanded = floats(TOKENS, Q_HEADS, NOPE_DIM), floats(TOKENS, Q_HEADS, ROPE_DIM), latent_new, cache
    index = PagedIndexKeys(floats(SEQUENCES * PAGES, PAGE_SIZE, INDEX_DIM))
    weights = jax.ShapeDtypeStruct((TOKENS, INDEX_HEADS), jnp.float32)
    rows, halves = (jax.ShapeDtypeStruct((TOKENS, n), jnp.float32) for n in (4 * INDEX_DIM, ROPE_DIM // 2))
    state_pages: Any = jax.ShapeDtypeStruct((SEQUENCES * PAGES, PAGE_SIZE, 4 * INDEX_DIM), jnp.float32)
    state = PagedLatent(state_pages)
    compressed = rows, floats(INDEX_DIM), halves, halves, tables, tables, offsets, lens
    indexed = floats(TOKENS, INDEX_HEADS, INDEX_DIM), weights, index, tables, offsets, lens
    absorbed = floats(TOKENS, Q_HEADS, LATENT_DIM), floats(TOKENS, Q_HEADS, ROPE_DIM)
    scores = jax.ShapeDtypeStruct((TOKENS, PAGES * PAGE_SIZE), jnp.float32)
    stream_logits = tuple(
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((TOKENS, STREAM_LOGITS), (TOKENS,), (3,), (STREAM_LOGITS,))
    )
    step = lens, tables, offsets
    new_latent, new_rope = floats(TOKENS, LATENT_DIM), floats(TOKENS, ROPE_DIM)
    return {
        "paged_decode": ((decoded, kv, tables, lens), {}),
        "paged_prefill": ((packed, kv, tables, offsets, lens), {}),
        "mla_decode": ((latents, rotated, cache, tables, lens), {"sm_scale": 0.1}),
        "mla_prefill": ((*expanded, up_projection, up_projection, tables, offsets, lens), {"sm_scale": 0.1}),
        "ragged_attention": ((packed, packed_kv, packed_kv, offsets, offsets), {}),
        "plan_decode": ((decoded, kv, tables, lens), {}),
        "write_kv": ((kv, packed_kv, packed_kv, slots), {}),
        "write_latent": ((cache, latent_new, slots), {}),
        "gather_latent": ((cache, latent_new, tables, offsets, lens), {"length": 2 * TOKENS}),
        "index_scores": (indexed, {}),
        "select_top_k": ((scores,), {"top_k": TOP_K}),
        "index_top_k": (indexed, {"top_k": TOP_K}),
        "mla_sparse": ((*absorbed, cache, ints(TOKENS, TOP_K)), {"sm_scale": 0.1}),
        "compress_and_write": ((state, index, *compressed), {"ratio": 4}),
        "write_index_keys": ((index, floats(TOKENS, INDEX_DIM), slots), {}),
        "hyper_connection_weights": (stream_logits, {}),
        "cascade_decode": ((decoded, kv, tables, lens), {}),
        "ragged_paged_attention": ((packed, packed_kv, packed_kv, kv, *step), {}),
        "mla_ragged_paged_attention": ((*absorbed, new_latent, new_rope, cache, *step), {"sm_scale": 0.1}),
    }


def device_words(here: device.Device, memory: int | None) -> str:
    """Return a description of the device in words: name, compute capability, multiprocessors and memory sizes.

    Unknown facts are left out.

    Args:
      memory: memory of the device in bytes; None if unknown.
    """
    words = [here.name]
    if here.capability is not None:
        words.append("compute capability " + ".".join(map(str, here.capability)))
    if here.interpreted:
        words.append("Mosaic kernels interpreted")
    if here.multiprocessors is not None:
        words.append(f"{here.multiprocessors} multiprocessors")
    if here.shared_bytes_per_block is not None:
        words.append(f"{here.shared_bytes_per_block // 1024} KiB of shared memory a block")
    if here.shared_bytes_per_multiprocessor is not None:
        words.append(f"{here.shared_bytes_per_multiprocessor // 1024} KiB a multiprocessor")
    if memory is not None:
        words.append(f"{memory / 2**30:.1f} GiB of memory")
    return ", ".join(words)


def versions() -> str:
    """Return the versions of Python and of those packages in `PACKAGES` that are installed."""
    found = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def lines(*, lower: bool = False) -> Iterator[str]:
    """Yield the lines of the report, separated by empty lines: facts about the device, a table with a row per
    operation, and the reasons why implementations with a higher preference do not run.

    Operations share a reason, so the table has only the number of each reason.

    Args:
      lower: whether kernels are traced and lowered. Otherwise an implementation counts as supported if it launches a
        kernel, even if the kernel cannot be lowered.
    """
    here, memory = device.current(), (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    rows = [("pallas_attn", __version__), ("device", device_words(here, memory)), ("versions", versions())]
    rows += [(name, os.environ[name]) for name in VARIABLES if os.environ.get(name)]
    yield from aligned(rows)
    yield ""
    table = [("operation", "runs", "unsupported")]
    calls = typical_calls()
    numbers: dict[str, int] = {}
    skips_bodies = not lower and (here.platform == "gpu" or here.interpreted)
    for op in CANDIDATES_OF:
        arguments, options = calls[op]
        with without_bodies() if skips_bodies else contextlib.nullcontext():
            explanation = explain(op, *arguments, **options)
        refused = [f"{name} ({numbers.setdefault(r, len(numbers) + 1)})" for name, r in explanation.refused.items()]
        table.append((op, explanation.chosen or "none", ", ".join(refused)))
    yield from aligned(table)
    if numbers:
        yield ""
        yield from aligned([(f"({number})", reason) for reason, number in numbers.items()])


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format the rows of a table as lines in which each column has one width. The last column is wrapped, so that a
    line has at most `WIDTH` characters unless a word is longer.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    found = []
    for *cells, last in rows:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(cells, widths, strict=True))
        wrapped = textwrap.wrap(
            last,
            WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
        found += wrapped or [start.rstrip()]
    return found


def main(argv: Sequence[str] | None = None, prog: str = "pallas-attn info") -> int:
    """Print the report and return the exit status. No operation runs: `explain` traces a typical call of each
    operation.
    """
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    parser.add_argument("--lower", action="store_true", help=LOWER_HELP)
    lower = parser.parse_args(argv).lower
    try:
        for line in lines(lower=lower):
            print(line, flush=True)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, needs no more lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails
    return 0
