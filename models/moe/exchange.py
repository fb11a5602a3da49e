"""Exchange of rows between devices that have different tokens and different experts, inside `jax.shard_map`.

Each device sends a token's row to the device of every expert that the token selected, and receives the expert's result.
The figure shows the arrays of device 0 of three devices. M is the number of rows of each device:

 rows by destination      received, space for M rows from each device              results, in the order of the rows
 ┌───┬──────┬─┐           ┌───┬───────┐ ┌──────┬────┐ ┌─┬─────────┐                ┌───┬──────┬─┐
 │ 0 │  1   │2│    ──▶    │ 0 │       │ │  1   │    │ │2│         │       ──▶      │ 0 │  1   │2│
 └───┴──────┴─┘           └───┴───────┘ └──────┴────┘ └─┴─────────┘                └───┴──────┴─┘

The receive buffer has space for all rows of all devices, because every row may select experts of one device. No row is
dropped; an uneven selection only takes more time. GPUs transfer only the used rows, with `jax.lax.ragged_all_to_all`.
CPUs do not support this operation and transfer the whole buffer.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_attn import capability


@dataclasses.dataclass(frozen=True)
class ExpertExchange:
    """Sizes of the segments of rows that this device exchanges with n devices. A segment is all rows that one device
    sends to another; they are contiguous and sorted by expert.

    Attributes:
      axis: name of the mesh axis of the devices.
      sent: entry [i, e] is the number of rows that this device sends to device i for expert e of device i.
      received: entry [i, e] is the number of rows that this device receives from device i for its own expert e.
      starts: index of the first row of the segment that this device sends to each device.
      their_starts: index, in the sender's rows, of the first row of the segment that each device sends to this device.
    """

    axis: str
    sent: Int32[Array, "n E"]
    received: Int32[Array, "n E"]
    starts: Int32[Array, "n"]
    their_starts: Int32[Array, "n"]

    @staticmethod
    def of(sent: Int32[Array, "n E"], axis: str) -> ExpertExchange:
        """Make the description from `sent`, by exchanging the numbers of rows between the devices along `axis`."""
        totals = jnp.sum(sent, axis=1, dtype=jnp.int32)
        starts = jnp.cumsum(totals) - totals
        theirs = lax.all_to_all(jnp.concatenate([sent, starts[:, None]], axis=1), axis, 0, 0, tiled=True)
        return ExpertExchange(axis, sent, theirs[:, :-1], starts, theirs[:, -1])

    @property
    def num_devices(self) -> int:
        return self.sent.shape[0]

    def experts(self, room: int) -> Int32[Array, "R"]:
        """Return the expert of each row of the receive buffer, from 0 to E - 1 on this device; E for unused rows.

        Args:
          room: number of rows of the receive buffer for each sender.
        """
        ends = jnp.cumsum(self.received, axis=1)
        place = jnp.arange(room, dtype=jnp.int32)
        return jnp.sum(ends[:, None, :] <= place[None, :, None], axis=-1, dtype=jnp.int32).reshape(-1)

    def send(self, rows: Float[Array, "M D"]) -> Float[Array, "R D"]:
        """Send rows, and return the receive buffer of R = n · M rows. `rows` are sorted by device and expert, as in
        `sent`."""
        room, width = rows.shape
        if _is_ragged():
            own = jnp.full((self.num_devices,), lax.axis_index(self.axis) * room, jnp.int32)
            received = jnp.zeros((self.num_devices * room, width), rows.dtype)
            return self._ragged(rows, received, self.starts, self.sent, own, self.received)
        place = self.starts[:, None] + jnp.arange(room, dtype=jnp.int32)[None, :]
        segments = rows[jnp.minimum(place, room - 1)]  # [n, M, D]
        return lax.all_to_all(segments, self.axis, 0, 0, tiled=True).reshape(-1, width)

    def send_back(self, rows: Float[Array, "R D"]) -> Float[Array, "M D"]:
        """Send the results of received rows back to their senders. Return the results of this device's rows, in the
        order in which `send` got the rows."""
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
        """Call `jax.lax.ragged_all_to_all` with segments of all experts. Arguments as in that function; `sent` and
        `received` are numbers of rows [n, E]."""
        sent, received = (jnp.sum(sizes, axis=1, dtype=jnp.int32) for sizes in (sent, received))
        return lax.ragged_all_to_all(rows, out, starts, sent, their_starts, received, axis_name=self.axis)


def _is_ragged() -> bool:
    """Return whether the call is compiled for devices that support `jax.lax.ragged_all_to_all`."""
    return capability().platform == "gpu"
