"""Sums over the devices of a mesh: which are our kernel's, and on several cards what it finds."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.decoder import device_sum, make_mesh, over_mesh, peer_sum
from models.decoder.mesh import AXES


def test_the_kernel_takes_small_arrays_of_whole_tiles():
    assert peer_sum.takes(64 * 4096, jnp.bfloat16)
    assert peer_sum.takes(128 * 4096, jnp.bfloat16)
    assert not peer_sum.takes(129 * 4096, jnp.bfloat16)  # more than fits the inbox
    assert not peer_sum.takes(512, jnp.bfloat16)  # less than its threads load at once
    assert peer_sum.takes(512, jnp.float32)
    assert not peer_sum.takes(0, jnp.float32)
    assert peer_sum.num_programs(3 * 5120, jnp.bfloat16) == 15
    assert not peer_sum.takes(67 * 16 * 1024, jnp.bfloat16)  # a prime number of tiles has one program
    assert math.prod(peer_sum.inbox_shape(4, jnp.float32)) * 4 == 2 * 4 * peer_sum.PROGRAMS * peer_sum.PIECE_BYTES


@pytest.mark.usefixtures("unchecked_shapes")
def test_other_devices_have_no_memory_for_it(monkeypatch):
    two = make_mesh({"tensor": 2})
    assert device_sum.peer_memory(two, jnp.bfloat16) is None
    cards = [SimpleNamespace(compute_capability="9.0", local_hardware_id=number) for number in range(2)]
    hopper: Any = SimpleNamespace(devices=np.array(cards), shape=two.shape, size=2)
    monkeypatch.setattr(device_sum.ctypes, "CDLL", lambda _: SimpleNamespace(cuDeviceCanAccessPeer=lambda *_: 0))
    assert device_sum.peer_memory(hopper, jnp.bfloat16) is None  # the driver says no
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    monkeypatch.setattr(device_sum.ctypes, "CDLL", lambda _: pytest.fail("asked the driver"))
    assert device_sum.peer_memory(hopper, jnp.bfloat16) is None
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert device_sum.peer_memory(hopper, jnp.bfloat16) is None
    assert device_sum.peer_memory_partition(None) is None


SIZES = [{"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"tensor": 2, "context": 2}, {"expert": 4}]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_cards_find_the_sum_and_the_same_bits(sizes: dict[str, int], dtype: Any):
    """One call after the other, each on what the one before gave, as the layers of a step; of different sizes, so that
    programs have made different numbers of calls."""
    devices, calls = math.prod(sizes.values()), 8
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} cards")
    mesh = make_mesh(sizes)
    memory = device_sum.peer_memory(mesh, dtype)
    assert memory is not None

    def chain(x: jax.Array, memory: Any) -> jax.Array:
        own, sums = x[0], []
        with device_sum.summing_in(memory):
            for _ in range(calls):
                sums.append(device_sum.device_sum(own))
                own = (own + sums[-1]) / 4
        return jnp.stack(sums)[None]

    specs = P(AXES), device_sum.peer_memory_partition(memory)
    run = jax.jit(over_mesh(chain, mesh, specs, P(AXES)))
    ranks = mesh.shape["data"]
    for shape in [(1, 2048), (3, 5120), (64, 4096)] * 3:
        given = jnp.asarray(np.random.default_rng(shape[0]).standard_normal((devices, *shape)), dtype)
        assert "psum" not in str(run.trace(given, memory).jaxpr)
        found = np.asarray(run(given, memory).astype(jnp.float32)).reshape(ranks, devices // ranks, calls, *shape)
        np.testing.assert_array_equal(found, np.broadcast_to(found[:, :1], found.shape))
        own = np.asarray(given.astype(jnp.float32)).reshape(ranks, -1, *shape)
        for call in range(calls):
            tolerance = 0.1 if dtype == jnp.bfloat16 else 1e-4
            np.testing.assert_allclose(found[:, 0, call], own.sum(axis=1), atol=tolerance)
            own = np.asarray(jnp.asarray((own + found[:, :, call]) / 4, dtype).astype(jnp.float32))
