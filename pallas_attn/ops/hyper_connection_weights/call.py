"""Arguments of one call of `hyper_connection_weights`."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
from jaxtyping import Array, Float32

from pallas_attn import checks
from pallas_attn.ops.call_base import OperationCall


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HyperConnectionWeightsCall(OperationCall):
    """Validated arguments of `hyper_connection_weights`; see its docstring."""

    op: ClassVar[str] = "hyper_connection_weights"

    logits: Float32[Array, "T columns"]
    inverse_rms: Float32[Array, "T"]
    scale: Float32[Array, "3"]
    base: Float32[Array, "columns"]
    iterations: int = dataclasses.field(metadata={"static": True})
    eps: float = dataclasses.field(metadata={"static": True})

    @property
    def num_streams(self) -> int:
        """n: the logits have (2 + n) · n = (n + 1)² - 1 columns."""
        return math.isqrt(self.logits.shape[1] + 1) - 1

    def validate(self) -> None:
        """Raise ValueError unless the arguments fit each other."""
        dims = checks.Dims()
        dims.check("logits", self.logits, "T columns", checks.F32)
        n = self.num_streams
        if (2 + n) * n != dims["columns"]:
            raise ValueError(f"logits: expected (2 + n) · n columns for n streams, got {dims['columns']}")
        dims.check("inverse_rms", self.inverse_rms, "T", checks.F32)
        dims.check("scale", self.scale, "3", checks.F32)
        dims.check("base", self.base, "columns", checks.F32)
