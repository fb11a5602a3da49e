"""Kernels whose values are emitted once are the same as jax's after MLIR's search for common subexpressions."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import core, dialect, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_attn.jax_patches import reused_values
from pallas_attn.jax_patches.faster_lowering import REPLACEMENTS
from pallas_attn.mosaic.primitives.row_io import RowLayout

NAMES = ("lower_jaxpr_to_mosaic_gpu", "constant", "lane_indices", "warp_indices")
LAYOUT = RowLayout(1, 1)


@pytest.fixture(params=["Lane", "Warpgroup"])
def semantics(request: pytest.FixtureRequest) -> Any:
    return plgpu.LoweringSemantics[request.param]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Text of the kernels that are emitted, by jax's own functions until others are set."""
    kept: list[str] = []
    lower_module = core.lower_mgpu_module

    def keep(module: ir.Module, *args: Any, **kwargs: Any) -> None:
        kept.append(str(module))
        lower_module(module, *args, **kwargs)

    monkeypatch.setattr(core, "lower_mgpu_module", keep)
    for replacement in REPLACEMENTS:
        if replacement.name in NAMES:
            monkeypatch.setattr(replacement.place, replacement.name, replacement.original)
    monkeypatch.setattr(utils, "thread_idx", getattr(utils.thread_idx, "__wrapped__", utils.thread_idx))
    return kept


def replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set our functions in the place of jax's."""
    for replacement in REPLACEMENTS:
        if replacement.name in NAMES:
            monkeypatch.setattr(replacement.place, replacement.name, replacement.make(replacement.original))
    monkeypatch.setattr(utils, "thread_idx", reused_values.computed_once(utils.thread_idx))


def emit(semantics: Any) -> None:
    """Emit a kernel with branches in loops and loops in branches, whose arrays are numbered again and again."""

    def body(x_gmem: Any, out_gmem: Any) -> None:
        def numbers() -> jax.Array:
            return plgpu.broadcasted_iota(jnp.int32, (128,), 0, layout=LAYOUT.per_row)

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            def one(total: jax.Array) -> jax.Array:
                return lax.fori_loop(0, 3, lambda _, total: total + numbers() * 7, total) + 7

            return lax.cond(x_gmem[i] > 0, one, lambda total: total - numbers() * 7, total)

        total = lax.fori_loop(0, x_gmem[5], step, numbers())
        signs = jnp.where(total > 7, total.astype(jnp.float32) * -0.0, 0.0)
        out_gmem[...] = signs + lax.cond(x_gmem[1] > 0, numbers, lambda: total + numbers()).astype(jnp.float32)

    export(body, semantics, jnp.int32)


def export(body: Any, semantics: Any, dtype: Any) -> None:
    """Lower a kernel of an array [128] of this dtype."""
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), compiler_params=params)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    jax.export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=checks)(jax.ShapeDtypeStruct((128,), dtype))


def without_copies(text: str) -> str:
    """Text of a module once MLIR has found its common subexpressions."""
    with mlir.make_ir_context() as context, ir.Location.unknown():
        dialect.register_dialect(context)
        module = ir.Module.parse(text)
        for _ in range(2):
            mlir.passmanager.PassManager.parse("builtin.module(canonicalize,cse)").run(module.operation)
        text = re.sub(r"body_\d+", "body", str(module))  # jax numbers them
    for name, value in re.findall(r"(%c\w+) = arith\.constant (.*)\n", text):  # in any order, some named by it
        text = re.sub(rf"{name}\b", f"<{value}>", text)
    return re.sub(r" *<.*> = arith\.constant .*\n", "", text)


def count(text: str, name: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", text))


def test_kernels_are_the_same_without_copies(
    modules: list[str], semantics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit(semantics)
    replace(monkeypatch)
    emit(semantics)
    theirs, ours = modules
    if semantics == plgpu.LoweringSemantics.Lane:
        for name in ("gpu.thread_id", "arith.constant"):
            assert count(ours, name) < count(theirs, name) / 2
        assert count(ours, "arith.mulf") == count(theirs, "arith.mulf")
    assert without_copies(ours) == without_copies(theirs)


def test_zeros_and_types_are_told_apart(modules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """0.0 == -0.0 and 1 == True == 1.0, and they are other constants; what is asked for with a place is put there."""
    found: list[bool] = []

    def body(x_gmem: Any, out_gmem: Any) -> None:
        @plgpu.inline_mgpu()
        def constants(_: Any) -> None:
            i32, i1, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(1), ir.F32Type.get()
            kinds = ((f32, 0.0), (f32, -0.0), (i32, 0), (i32, 1), (i1, True), (f32, 1.0))
            first, again = ([arith.constant(kind, value) for kind, value in kinds] for _ in range(2))
            placed = arith.constant(i32, 1, ip=ir.InsertionPoint.current)
            differ = all(one != other for i, one in enumerate(first) for other in first[:i])
            found.extend((first == again, differ, placed not in first))

        constants()
        out_gmem[...] = x_gmem[...]

    replace(monkeypatch)
    export(body, plgpu.LoweringSemantics.Lane, jnp.float32)
    assert found == [True] * 3


def test_nothing_is_reused_outside_of_kernels() -> None:
    replaced = reused_values.constant_once(arith.constant)
    with mlir.make_ir_context(), ir.Location.unknown(), ir.InsertionPoint(ir.Module.create().body):
        i32 = ir.IntegerType.get_signless(32)
        assert replaced(i32, 1) != replaced(i32, 1)
