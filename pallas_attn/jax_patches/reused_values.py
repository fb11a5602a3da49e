"""Emit constants, and numbers of threads and lanes, once for all operations of a kernel that need them.

jax emits a constant for each use of it, and how threads are numbered for each array whose elements it asks for: 13
operations for the number of a thread, 10 to 30 more for its place in a layout. Of the 23,700 operations of `mla_decode`
with 128 heads these are 11,000. MLIR finds the copies later, and the machine code is the same without them.

A value is reused where it was computed before in the same block or in one around it, as MLIR's own search for common
subexpressions would; constants are put at the beginning of the kernel. Only kernels with lane semantics are emitted so:
in others layouts are inferred for each operation, and some regions may not use values from outside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

LAUNCH = "gpu.launch"


class Values:
    """Values of the kernel that is being emitted.

    Attributes:
      body: block of the kernel; others are inside operations of it.
    """

    def __init__(self, body: ir.Block):
        self.body = body
        self._constants: dict[Any, ir.Value] = {}
        self._computed: dict[Any, Any] = {}
        self._around: dict[ir.Block, tuple[ir.Block, ...]] = {}

    def around(self, block: ir.Block) -> tuple[ir.Block, ...]:
        """The block and those around it, up to the body of the kernel; empty for a block that is not in it.

        Blocks of a kernel stay while it is emitted. Others, of the host or of a module that is thrown away, may not,
        and another may then have the address by which they are told apart: nothing is remembered of them.
        """
        if block in self._around:
            return self._around[block]
        path = [block]
        while path[-1] != self.body:
            operation = path[-1].owner.operation
            if operation.parent is None:
                return ()
            path.append(operation.block)
        self._around[block] = tuple(path)
        return self._around[block]

    def constant(self, make: Callable[..., ir.Value], result: Any, value: Any) -> ir.Value:
        """`make(result, value)`, at the beginning of the kernel."""
        if not self.around(ir.InsertionPoint.current.block):
            return make(result, value)
        key = (result, type(value), value.hex() if isinstance(value, float) else value)  # 0.0 == -0.0
        if key not in self._constants:
            with ir.InsertionPoint.at_block_begin(self.body):
                self._constants[key] = make(result, value)
        return self._constants[key]

    def computed(self, make: Callable[..., Any], *of: Any) -> Any:
        """`make(*of)`, which is the same throughout a thread, as it was computed before where that can be used."""
        around = self.around(ir.InsertionPoint.current.block)
        for block in around:
            if (found := self._computed.get((make, of, block))) is not None:
                return found
        result = make(*of)
        if around:
            self._computed[make, of, around[0]] = result
        return result


_emitting = threading.local()


def _values() -> Values | None:
    """Values of the kernel that this thread emits; None if there is none, or it has no lane semantics."""
    return getattr(_emitting, "values", None)


def emitting_once(lower_jaxpr: Callable[..., Any]) -> Callable[..., Any]:
    """`lower_jaxpr_to_mosaic_gpu`, within which values are reused."""

    @functools.wraps(lower_jaxpr)
    def lower(module_ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if _values() is not None or module_ctx.lowering_semantics != mgpu.LoweringSemantics.Lane:
            return lower_jaxpr(module_ctx, *args, **kwargs)
        block = ir.InsertionPoint.current.block
        while (operation := block.owner.operation).name != LAUNCH:
            if operation.parent is None:  # no kernel is launched here
                return lower_jaxpr(module_ctx, *args, **kwargs)
            block = operation.block
        _emitting.values = Values(block)
        try:
            return lower_jaxpr(module_ctx, *args, **kwargs)
        finally:
            del _emitting.values

    return lower


def constant_once(constant: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """`arith.constant` that reuses constants."""

    @functools.wraps(constant)
    def make(result: Any, value: Any, *, loc: Any = None, ip: Any = None) -> ir.Value:
        values = _values()
        if values is None or loc is not None or ip is not None or not isinstance(value, int | float | ir.Attribute):
            return constant(result, value, loc=loc, ip=ip)
        return values.constant(constant, result, value)

    return make


def computed_once(compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function of values that are hashable, such as layouts, which tells a thread its place."""

    @functools.wraps(compute)
    def once(*of: Any, **more: Any) -> Any:
        values = _values()
        if values is None or more or any(isinstance(each, ir.Value) for each in of):
            return compute(*of, **more)
        return values.computed(compute, *of)

    return once
