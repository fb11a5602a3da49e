"""Sums of what devices of a mesh found, by a kernel of ours where they are small, else by XLA's all-reduce."""

from __future__ import annotations

import jax
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from models.decoder.mesh import COLUMNS, CONTEXT, DATA, EXPERT, TENSOR, num_devices
from pallas_attn import capability

MOST_BYTES = 2**20
"""Bytes, at most, that a device sends for a sum by the kernel, which forwards nothing: all of them to each peer."""

INNER = (TENSOR, CONTEXT, EXPERT)
"""`COLUMNS` in the order of a mesh's axes, so that devices along them have consecutive numbers."""


def device_sum(x: Float[Array, "*dims"], mesh: Mesh) -> Float[Array, "*dims"]:
    """Adds up over `COLUMNS` of a model's mesh, inside `jax.shard_map` over it."""
    if takes_kernel(x, mesh):
        from models.decoder.peer_sum import peer_sum  # which imports a kernel language

        return peer_sum(x, INNER, (DATA,))
    return lax.psum(x, COLUMNS)


def takes_kernel(x: Float[Array, "*dims"], mesh: Mesh) -> bool:
    """Whether a sum is `peer_sum`'s: of few bytes, compiled for Hopper GPUs of one process, in the order of their
    numbers, which is what a Mosaic kernel knows its peers by."""
    devices = num_devices(mesh, INNER)
    if devices == 1 or (devices - 1) * x.size * x.dtype.itemsize > MOST_BYTES or jax.process_count() > 1:
        return False
    if capability().compute_capability != (9, 0) or mesh.device_ids.ravel().tolist() != [*range(mesh.size)]:
        return False
    from models.decoder.peer_sum import tile_elements

    return x.size % tile_elements(x.dtype) == 0
