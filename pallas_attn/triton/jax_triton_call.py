"""Launch kernels with `jax_triton.triton_call`, the function of the package jax-triton for users' Triton kernels.

`launch` uses this module if the environment variable PALLAS_ATTN_JAX_TRITON is 1. The program gets the same custom
calls as from `launch`: same handler, PTX, grid, parameters and aliases, except for numbers that are 1, which jax-triton
makes constants. jax-triton compiles a kernel when the program is lowered, not when it is traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.interpreters import partial_eval  # JAX has no public name for the rules of dead-code elimination

from pallas_attn.triton import launch


def caller(
    function: Any,
    operands: Sequence[Any],
    outputs: Sequence[Any],
    aliases: Mapping[int, int],
    **options: Any,
) -> Callable[..., list[jax.Array]]:
    """Return a function of the arrays in `operands` that calls a kernel and returns its outputs.

    Args:
      function, operands, outputs, aliases: as for `launch`.
      options: constants of the kernel, and further arguments of `triton_call`.

    Raises:
      NotImplementedError: jax-triton cannot be imported or does not support the installed version of jax, or JAX's CUDA
        plugin is not installed.
    """
    launch.call_encoder()
    try:
        import jax_triton  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise NotImplementedError(f"PALLAS_ATTN_JAX_TRITON=1 needs jax-triton: {error}") from error
    _check_versions(jax_triton)
    parameters = [name for name in function.arg_names if name not in options]
    operand_names, output_names = parameters[: len(operands)], parameters[len(operands) :]

    def call(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        given = [_as_bytes(next(rest)) if hasattr(x, "dtype") else x for x in operands]
        # For jax-triton, an updated array is one parameter, a Ref. Kernels have a second parameter for it, which they
        # do not use. Any other array is passed for it, so that the updated array has only one use.
        refs = {output: jax.new_ref(given[operand]) for operand, output in aliases.items()}
        unused = next(x for i, x in enumerate(given) if hasattr(x, "dtype") and i not in aliases)
        passed = {operand_names[i]: unused if i in aliases else x for i, x in enumerate(given)}
        new = iter(
            jax_triton.triton_call(
                kernel=function,
                out_type=[_bytes_of(x) for i, x in enumerate(outputs) if i not in refs],
                **passed | {output_names[i]: ref for i, ref in refs.items()},
                **options,
            )
        )
        written = [jax.freeze(refs[i]) if i in refs else next(new) for i in range(len(outputs))]
        return [lax.bitcast_convert_type(x, output.dtype) for x, output in zip(written, outputs, strict=True)]

    return call


def _check_versions(jax_triton: Any) -> None:
    """Raise NotImplementedError if jax cannot call jax-triton's rule for dead-code elimination.

    Otherwise jax would raise a TypeError when it lowers the program. jax 0.12 passes three arguments to the rule, and
    jax-triton 0.4.1 accepts two.
    """
    if jax.__version_info__ < (0, 12):
        return
    rule = partial_eval.dce_rules.get(jax_triton.triton_lib.triton_kernel_call_p)
    if rule is None:
        return
    try:
        inspect.signature(rule).bind("used_outputs", "live_inputs", "equation")
    except TypeError as error:
        raise NotImplementedError(
            f"PALLAS_ATTN_JAX_TRITON=1: jax-triton {jax_triton.__version__} does not support jax {jax.__version__}: its"
            f" rule for dead-code elimination does not accept jax's three arguments ({error}); use jax 0.11, or unset"
            " the variable"
        ) from error


def _as_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8) if launch.TYPES[x.dtype.name] == "u8" else x


def _bytes_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.uint8 if launch.TYPES[x.dtype.name] == "u8" else x.dtype)
