"""Exchange of tokens between devices that have different tokens and different experts, inside `jax.shard_map`.

Each device sends a row to the device of every expert that its token chose, and gets back what the expert made of it.

 rows by destination      received, a run of room for M rows from each device      results, where the rows were
 ┌───┬──────┬─┐           ┌───┬───────┐ ┌──────┬────┐ ┌─┬─────────┐                ┌───┬──────┬─┐
 │ 0 │  1   │2│    ──▶    │ 0 │       │ │  1   │    │ │2│         │       ──▶      │ 0 │  1   │2│
 └───┴──────┴─┘           └───┴───────┘ └──────┴────┘ └─┴─────────┘                └───┴──────┴─┘

There is room for all rows of all devices, since a router may send every one of them to the same device: it costs time,
and drops nothing. GPUs send the rows alone, by `jax.lax.ragged_all_to_all`; that is not there on CPUs, where all of the
room travels.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn import capability


@dataclasses.dataclass(frozen=True)
class ExpertExchange:
    """Runs of rows that a device sends to each of n devices and receives from them, those of each expert apart.

    Attributes:
      axis: the mesh axis of the devices.
      sent: rows for each expert of each device, in this order.
      received: rows from each device for each of this one's experts.
      starts: where the runs begin that are sent.
      their_starts: where the runs that are received begin among their sender's.
    """

    axis: str
    sent: Int32[Array, "n E"]
    received: Int32[Array, "n E"]
    starts: Int32[Array, "n"]
    their_starts: Int32[Array, "n"]

    @staticmethod
    def of(sent: Int32[Array, "n E"], axis: str) -> ExpertExchange:
        """Tells the devices of each other's numbers of rows."""
        totals = jnp.sum(sent, axis=1, dtype=jnp.int32)
        starts = jnp.cumsum(totals) - totals
        told = lax.all_to_all(jnp.concatenate([sent, starts[:, None]], axis=1), axis, 0, 0, tiled=True)
        return ExpertExchange(axis, sent, told[:, :-1], starts, told[:, -1])

    @property
    def num_devices(self) -> int:
        return self.sent.shape[0]

    def experts(self, room: int) -> Int32[Array, "R"]:
        """Expert of each received row, by its number on this device; one past the last where there is no row."""
        ends = jnp.cumsum(self.received, axis=1)
        place = jnp.arange(room, dtype=jnp.int32)
        return jnp.sum(ends[:, None, :] <= place[None, :, None], axis=-1, dtype=jnp.int32).reshape(-1)

    def send(self, rows: Float[Array, "M D"]) -> Float[Array, "R D"]:
        """Sends rows, which are in the order of `sent`; returns those that were received."""
        room, width = rows.shape
        if _is_ragged():
            own = jnp.full((self.num_devices,), lax.axis_index(self.axis) * room, jnp.int32)
            received = jnp.zeros((self.num_devices * room, width), rows.dtype)
            return self._ragged(rows, received, self.starts, self.sent, own, self.received)
        place = self.starts[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
        runs = rows[jnp.minimum(place, room - 1)]
        return lax.all_to_all(runs, self.axis, 0, 0, tiled=True).reshape(-1, width)

    def send_back(self, rows: Float[Array, "R D"]) -> Float[Array, "M D"]:
        """Sends back what was made of received rows; returns what was made of this device's, where the rows were."""
        room, width = rows.shape[0] // self.num_devices, rows.shape[1]
        if _is_ragged():
            begins = jnp.arange(self.num_devices, dtype=jnp.int32) * room
            returned = jnp.zeros((room, width), rows.dtype)
            return self._ragged(rows, returned, begins, self.received, self.their_starts, self.sent)
        runs = lax.all_to_all(rows.reshape(-1, room, width), self.axis, 0, 0, tiled=True)
        place = jnp.arange(room, dtype=jnp.int32)
        device = jnp.sum(self.starts[None, 1:] <= place[:, None], axis=1, dtype=jnp.int32)
        return runs[device, place - self.starts[device]]

    def _ragged(
        self, rows: Array, out: Array, starts: Array, sent: Array, their_starts: Array, received: Array
    ) -> Array:
        sent, received = (jnp.sum(sizes, axis=1, dtype=jnp.int32) for sizes in (sent, received))
        return lax.ragged_all_to_all(rows, out, starts, sent, their_starts, received, axis_name=self.axis)


def _is_ragged() -> bool:
    """Whether the call is compiled for devices that exchange runs of rows."""
    return capability().platform == "gpu"
