"""Launch Triton kernels on jax arrays.

Tracing a call compiles its kernel to PTX with triton's compiler stages. jaxlib's FFI handler `triton_kernel_call_ffi`,
which also runs kernels of Pallas's Triton backend, takes the PTX and the launch sizes:

    @triton.jit function --triton--> PTX --jax.ffi--> custom call --XLA--> cubin, command buffers, donation

The same path serves jit, scan, vmap, shard_map and export, with and without a GPU. Nothing is timed or tuned when a
call runs. `jaxlib.gpu_triton` and triton's compiler stages are not public APIs.

With TRITON_INTERPRET=1 the kernel runs on the CPU instead (`pallas_attn.triton.interpreter`).
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
}
"""Triton's names of JAX dtypes."""

PTX_VERSIONS = {8: 84, 9: 84}
"""PTX version by major compute capability. Lower than the newest version, so that older assemblers support it."""
NEWEST_PTX_VERSION = 88

ALIGNMENT = 16
"""Alignment of array addresses in bytes. XLA aligns its buffers to at least this."""

type Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype."""

type Operand = jax.Array | int | None
"""An array, a number that is passed as int32 at run time, or None, which is a compile-time constant."""


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` of the unwrapped function. Triton reads the source, which a type checker may have wrapped."""
    return triton.jit(inspect.unwrap(function))


def block_columns(width: int) -> int:
    """Columns of a program's block for rows of this width: the power of two with the least padding."""
    return min((512, 256, 128, 64, 32), key=lambda columns: -(-width // columns) * columns)


class CompiledKernel(NamedTuple):
    """Kernel compiled for one combination of dtypes and constants.

    Attributes:
      name: name of the function in the PTX.
      ptx: PTX source text.
      shared_bytes: shared memory of a thread block.
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
      function: a `kernel`. Its parameters are a pointer or number for each operand, a pointer for each output, and the
        constants by name. An operand None is the constant None. float8_e4m3fn arrays are uint8 pointers.
      operands: inputs.
      outputs: shapes and dtypes, or arrays that have them. Elements that no program writes are undefined, or have the
        value of the aliased operand.
      grid: up to three numbers of programs, each at least 1.
      constants: compile-time arguments by parameter name; hashable.
      num_warps: warps of a program.
      num_stages: number of loop iterations whose loads can be in flight.
      max_registers: maximum registers of a thread. None leaves the choice to the assembler, which may spill a few
        registers so that one more program fits on a multiprocessor.
      aliases: index of an operand to index of the output that uses the same memory.
      bytes_accessed, flops: cost estimate of the custom call for XLA; 0 if unknown.

    Returns:
      One array for each output.

    Raises:
      NotImplementedError: Triton kernels do not run on this device, or jax's CUDA plugin is not installed.
    """
    card = device.triton_card()
    aliases = dict(aliases or {})
    if device.interprets_triton():
        from pallas_attn.triton import interpreter  # patches triton's interpreter for the whole process

        return interpreter.launch(function, operands, outputs, grid, constants, aliases)
    arrays = [x for x in operands if _is_array(x)]
    position = {i: sum(map(_is_array, operands[:i])) for i in aliases}
    typed = tuple((name, value, type(value)) for name, value in constants.items())
    kinds = tuple(_kind(x) for x in (*operands, *outputs))
    capability = _number(card)
    found = compiled(function, kinds, typed, num_warps, num_stages, max_registers, capability)
    attributes: dict[str, Any] = {"opaque": encoded_call(found, operands, len(outputs), grid, num_warps, capability)}
    if bytes_accessed or flops:
        cost = {"bytes_accessed": bytes_accessed, "flops": flops, "transcendentals": 0}
        attributes["cost_estimate_json"] = json.dumps(cost)
    call = jax.ffi.ffi_call(
        FFI_TARGET,
        [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs],
        input_output_aliases={position[i]: output for i, output in aliases.items()},
    )

    @jax.custom_batching.sequential_vmap
    def called(*arrays: jax.Array) -> list[jax.Array]:
        # In a loop that slices operands or stacks results, including the loop of sequential_vmap, XLA would fuse the
        # slices into the custom call and lose its aliases. It does not fuse slices across an optimization barrier.
        return list(lax.optimization_barrier(call(*lax.optimization_barrier(arrays), **attributes)))

    return called(*arrays)


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
      kinds: for each operand and output, the dtype of an array, "scalar" for a number, or None for None.
      constants: name, value and type of each constant. The type distinguishes 1 from True in the cache key.
      capability: compute capability, such as 90.

    Raises:
      NotImplementedError: the kernel needs scratch memory or tensor descriptors, which the handler does not pass.
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
    version = PTX_VERSIONS.get(capability // 10, NEWEST_PTX_VERSION)
    given_options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers, "ptx_version": version}
    options = backend.parse_options(given_options | {"enable_fp_fusion": True})
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
        raise NotImplementedError("kernels get neither scratch memory nor tensor descriptors of the host")
    return CompiledKernel(metadata["name"], module, metadata["shared"])


compiled = functools.lru_cache(maxsize=1024)(compile_kernel)
"""`compile_kernel` with a cache, because most launches of a process repeat the same arguments."""


def encoded_call(
    found: CompiledKernel, operands: Sequence[Operand], num_outputs: int, grid: tuple[int, ...], warps: int, cc: int
) -> bytes:
    """Serialise a launch for the FFI handler."""
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        raise NotImplementedError("needs jax's CUDA plugin (jax[cuda13] or jax[cuda12]), which is not installed")
    launched = gpu_triton.TritonKernel(found.name, warps, 1, found.shared_bytes, found.ptx, "", cc)
    array = gpu_triton.create_array_parameter(0, ALIGNMENT)
    given = [x for x in operands if x is not None]
    parameters = [array if _is_array(x) else gpu_triton.create_scalar_parameter(x, "i32") for x in given]
    parameters += [array] * num_outputs
    sizes = (*grid, 1, 1)[:3]
    return zlib.compress(gpu_triton.TritonKernelCall(launched, *sizes, parameters).to_proto(found.name, b""))


def _number(card: device.Device) -> int:
    """Compute capability as triton's number: 90 for (9, 0)."""
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
    """Triton's type of a parameter. A parameter without an operand is a constant."""
    if kind is None:
        return "constexpr"
    return "i32" if kind == "scalar" else f"*{TYPES[kind]}"
