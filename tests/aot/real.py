"""Compile-gate cases with the argument shapes of real models (`scripts.bench.shapes`).

The other modules have cases for each kernel configuration. These cases check that the configurations that are chosen
for real models compile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_attn import mla_decode, mla_prefill, paged_decode, paged_prefill
from scripts.bench import shapes
from tests.aot.case import Case, DeferredCase, deferred
from tests.kit import real_sizes
from tests.kit.real_sizes import MLA_SM_SCALE


@deferred
def real(operation: Callable[..., Any], arrays: Callable[..., Any], case: Any, cache: str, **static: Any) -> Case:
    """Return a case of an operation.

    Args:
      operation: the operation; it runs the Mosaic implementation.
      arrays: arrays(case, key) makes the arguments. Only their shapes are used.
      cache: name of the cache argument, which the compiled program must not copy.
      static: static arguments of the call.

    The limit of temporary memory, 1 GiB, is not close to the memory that the calls use.

    """
    shapes = jax.eval_shape(partial(arrays, case), jax.random.key(0))
    call = partial(operation, implementation="mosaic", **static)
    return Case(call, shapes, cache=cache, temporaries=2**30)


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


REAL: dict[str, DeferredCase] = {
    **{
        f"real-{slug(name)}": real(
            paged_decode, real_sizes.decode_arrays, case, "kv", return_lse=True, **real_sizes.static(case)
        )
        for name, case in shapes.DECODE.items()
    },
    **{
        f"real-prefill-{slug(name)}": real(
            paged_prefill, real_sizes.prefill_arrays, case, "kv", return_lse=True, **real_sizes.static(case)
        )
        for name, case in shapes.PREFILL.items()
    },
    **{
        f"real-mla-{slug(name)}": real(
            mla_decode, real_sizes.mla_decode_arrays, case, "cache", return_lse=True, sm_scale=MLA_SM_SCALE
        )
        for name, case in shapes.MLA_DECODE.items()
    },
    **{
        f"real-mla-prefill-{slug(name)}": real(
            mla_prefill, real_sizes.mla_prefill_arrays, case, "cache", sm_scale=MLA_SM_SCALE
        )
        for name, case in shapes.MLA_PREFILL.items()
    },
}
