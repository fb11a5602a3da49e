"""jax's `paged_attention` for GPUs (jax.experimental.pallas.ops.gpu) as a baseline, over the pages of our kernels."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from scripts.bench.cases.paged_decode import DecodeArrays, DecodeCase
from scripts.bench.harness.timing import Stopwatch, Timing

SPLITS = (1, 4, 16)
"""Measured values of `k_splits`, the number of KV splits per sequence."""

BLOCK_TOKENS = 128
"""Tokens that a step of the kernel loads. jax's default is 8 pages per step, which are 128 tokens for pages of 16."""


def layer_arguments(arrays: DecodeArrays) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the arguments of jax's `paged_attention` that all calls of a chain share, and the other arguments of each
    call. Pages and scales have our shapes; `in_jax_layout` converts them. Each call has its own array of lengths,
    because XLA would compute equal plans of our calls once.
    """
    shared = {"k_pages": arrays.kv.k, "v_pages": arrays.kv.v}
    if arrays.kv.k_scale is not None:
        shared |= {"k_scales_pages": arrays.kv.k_scale, "v_scales_pages": arrays.kv.v_scale}
    owns = [
        {"q": q, "block_tables": table, "lengths": jnp.array(arrays.kv_lens)}
        for q, table in zip(arrays.q, arrays.block_tables, strict=True)
    ]
    return shared, owns


def in_jax_layout(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with pages [Hkv, N, ps, D], scales [Hkv, N, ps], and queries [B, Hq, D] times D**-0.5.

    The pages are random, so a reshape of our pages [N, Hkv, ps, D] suffices. Inside `jax.jit` it does not copy them.
    """
    arguments = {
        name: x.reshape(x.shape[1], x.shape[0], *x.shape[2:]) if "pages" in name else x for name, x in shared.items()
    }
    q = own["q"][:, 0]
    return arguments | own | {"q": q * q.shape[-1] ** -0.5}


def decode(splits: int, case: DecodeCase, arrays: DecodeArrays, stopwatch: Stopwatch) -> Timing:
    """Time jax's function with `splits` KV splits per sequence. On a CPU, jax's interpreter runs its kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
    if case.table_pages % splits:
        raise NotImplementedError(f"takes tables whose width is a multiple of {splits}, got {case.table_pages}")
    settings = {
        "k_splits": splits,
        "pages_per_compute_block": max(1, BLOCK_TOKENS // case.shape.page_size),
        "interpret": jax.default_backend() != "gpu",
    }

    def call(_: None, shared: dict[str, Any], own: dict[str, Any]) -> tuple[None, Any]:
        return None, module.paged_attention(**in_jax_layout(shared, own), **settings)

    shared, owns = layer_arguments(arrays)
    return stopwatch.chain(call, owns, shared=shared)


CONTENDERS = {f"jax-{splits}": functools.partial(decode, splits) for splits in SPLITS}
