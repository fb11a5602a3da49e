"""Arguments of one call of `gather_latent`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall
from pallas_attn.types import PagedLatent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatherLatentCall(OperationCall):
    """Validated arguments of `gather_latent`.

    Implementations receive `latent_new` rounded to the values that would be read from the cache after a write.
    """

    op: ClassVar[str] = "gather_latent"

    cache: PagedLatent
    latent_new: Float[Array, "T LR"]
    block_tables: Int32[Array, "S P"]
    cu_q_lens: Int32[Array, "S_plus_1"]
    kv_lens: Int32[Array, "S"]
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def num_sequences(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def num_new(self) -> int:
        return self.latent_new.shape[0]

    def bounded(self) -> GatherLatentCall:
        """Return the call that implementations receive: lengths are clipped to the sizes of the arrays."""
        cu_q_lens = checks.bound_sums(self.cu_q_lens, self.num_new)
        cached = self.block_tables.shape[1] * self.cache.page_size
        most = min(cached, checks.INT32_RANGE.max - self.num_new) + jnp.diff(cu_q_lens)
        return dataclasses.replace(self, cu_q_lens=cu_q_lens, kv_lens=checks.bound_lens(self.kv_lens, most))

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        checks.check_latent(self.cache, dims)
        checks.check_new_latents("latent_new", self.latent_new, self.cache, dims)
        dims.check("block_tables", self.block_tables, "S P", checks.INT)
        dims.check("cu_q_lens", self.cu_q_lens, "S+1", checks.INT)
        dims.check("kv_lens", self.kv_lens, "S", checks.INT)
        checks.size("length", self.length)
