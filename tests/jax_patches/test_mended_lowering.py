"""Tests of the correction of `FragmentedArray.select` of Mosaic GPU: its result has the signedness of its choices."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.jax_patches import mended_lowering
from pallas_attn.mosaic.primitives import basics
from tests.aot import signs


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the original `select` of JAX, and check the signedness of each value that Mosaic lowers."""
    rules = lowering.mosaic_lowering_rules[gpu_core.LANExWG_SEMANTICS]
    for primitive, rule in rules.items():
        monkeypatch.setitem(rules, primitive, signs.checked(primitive, rule))
    monkeypatch.setattr(FragmentedArray, "select", inspect.unwrap(FragmentedArray.select))
    mended_lowering.apply.cache_clear()
    yield
    mended_lowering.apply.cache_clear()


def lower(dtype: Any, semantics: plgpu.LoweringSemantics, true: Any, false: Any) -> None:
    """Lower a kernel with `jnp.where(condition, true(x), false(x))`."""

    def body(x_gmem: Any, out_gmem: Any) -> None:
        x = basics.load(x_gmem, plgpu.Layout.WG_STRIDED((128,), vec_size=1))
        out_gmem[...] = jnp.maximum(jnp.where(x > 5, true(x), false(x)), 0).astype(dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exporting = jax.export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=checks)
    exporting(jax.ShapeDtypeStruct((128,), dtype))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("variable", ["0", "1"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.float32])
def test_select_keeps_the_sign(dtype: Any, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the correction, `select` keeps the signedness. The variable PALLAS_ATTN_PATCH_JAX does not disable it."""
    monkeypatch.setenv("PALLAS_ATTN_PATCH_JAX", variable)
    semantics = basics.lane_semantics()
    for true, false in ((lambda x: x, lambda x: x + 1), (lambda x: x, lambda _: 3), (lambda _: 3, lambda x: x)):
        lower(dtype, semantics, true, false)


@pytest.mark.usefixtures("checked")
def test_jax_has_the_fault() -> None:
    """JAX itself loses the signedness in `select`. If this test fails, JAX has fixed it. The correction is then needed
    only for older versions of JAX.
    """
    with pytest.raises(AssertionError, match=r"select_n: int32\[128\] is lowered with is_signed=False"):
        lower(jnp.int32, plgpu.LoweringSemantics.Lane, lambda _: 3, lambda x: x)
