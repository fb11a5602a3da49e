"""Tests of running interpreted Triton kernels from JAX, inside jit, vmap, loops and shard_map, and of choosing them."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from jax.sharding import Mesh, PartitionSpec

from pallas_attn import explain, write_latent
from pallas_attn.runtime import dispatch
from pallas_attn.triton.launch import kernel, launch
from pallas_attn.types import PagedLatent
from tests.kit.harness import assert_same_bits


@kernel
def _scaled(x_ptr, bias_ptr, count, out_ptr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count) * FACTOR
    if bias_ptr is not None:
        x += tl.load(bias_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x, mask=at < count)


def scaled(x: jax.Array, bias: jax.Array | None = None, factor: float = 2.0, in_place: bool = False) -> jax.Array:
    (out,) = launch(
        _scaled,
        *(x, bias, x.size),
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(-(-x.size // 4),),
        constants={"FACTOR": factor, "BLOCK": 4},
        aliases={0: 0} if in_place else None,
    )
    return out


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_numbers_and_absent_operands(in_place: bool) -> None:
    assert_same_bits(scaled(jnp.asarray(X), in_place=in_place), 2 * X)
    assert_same_bits(scaled(jnp.asarray(X), jnp.asarray(10 * X), 3.0, in_place), 13 * X)


def test_under_jit_vmap_and_in_a_loop() -> None:
    assert_same_bits(jax.jit(jax.vmap(scaled))(X), 2 * X)
    after, each = jax.jit(lambda x: jax.lax.scan(lambda carry, _: (scaled(carry), carry), x, length=3))(X)
    assert_same_bits((after, each), (8 * X, np.stack([X, 2 * X, 4 * X])))


@pytest.mark.parametrize("check_vma", [False, True])
def test_operation_inside_shard_map(check_vma: bool) -> None:
    """Pages, tokens and slots are split over two devices. Each device writes its tokens to its pages."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), "x")
    pages, latent = jnp.zeros((4, 2, 32)), jnp.ones((6, 32)) * jnp.arange(6.0)[:, None]
    slots = jnp.array([0, 3, -1, 2, 1, 0], jnp.int32)

    def write(pages: jax.Array, latent: jax.Array, slots: jax.Array, implementation: str) -> jax.Array:
        return write_latent(PagedLatent(pages), latent, slots, implementation=implementation).pages

    def sharded(implementation: str) -> jax.Array:
        function = functools.partial(write, implementation=implementation)
        spec = PartitionSpec("x")
        mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return jax.jit(mapped)(pages, latent, slots)

    assert_same_bits(sharded("triton"), sharded("xla"))


# --- dispatch

ARGUMENTS = (PagedLatent(jnp.zeros((2, 2, 32))), jnp.ones((1, 32)), jnp.zeros((1,), jnp.int32))


def test_interpreted_kernels_run_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = explain("write_latent", *ARGUMENTS)
    wanted = "needs a GPU of compute capability 8.0 or later, this is cpu"
    assert (explanation.chosen, explanation.refused["triton"]) == ("xla", wanted)
    assert explain("write_latent", *ARGUMENTS, implementation="triton").chosen == "triton"
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "triton")
    assert explain("write_latent", *ARGUMENTS).chosen == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    assert explain("write_latent", *ARGUMENTS).refused == {"triton": wanted}


def test_error_of_a_broken_kernel_names_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("module 'triton' has no attribute 'jit'")

    monkeypatch.setattr(dispatch, "_attempt", broken)
    with pytest.raises(NotImplementedError, match=r"breaks: AttributeError: .* \(triton 3\.\S+, jax 0\.\S+\)$"):
        write_latent(*ARGUMENTS, implementation="triton")


NO_TRITON = """
import sys
sys.modules["triton"] = None
from unittest import mock
import jax.numpy as jnp
import pallas_attn
from pallas_attn.runtime import device
card = device.Device("gpu", "NVIDIA L4", (8, 9), 58, 99 * 1024, 100 * 1024)
with mock.patch.object(device, "triton_card", return_value=card):
    cache = pallas_attn.PagedLatent(jnp.zeros((2, 2, 32)))
    print(pallas_attn.explain("write_latent", cache, jnp.ones((1, 32)), jnp.zeros((1,), jnp.int32)))
"""


def test_missing_triton_is_unsupported() -> None:
    command = [sys.executable, "-W", "error", "-c", NO_TRITON]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("write_latent: xla\n")
    assert "not triton: needs triton: pip install 'pallas_attn[triton]'" in printed
