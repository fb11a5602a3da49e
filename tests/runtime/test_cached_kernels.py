"""Tests on a GPU: kernels from the cache of lowered kernels return the same bits as newly traced kernels, also after
cache files were damaged.

tests/runtime/test_kernel_cache.py has the other tests of the cache.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn.runtime import kernel_cache
from tests.runtime.cache_damages import DAMAGES

PAGES, PAGE_SIZE, SEQS = 40, 64, 5
KV_LENS = (1, 64, 200, 0, 333)
Q_LENS = (1, 60, 100, 0, 31)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return the function and the arguments of a call of each operation, by the name of the operation."""
    pages = {"num_pages": PAGES, "page_size": PAGE_SIZE, "dtype": jnp.bfloat16}
    kv = jax.tree.map(
        lambda leaf: normal(0, *leaf.shape),
        pa.PagedKV.allocate(pa.kv_cache_spec(**pages, num_kv_heads=2, head_dim=128)),
    )
    latents = jax.tree.map(
        lambda leaf: normal(1, *leaf.shape),
        pa.PagedLatent.allocate(pa.latent_cache_spec(**pages, latent_dim=512, rope_dim=64)),
    )
    tables = jnp.asarray(np.random.default_rng(0).permutation(PAGES)[: SEQS * 6].reshape(SEQS, 6), jnp.int32)
    lens, q_lens = jnp.asarray(KV_LENS, jnp.int32), jnp.asarray(Q_LENS, jnp.int32)
    cu = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    tokens = sum(Q_LENS)
    ragged = functools.partial(pa.ragged_attention, causal=True)
    return {
        "paged_decode": (pa.paged_decode, (normal(2, SEQS, 1, 8, 128), kv, tables, lens)),
        "mla_decode": (
            functools.partial(pa.mla_decode, sm_scale=0.1),
            (normal(3, SEQS, 1, 16, 512), normal(4, SEQS, 1, 16, 64), latents, tables, lens),
        ),
        "paged_prefill": (pa.paged_prefill, (normal(5, tokens, 8, 128), kv, tables, cu, lens)),
        "ragged_attention": (ragged, (*(normal(6 + i, tokens, 4, 128) for i in range(3)), cu, cu)),
        "write_latent": (pa.write_latent, (latents, normal(9, 5, 576), jnp.arange(5, dtype=jnp.int32) * 7)),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["paged_decode", "mla_decode", "paged_prefill", "ragged_attention", "write_latent"])
def test_cached_kernels_return_the_same_bits(op: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function, arguments = calls()[op]

    def run() -> list[np.ndarray]:
        jax.clear_caches()
        kernel_cache._cached.cache_clear()
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(functools.partial(function))(*arguments))]

    want = run()
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(tmp_path))
    cached, found = run(), run()
    assert list(tmp_path.iterdir())
    for anew, first, second in zip(want, cached, found, strict=True):
        np.testing.assert_array_equal(anew.view(np.uint8), first.view(np.uint8))
        np.testing.assert_array_equal(anew.view(np.uint8), second.view(np.uint8))


PROGRAM = """
import sys
import jax
import numpy as np
from tests.runtime.test_cached_kernels import calls
function, arguments = calls()["paged_decode"]
leaves = jax.tree.leaves(jax.jit(function)(*arguments))
np.savez(sys.argv[1], *(np.asarray(leaf).view(np.uint8) for leaf in leaves))
print("jax.experimental.mosaic.gpu" in sys.modules)
"""


@pytest.mark.gpu
def test_cached_kernels_run_without_mosaic(tmp_path: Path) -> None:
    """A process that finds its kernels in the cache does not import Mosaic, and returns the same bits.

    It compiles the lowered kernels with the same CUDA tools that Mosaic finds when it is imported.
    """
    results = []
    for name in ("traced", "cached"):
        variables = os.environ | {kernel_cache.ENVIRONMENT_VARIABLE: str(tmp_path / "kernels")}
        variables |= {"JAX_ENABLE_COMPILATION_CACHE": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / f"{name}.npz")]
        done = subprocess.run(
            command, env=variables, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        results.append((done.stdout.split()[-1], np.load(tmp_path / f"{name}.npz")))
    (traced, want), (cached, got) = results
    assert (traced, cached) == ("True", "False")
    assert list(want)
    for leaf in want:
        np.testing.assert_array_equal(got[leaf], want[leaf])


@pytest.mark.gpu
@pytest.mark.parametrize("damage", [*DAMAGES.values(), None], ids=[*DAMAGES, "folder that others can write"])
def test_damage_of_real_kernels(
    damage: Callable[[Path], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU kernel returns the same bits after its cache file was damaged or its folder was opened to other users."""
    function, arguments = calls()["paged_decode"]
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(kernel_cache.ENVIRONMENT_VARIABLE, str(folder))

    def result() -> list[np.ndarray]:
        jax.clear_caches()
        kernel_cache._cached.cache_clear()
        kernel_cache._warn_once.cache_clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*other users own it or can write it")
            warnings.filterwarnings("ignore", message=".*cannot deserialize a cached kernel")
            leaves = jax.tree.leaves(jax.jit(functools.partial(function))(*arguments))
        return [np.asarray(leaf).view(np.uint8) for leaf in leaves]

    want, files = result(), list(folder.iterdir())
    assert files
    if damage is None:
        folder.chmod(0o777)
    else:
        for file in files:
            damage(file)
    for got, expected in zip(result(), want, strict=True):
        np.testing.assert_array_equal(got, expected)
