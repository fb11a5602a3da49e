"""Launch Triton kernels on jax arrays.

When JAX traces a call, Triton's compiler stages compile the kernel to PTX. The PTX and the grid become the attributes
of a custom call. Its handler is jaxlib's `triton_kernel_call_ffi`, which Pallas's Triton backend uses too:

    @triton.jit function --triton--> PTX --jax.ffi--> custom call --XLA--> cubin, command buffers, donation

Calls work inside jit, scan, vmap, shard_map and export. They can be traced and compiled without a GPU. Tile sizes are
fixed when a call is traced: there is no autotuning at run time. `jaxlib.gpu_triton` and Triton's compiler stages are
not public APIs.

With PALLAS_ATTN_JAX_TRITON=1, the package jax-triton compiles kernels and makes the same custom calls.

With TRITON_INTERPRET=1, kernels run on the CPU in Triton's interpreter (`pallas_attn.triton.interpreter`).
"""

from __future__ import annotations

import functools
import inspect
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import triton
from jax import lax
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

from pallas_attn.jax_patches import kernel_shapes
from pallas_attn.runtime import device

FFI_TARGET = "triton_kernel_call_ffi"

TYPES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "int32": "i32",
    "bool": "i1",
    "float8_e4m3fn": "u8",  # sm80 and sm86 have no float8 type, so kernels get bytes on every card
    "float8_e8m0fnu": "u8",
}
"""Triton's name of each JAX dtype that kernels accept."""

PTX_VERSIONS = {8: 84, 9: 84}
"""PTX version (84 is 8.4) by major compute capability. XLA assembles the PTX with the installed CUDA toolchain, and an
older toolchain does not accept the newest PTX version.
"""
NEWEST_PTX_VERSION = 88
"""PTX version for other compute capabilities, such as Blackwell."""

ALIGNMENT = 16
"""Alignment of array addresses in bytes that kernels may assume. XLA's buffers have at least this alignment."""

type Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or a description of an array with a shape and a dtype."""

type Operand = jax.Array | int | None
"""Input of a kernel: an array; a number, which the kernel receives as int32 at run time; or None, which the kernel
receives at compile time.
"""


def kernel(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit` to a function.

    Triton compiles the source text of the function. Decorators are removed first: in tests, jaxtyping's import hook
    decorates every function, and Triton would read the source text of the wrapper.
    """
    return triton.jit(inspect.unwrap(function))


def block_columns(width: int) -> int:
    """Return how many columns of an array of rows [rows, width] one program handles.

    Programs handle blocks of 32 to 512 columns, a power of two. The last block is padded. The returned block size has
    the least padding; of several such sizes it is the largest.
    """
    return min((512, 256, 128, 64, 32), key=lambda columns: -(-width // columns) * columns)


class CompiledKernel(NamedTuple):
    """Kernel compiled for one combination of dtypes and constants.

    Attributes:
      name: name of the kernel function in the PTX text.
      ptx: PTX text.
      shared_bytes: shared memory per thread block, in bytes.
    """

    name: str
    ptx: str
    shared_bytes: int


def launch(
    function: Any,
    *operands: Operand,
    outputs: Sequence[Shaped],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 2,
    max_registers: int | None = None,
    aliases: Mapping[int, int] | None = None,
    bytes_accessed: int = 0,
    flops: int = 0,
) -> list[jax.Array]:
    """Run a kernel for every program of a grid.

    Args:
      function: a function with the decorator `kernel`. Its parameters are one for each operand, one for each output,
        then the constants, by name. An array is a pointer parameter; a float8_e4m3fn array is a pointer to uint8. A
        number is an int32 parameter. An operand None is the compile-time constant None.
      operands: inputs.
      outputs: shape and dtype of each output. An element that no program writes has the value of the aliased operand,
        or is undefined if the output has no alias.
      grid: numbers of programs along up to three axes, each at least 1.
      constants: compile-time arguments by parameter name; hashable.
      num_warps: warps of a program.
      num_stages: Triton's number of pipeline stages: loop iterations whose loads can be in flight.
      max_registers: maximum number of registers per thread. None leaves the choice to the assembler, which may spill a
        few registers so that one more program fits on a multiprocessor.
      aliases: maps the index of an operand to the index of an output that shares its memory.
      bytes_accessed, flops: cost estimate of the custom call for XLA; 0 if unknown.

    Returns:
      One array for each output.

    Raises:
      ValueError: PALLAS_ATTN_JAX_TRITON is neither 0 nor 1.
      NotImplementedError: the current device does not run Triton kernels, JAX's CUDA plugin is not installed, or
        PALLAS_ATTN_JAX_TRITON is 1 and jax-triton cannot be imported or does not support the installed jax.
    """
    card = device.triton_card()
    if kernel_shapes.skips_bodies():
        return kernel_shapes.zeros(list(outputs))
    aliases = dict(aliases or {})
    if device.interprets_triton():
        from pallas_attn.triton import interpreter  # imported here, because the import patches Triton's interpreter

        return interpreter.launch(function, operands, outputs, grid, constants, aliases)
    capability = _number(card)
    cost = {"bytes_accessed": bytes_accessed, "flops": flops} if bytes_accessed or flops else None
    if device.calls_jax_triton():
        from pallas_attn.triton.jax_triton_call import caller

        call = caller(
            *(function, operands, outputs, aliases),
            grid=grid,
            compute_capability=capability,
            backend_options=compiler_options(num_warps, num_stages, max_registers, capability) | {"num_ctas": 1},
            cost_estimate=cost,
            name=function.__name__,
            **constants,
        )
    else:
        typed = tuple((name, value, type(value)) for name, value in constants.items())
        kinds = tuple(_kind(x) for x in (*operands, *outputs))
        found = compiled(function, kinds, typed, num_warps, num_stages, max_registers, capability)
        attributes: dict[str, Any] = {
            "opaque": encoded_call(found, operands, len(outputs), grid, num_warps, capability)
        }
        if cost is not None:
            attributes["cost_estimate_json"] = json.dumps(cost | {"transcendentals": 0})
        position = {i: sum(map(_is_array, operands[:i])) for i in aliases}
        ffi_call = jax.ffi.ffi_call(
            FFI_TARGET,
            [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs],
            input_output_aliases={position[i]: output for i, output in aliases.items()},
        )
        call = functools.partial(ffi_call, **attributes)

    @jax.custom_batching.sequential_vmap
    def called(*arrays: jax.Array) -> list[jax.Array]:
        # A loop, such as the loop of sequential_vmap, slices the operands of each iteration and stacks the results.
        # XLA would fuse these slices into the custom call, and the call would lose its aliases. The barriers prevent
        # the fusion.
        return list(lax.optimization_barrier(call(*lax.optimization_barrier(arrays))))

    return called(*(x for x in operands if _is_array(x)))


def compile_kernel(
    function: Any,
    kinds: tuple[str | None, ...],
    constants: tuple[tuple[str, Any, type], ...],
    num_warps: int,
    num_stages: int,
    max_registers: int | None,
    capability: int,
) -> CompiledKernel:
    """Compile a kernel to PTX.

    Args:
      function: a function with the decorator `kernel`.
      kinds: for each operand, then for each output: the dtype of an array, "scalar" for a number, or None for None.
      constants: name, value and type of each constant. The arguments are the key of the cache `compiled`, where the
        type distinguishes 1 from True.
      num_warps, num_stages, max_registers: as for `launch`.
      capability: compute capability, such as 90 for (9, 0).

    Raises:
      NotImplementedError: the kernel needs global scratch memory or tensor descriptors, which the FFI handler does not
        pass to kernels.
    """
    from triton._C.libtriton import ir  # has no type stub

    target = GPUTarget("cuda", capability, 32)
    backend: Any = make_backend(target)
    names = function.arg_names
    given = dict(zip(names, kinds, strict=False))
    values = {name: value for name, value, _ in constants} | {
        name: None for name, kind in given.items() if kind is None
    }
    signature = {name: _parameter(given.get(name)) for name in names}
    attributes = {
        (i,): [["tt.divisibility", ALIGNMENT]] for i, kind in enumerate(kinds) if kind not in (None, "scalar")
    }
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in values.items()}, attributes)
    options = backend.parse_options(compiler_options(num_warps, num_stages, max_registers, capability))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    code = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, code, backend.get_module_map(), context)
    metadata: dict[str, Any] = {"target": target, **options.__dict__}
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == "ptx":
            break
    if metadata.get("global_scratch_size") or metadata.get("tensordesc_meta"):
        raise NotImplementedError("needs global scratch memory or tensor descriptors, which kernels do not receive")
    return CompiledKernel(metadata["name"], module, metadata["shared"])


