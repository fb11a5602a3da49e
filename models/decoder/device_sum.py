"""Sums of what devices of a mesh found, by a kernel of ours where they are small, else by XLA's all-reduce."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.decoder.mesh import AXES, COLUMNS, CONTEXT, EXPERT, TENSOR, num_devices
from pallas_attn import run_kept

if TYPE_CHECKING:
    from models.decoder.peer_sum import PeerMemory

INNER = (TENSOR, CONTEXT, EXPERT)
"""`COLUMNS` in the order of a mesh's axes, so that devices along them follow one another."""

_memory: contextvars.ContextVar[PeerMemory | None] = contextvars.ContextVar("peer memory", default=None)


def device_sum(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Adds up over `COLUMNS` of a model's mesh, inside `jax.shard_map` over it; by our kernel where its memory is at
    hand (`summing_in`) and it takes the array."""
    memory = _memory.get()
    if memory is not None and memory.inbox.dtype == x.dtype:
        from models.decoder.peer_sum import PeerSum, peer_sum, takes  # which imports a kernel language

        if takes(x.size, x.dtype):
            return run_kept(peer_sum, PeerSum(x, memory))
    return lax.psum(x, COLUMNS)


@contextlib.contextmanager
def summing_in(memory: PeerMemory | None) -> Iterator[None]:
    """Within it `device_sum` has a device's memory of `peer_memory`, or none."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


def peer_memory(mesh: Mesh, dtype: DTypeLike) -> PeerMemory | None:
    """Allocates what our kernel needs on a mesh, split by `peer_memory_partition`; None where it does not run: on other
    devices than Hopper GPUs of one process that reach one another's memory, or where nothing is added up.

    The arrays are changed behind XLA's back: they belong to one engine, whose steps run one after the other.
    """
    devices, given = num_devices(mesh, INNER), mesh.devices.ravel().tolist()
    if devices == 1 or jax.process_count() > 1 or jnp.dtype(dtype).itemsize not in (2, 4):
        return None
    if any(getattr(device, "compute_capability", None) != "9.0" for device in given) or not _reach_each_other(given):
        return None
    from models.decoder.peer_sum import CONTROL, FIRST, RANK, PeerMemory, inbox_shape

    own = inbox_shape(devices, dtype)
    control = np.zeros((mesh.size, CONTROL), np.int32)
    control[:, RANK] = np.arange(mesh.size) % devices
    control[:, FIRST] = np.arange(mesh.size) // devices * devices
    split = NamedSharding(mesh, PartitionSpec(AXES))
    controls = jax.device_put(control.reshape(-1), split)
    inbox = jnp.zeros((mesh.size * own[0], *own[1:]), dtype, device=split)
    addresses = np.zeros((mesh.size, 2), np.int64)
    for number, device in enumerate(given):
        for column, array in enumerate((controls, inbox)):
            (shard,) = (shard.data for shard in array.addressable_shards if shard.device == device)
            addresses[number, column] = shard.unsafe_buffer_pointer()
    halves = addresses.view(np.int32).reshape(mesh.size, 2, 2)
    return PeerMemory(controls, inbox, jax.device_put(halves, NamedSharding(mesh, PartitionSpec())))


def _reach_each_other(devices: Sequence[jax.Device]) -> bool:
    """Whether GPUs may read and write one another's memory, as the driver says, and XLA's allocator lets them: it opens
    what it takes from the driver to all devices, but not what it leaves in the driver's pools."""
    if "async" in os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", ""):
        return False
    cuda, can = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    numbers = [device.local_hardware_id for device in devices]
    return all(
        cuda.cuDeviceCanAccessPeer(ctypes.byref(can), ctypes.c_int(one), ctypes.c_int(other)) == 0 and can.value != 0
        for one, other in itertools.permutations(numbers, 2)
    )


def peer_memory_partition(memory: Any) -> Any:
    """`PartitionSpec` of what `peer_memory` returns."""
    return None if memory is None else type(memory)(PartitionSpec(AXES), PartitionSpec(AXES), PartitionSpec())
