"""Exchange of rows between devices that have different tokens and different experts, inside `jax.shard_map`.

Each device sends a row to the device of every expert that its token selected, and receives the result of the expert.

 rows by destination      received, space for M rows from each device              results, in the order of the rows
 ┌───┬──────┬─┐           ┌───┬───────┐ ┌──────┬────┐ ┌─┬─────────┐                ┌───┬──────┬─┐
 │ 0 │  1   │2│    ──▶    │ 0 │       │ │  1   │    │ │2│         │       ──▶      │ 0 │  1   │2│
 └───┴──────┴─┘           └───┴───────┘ └──────┴────┘ └─┴─────────┘                └───┴──────┴─┘

The receive buffer has space for all rows of all devices, because a router may send every row to one device. An uneven
selection therefore takes more time, but no row is dropped. GPUs transfer only the rows, by `jax.lax.ragged_all_to_all`.
CPUs do not have this operation and transfer the whole buffer.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn import capability


@dataclasses.dataclass(frozen=True)
class ExpertExchange:
    """Contiguous segments of rows that a device sends to and receives from each of n devices.

    Attributes:
      axis: mesh axis of the devices.
      sent: number of rows for each of the E experts of each device, in the order of the rows.
      received: number of rows from each device for each of the E experts of this device.
      starts: first row of each segment that this device sends.
      their_starts: first row of each received segment, in the sender's array.
    """

    axis: str
    sent: Int32[Array, "n E"]
    received: Int32[Array, "n E"]
    starts: Int32[Array, "n"]
    their_starts: Int32[Array, "n"]

    @staticmethod
    def of(sent: Int32[Array, "n E"], axis: str) -> ExpertExchange:
        """Exchange the numbers of rows between the devices along `axis`."""
        totals = jnp.sum(sent, axis=1, dtype=jnp.int32)
        starts = jnp.cumsum(totals) - totals
        theirs = lax.all_to_all(jnp.concatenate([sent, starts[:, None]], axis=1), axis, 0, 0, tiled=True)
        return ExpertExchange(axis, sent, theirs[:, :-1], starts, theirs[:, -1])

    @property
    def num_devices(self) -> int:
        return self.sent.shape[0]

    def experts(self, room: int) -> Int32[Array, "R"]:
        """Return the expert of each row of the receive buffer, numbered on this device; E for unused rows.

        Args:
          room: rows of the receive buffer per device.
        """
        ends = jnp.cumsum(self.received, axis=1)
        place = jnp.arange(room, dtype=jnp.int32)
        return jnp.sum(ends[:, None, :] <= place[None, :, None], axis=-1, dtype=jnp.int32).reshape(-1)

    def send(self, rows: Float[Array, "M D"]) -> Float[Array, "R D"]:
        """Send rows, sorted as in `sent`, and return the receive buffer of R = n · M rows."""
        room, width = rows.shape
        if _is_ragged():
            own = jnp.full((self.num_devices,), lax.axis_index(self.axis) * room, jnp.int32)
            received = jnp.zeros((self.num_devices * room, width), rows.dtype)
            return self._ragged(rows, received, self.starts, self.sent, own, self.received)
        place = self.starts[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
        segments = rows[jnp.minimum(place, room - 1)]  # [n, M, D]
        return lax.all_to_all(segments, self.axis, 0, 0, tiled=True).reshape(-1, width)

    def send_back(self, rows: Float[Array, "R D"]) -> Float[Array, "M D"]:
        """Send the results of received rows back; return the results of this device's rows, in the order of `send`."""
        room, width = rows.shape[0] // self.num_devices, rows.shape[1]
        if _is_ragged():
            begins = jnp.arange(self.num_devices, dtype=jnp.int32) * room
            returned = jnp.zeros((room, width), rows.dtype)
            return self._ragged(rows, returned, begins, self.received, self.their_starts, self.sent)
        segments = lax.all_to_all(rows.reshape(-1, room, width), self.axis, 0, 0, tiled=True)  # [n, M, D]
        place = jnp.arange(room, dtype=jnp.int32)
        device = jnp.sum(self.starts[None, 1:] <= place[:, None], axis=1, dtype=jnp.int32)
        return segments[device, place - self.starts[device]]

    def _ragged(
        self, rows: Array, out: Array, starts: Array, sent: Array, their_starts: Array, received: Array
    ) -> Array:
        """Call `jax.lax.ragged_all_to_all` with the numbers of rows summed over experts."""
        sent, received = (jnp.sum(sizes, axis=1, dtype=jnp.int32) for sizes in (sent, received))
        return lax.ragged_all_to_all(rows, out, starts, sent, their_starts, received, axis_name=self.axis)


def _is_ragged() -> bool:
    """Return whether the call is compiled for devices that support `jax.lax.ragged_all_to_all`."""
    return capability().platform == "gpu"
