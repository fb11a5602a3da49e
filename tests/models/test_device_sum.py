"""Sums over the devices of a mesh: which are our kernel's, and on several cards what it finds."""

import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.decoder import device_sum, make_mesh, over_mesh
from models.decoder.mesh import normal_mesh
from pallas_attn import Capability

HOPPER = Capability("gpu", (9, 0))


def takes_kernel(shape: tuple[int, ...], dtype: Any = jnp.bfloat16, mesh: Mesh | None = None, on: Any = HOPPER) -> bool:
    mesh = make_mesh({"tensor": 2}) if mesh is None else mesh
    with mock.patch.object(device_sum, "capability", return_value=on):
        return device_sum.takes_kernel(jnp.zeros(shape, dtype), mesh)


def test_small_sums_are_the_kernels(monkeypatch):
    two = make_mesh({"tensor": 2})
    assert takes_kernel((64, 4096), mesh=two)
    assert not takes_kernel((64, 4096), on=Capability("gpu", (10, 0)))
    assert not takes_kernel((64, 4096), on=Capability("cpu", None))
    assert takes_kernel((128, 4096))
    assert not takes_kernel((129, 4096))  # more bytes than it is for
    assert not takes_kernel((1, 512))  # less than its threads load at once
    assert takes_kernel((1, 512), jnp.float32)
    four = make_mesh({"tensor": 2, "context": 2})
    assert takes_kernel((32, 4096), mesh=four)
    assert not takes_kernel((64, 4096), mesh=four)  # three times as many, to three peers
    assert not takes_kernel((64, 4096), mesh=make_mesh({"data": 2}))  # nothing to add up
    turned = normal_mesh(Mesh(np.array(jax.devices()[1::-1]), ("tensor",)))
    assert not takes_kernel((64, 4096), mesh=turned)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not takes_kernel((64, 4096), mesh=two)


SIZES = [{"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"tensor": 2, "context": 2}, {"expert": 4}]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(1, 2048), (3, 5120), (64, 4096)])
def test_cards_find_the_sum_and_the_same_bits(sizes: dict[str, int], dtype: Any, shape: tuple[int, int], monkeypatch):
    """One call after the other, each on what the one before gave, as the layers of a step."""
    devices = math.prod(sizes.values())
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} cards")
    mesh, calls = make_mesh(sizes), 8
    monkeypatch.setattr(device_sum, "MOST_BYTES", 2**23)

    def chain(x: jax.Array) -> jax.Array:
        own, sums = x[0], []
        for _ in range(calls):
            assert device_sum.takes_kernel(own, mesh)
            total = device_sum.device_sum(own, mesh)
            sums.append(total)
            own = (own + total) / 4
        return jnp.stack(sums)[None]

    rng, split = np.random.default_rng(0), P(("data", "tensor", "context", "expert"))
    given = jnp.asarray(rng.standard_normal((devices, *shape)), dtype)
    run = jax.jit(over_mesh(chain, mesh, split, split))
    ranks = mesh.shape["data"]
    for _ in range(3):
        found = np.asarray(run(given).astype(jnp.float32)).reshape(ranks, devices // ranks, calls, *shape)
        np.testing.assert_array_equal(found, np.broadcast_to(found[:, :1], found.shape))
        own = np.asarray(given.astype(jnp.float32)).reshape(ranks, -1, *shape)
        for call in range(calls):
            wanted = own.sum(axis=1)
            np.testing.assert_allclose(found[:, 0, call], wanted, atol=0.2 if dtype == jnp.bfloat16 else 1e-4)
            own = (own + found[:, :, call]) / 4  # rounded by the device, so errors do not add up
            own = np.asarray(jnp.asarray(own, dtype).astype(jnp.float32))