def compiler_options(num_warps: int, num_stages: int, max_registers: int | None, capability: int) -> dict[str, Any]:
    """Return the options of Triton's compiler. For the arguments see `compile_kernel`."""
    return {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": max_registers,
        "ptx_version": PTX_VERSIONS.get(capability // 10, NEWEST_PTX_VERSION),
        "enable_fp_fusion": True,
    }


compiled = functools.lru_cache(maxsize=1024)(compile_kernel)
"""`compile_kernel` with a cache: the layers of a model launch the same kernels."""


def encoded_call(
    found: CompiledKernel, operands: Sequence[Operand], num_outputs: int, grid: tuple[int, ...], warps: int, cc: int
) -> bytes:
    """Return a launch as bytes, in the form that the FFI handler takes as its attribute `opaque`.

    Args:
      warps: warps of a program.
      cc: compute capability, such as 90.

    Raises:
      NotImplementedError: JAX's CUDA plugin is not installed.
    """
    encoder = call_encoder()
    launched = encoder.TritonKernel(found.name, warps, 1, found.shared_bytes, found.ptx, "", cc)
    array = encoder.create_array_parameter(0, ALIGNMENT)
    given = [x for x in operands if x is not None]
    parameters = [array if _is_array(x) else encoder.create_scalar_parameter(x, "i32") for x in given]
    parameters += [array] * num_outputs
    sizes = (*grid, 1, 1)[:3]
    return zlib.compress(encoder.TritonKernelCall(launched, *sizes, parameters).to_proto(found.name, b""))


def call_encoder() -> Any:
    """Return the module of jaxlib that encodes launches.

    Raises:
      NotImplementedError: JAX's CUDA plugin is not installed.
    """
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        raise NotImplementedError("needs jax's CUDA plugin (jax[cuda13] or jax[cuda12]), which is not installed")
    return gpu_triton


def _number(card: device.Device) -> int:
    """Return the compute capability as Triton's number: 90 for (9, 0).

    Raises:
      NotImplementedError: the device has no compute capability.
    """
    if card.capability is None:
        raise NotImplementedError(f"needs a GPU of a known compute capability, this is {card.words}")
    major, minor = card.capability
    return 10 * major + minor


def _is_array(operand: Any) -> bool:
    return hasattr(operand, "dtype")


def _kind(operand: Any) -> str | None:
    if operand is None:
        return None
    return np.dtype(operand.dtype).name if _is_array(operand) else "scalar"


def _parameter(kind: str | None) -> str:
    """Return Triton's type of a parameter: a pointer for a dtype, "i32" for "scalar", a constant for None."""
    if kind is None:
        return "constexpr"
    return "i32" if kind == "scalar" else f"*{TYPES[kind]}"
