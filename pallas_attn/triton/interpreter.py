"""Run Triton kernels on the CPU with triton's interpreter, with fixes for bfloat16 and float8 and checks of accesses.

Triton's interpreter (3.6 to 3.9) runs kernels in numpy. It multiplies the bit patterns of bfloat16 numbers, truncates
in casts to bfloat16 and float8, and fails with numpy 2.5. Importing this module patches it for the whole process.

The patched interpreter raises `KernelFlawError` for behaviour that is undefined on a GPU:

- a load or store outside the arrays of the launch, or with an element size other than the array's;
- two programs store the same element, or one store has the same element twice;
- a load of an element that was never written, or that another program has written;
- an atomic addition to an element that was never written, or that a program stores or loads in another way.

It does not detect races inside a program or races in shared memory. It does not reproduce reduced precision of a GPU.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

FLOAT8_NAMES = {tl.float8e4nv: ml_dtypes.float8_e4m3fn}
"""float8 types that the interpreter represents by integer bit patterns. bfloat16 is represented in the same way."""
_HELD_AS_BITS = {tl.bfloat16: ml_dtypes.bfloat16, **FLOAT8_NAMES}


class KernelFlawError(Exception):
    """A kernel has behaviour that is undefined on a GPU."""


class HostArray:
    """A numpy array with the tensor methods that the interpreter calls."""

    def __init__(self, array: np.ndarray, name: str):
        self.array, self.name = array, name
        self.dtype = np.dtype(np.uint8) if array.dtype == ml_dtypes.float8_e4m3fn else array.dtype
        self.address = array.ctypes.data

    def data_ptr(self) -> int:
        return self.address

    # The interpreter copies arguments to the CPU and back. The methods below make these copies no-ops.
    def untyped_storage(self) -> HostArray:
        return self

    def cpu(self) -> HostArray:
        return self

    def new_empty(self, *_: Any, **__: Any) -> HostArray:
        return HostArray(self.array, self.name)

    def set_(self, *_: Any) -> HostArray:
        return self

    def copy_(self, _: Any) -> HostArray:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


ATOMIC, NOBODY, CALLER, FIRST_PROGRAM = -1, 0, 1, 2


class LaunchMemory:
    """The arrays of a launch, and the last writer of each element: NOBODY, CALLER, a program number, or ATOMIC.

    Args:
      inputs: arrays that programs may read.
      outputs: arrays that programs may write. Their elements count as never written, except in `held`.
      held: outputs that alias an input, and so contain its values.
    """

    def __init__(self, inputs: Sequence[HostArray], outputs: Sequence[HostArray], held: Sequence[HostArray]):
        self.arrays = sorted((*inputs, *outputs), key=lambda a: a.address)
        self.starts = np.array([a.address for a in self.arrays], np.uint64)
        self.outputs = {id(a) for a in outputs}
        written = {id(a) for a in (*inputs, *held)}
        self.writer = {
            id(a): np.full(a.array.size, CALLER if id(a) in written else NOBODY, np.int32) for a in self.arrays
        }
        self.loaded = {id(a): np.zeros(a.array.size, bool) for a in self.arrays}

    def located(self, addresses: np.ndarray, itemsize: int, what: str) -> list[tuple[HostArray, np.ndarray]]:
        """Return the arrays that contain the addresses, each with the element indices."""
        which = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        found = []
        for index in np.unique(which):
            if index < 0:
                raise KernelFlawError(f"{what} below every array")
            array = self.arrays[index]
            offset = (addresses[which == index] - np.uint64(array.address)).astype(np.int64)
            if itemsize != array.array.itemsize or (offset % itemsize).any():
                raise KernelFlawError(f"{what} of {itemsize} bytes, misaligned or of another type, in {array.name}")
            element = offset // itemsize
            if element.max() >= array.array.size:
                raise KernelFlawError(
                    f"{what} out of bounds: element {element.max()} of {array.name}, which has {array.array.size}"
                )
            found.append((array, element))
        return found

    def load(self, addresses: np.ndarray, itemsize: int, program: int) -> None:
        for array, element in self.located(np.unique(addresses), itemsize, "load"):
            writer = self.writer[id(array)][element]
            if (writer == NOBODY).any():
                raise KernelFlawError(f"load of {array.name} before it is written")
            if (((writer >= FIRST_PROGRAM) & (writer != program)) | (writer == ATOMIC)).any():
                raise KernelFlawError(f"race: load of {array.name} that another program wrote")
            self.loaded[id(array)][element] = True

    def store(self, addresses: np.ndarray, itemsize: int, program: int) -> None:
        for array, element in self.located(addresses, itemsize, "store"):
            if id(array) not in self.outputs:
                raise KernelFlawError(f"store to the input {array.name}")
            if np.unique(element).size != element.size:
                raise KernelFlawError(f"one store writes an element of {array.name} twice")
            writer = self.writer[id(array)]
            others = (writer[element] >= FIRST_PROGRAM) & (writer[element] != program)
            if (others | (writer[element] == ATOMIC)).any():
                raise KernelFlawError(f"race: two programs store to {array.name}")
            writer[element] = program

    def add(self, addresses: np.ndarray, itemsize: int) -> None:
        """Record atomic additions. Their order does not matter if no program loads or stores the element."""
        for array, element in self.located(np.unique(addresses), itemsize, "addition"):
            if id(array) not in self.outputs:
                raise KernelFlawError(f"addition to the input {array.name}")
            writer = self.writer[id(array)]
            if (writer[element] == NOBODY).any():
                raise KernelFlawError(f"addition to {array.name} before it is written")
            if (writer[element] >= FIRST_PROGRAM).any() or self.loaded[id(array)][element].any():
                raise KernelFlawError(f"race: addition to {array.name}, which a program loads or stores")
            writer[element] = ATOMIC


def launch(
    function: Any,
    operands: Sequence[Any],
    outputs: Sequence[Any],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    aliases: Mapping[int, int],
) -> list[jax.Array]:
    """Run `launch.launch` on the CPU, as a callback, which supports jit, vmap and shard_map."""
    is_array = [hasattr(x, "dtype") for x in operands]

    def callback(*arrays: jax.Array) -> list[np.ndarray]:
        left = iter(arrays)
        taken = [np.asarray(next(left)) if flag else x for flag, x in zip(is_array, operands, strict=True)]
        return run(function, taken, outputs, grid, constants, aliases)

    shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs]
    arrays = [x for x, flag in zip(operands, is_array, strict=True) if flag]
    return list(jax.pure_callback(callback, shapes, *arrays, vmap_method="sequential"))


def run(
    function: Any,
    operands: Sequence[Any],
    outputs: Sequence[Any],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> list[np.ndarray]:
    """Run a kernel on numpy arrays. Output elements that no program writes are NaN, or -1 for integers.

    Raises:
      KernelFlawError: the kernel has behaviour that is undefined on a GPU.
    """
    global _memory
    aliases = aliases or {}
    source = {output: i for i, output in aliases.items()}
    held = {output: np.array(operands[i]) for output, i in source.items()}
    results = [held[i] if i in held else _unwritten(o) for i, o in enumerate(outputs)]
    names = function.arg_names
    written = [HostArray(a, name) for a, name in zip(results, names[len(operands) :], strict=False)]
    read = {
        i: HostArray(np.ascontiguousarray(x), names[i])
        for i, x in enumerate(operands)
        if isinstance(x, np.ndarray) and i not in aliases
    }
    arguments = [written[aliases[i]] if i in aliases else read.get(i, x) for i, x in enumerate(operands)]
    standard: Any = tl.zeros
    with _lock:
        _memory = LaunchMemory(list(read.values()), written, [written[i] for i in held])
        patched = interpreter._patch_lang(
            standard.fn
        )  # also patches triton.language.core, whose functions call one another
        try:
            with np.errstate(all="ignore"):
                function[grid](*arguments, *written, **constants)
        except interpreter.InterpreterError as error:
            raise _cause(error) from error
        finally:
            patched.restore()
            _memory = None
    return results


def _unwritten(shape: Any) -> np.ndarray:
    array = np.empty(shape.shape, np.dtype(shape.dtype))
    array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN in every float type
    return array


def _cause(error: BaseException) -> BaseException:
    """The exception raised in a kernel, without the interpreter's wrappers."""
    while isinstance(error, interpreter.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


# --- patches of triton's interpreter

_memory: LaunchMemory | None = None
_lock = threading.Lock()  # the interpreter stores the grid position in a global, and XLA calls from many threads

_Builder: Any = interpreter.InterpreterBuilder
_load, _store = _Builder.create_masked_load, _Builder.create_masked_store
_atomic = _Builder.create_atomic_rmw
_cast, _dot = _Builder.cast_impl, _Builder.create_dot
_patch_tensor, _reduce = interpreter._patch_lang_tensor, interpreter.ReduceOps.min_max


def _program(builder: Any) -> int:
    (x, y, z), (nx, ny, _) = builder.grid_idx, builder.grid_dim
    return FIRST_PROGRAM + x + nx * (y + ny * z)


def _touched(ptrs: Any, mask: Any) -> tuple[np.ndarray, int]:
    addresses, mask = np.broadcast_arrays(ptrs.data, mask.data)
    return addresses[mask], max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _as_bool(mask: Any) -> Any:
    """Convert integer masks to bool. numpy would use integers as indices, and Triton 3.9 raises an error."""
    return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)


@functools.wraps(_load)
def _checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
    mask = _as_bool(mask)
    if _memory is not None:
        _memory.load(*_touched(ptrs, mask), _program(self))
    return _load(self, ptrs, mask, *rest)


@functools.wraps(_store)
def _checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
    mask = _as_bool(mask)
    if _memory is not None:
        _memory.store(*_touched(ptrs, mask), _program(self))
    return _store(self, ptrs, value, mask, *rest)


@functools.wraps(_atomic)
def _checked_atomic(self: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
    mask = _as_bool(mask)
    if _memory is not None:
        _memory.add(*_touched(ptrs, mask))
    return _atomic(self, operation, ptrs, value, mask, *rest)


def _values(handle: Any) -> np.ndarray:
    """Numerical values of a tensor; float32 for types that the interpreter represents by bit patterns."""
    held = _HELD_AS_BITS.get(handle.dtype.scalar)
    return handle.data if held is None else np.ascontiguousarray(handle.data).view(held).astype(np.float32)


def _rounding_cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
    """Cast with rounding to nearest even."""
    here, there = src.dtype.scalar, dst_type.scalar
    if here == there or not {here, there} & set(_HELD_AS_BITS):
        return _cast(self, src, dst_type)
    data = _values(src)
    if held := _HELD_AS_BITS.get(there):
        with np.errstate(over="ignore", invalid="ignore"):
            data = data.astype(np.float32).astype(held)
        return interpreter.TensorHandle(data.view(f"u{data.itemsize}"), there)
    return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(there)), there)


def _dot_of_values(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    if {a.dtype.scalar, b.dtype.scalar} & set(_HELD_AS_BITS):
        product = np.matmul(_values(a).astype(np.float32), _values(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    return _dot(self, a, b, d, *rest)


def _fused_multiply_add(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Multiply-add in float64, rounded to the dtype of z.

    The product of two float32 numbers is exact. The sum is rounded to float64 first, so the result can differ from the
    FMA of a GPU by one ulp near ties.
    """
    wide = [handle.data.astype(np.float64) for handle in (x, y, z)]
    return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)


def _patch_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # triton 3.6 fails with numpy 2.5


def _min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:  # noqa: A002
    """Maxima and minima that ignore NaN unless all values are NaN, as on a GPU, without numpy's warning."""
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return _reduce(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function. The launch has already patched the language; triton would patch it at every call."""
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang_tensor = _patch_index
interpreter.InterpretedFunction.__call__ = _call_device_function
interpreter.ReduceOps.min_max = _min_max
_Builder.create_masked_load, _Builder.create_masked_store = _checked_load, _checked_store
_Builder.create_atomic_rmw = _checked_atomic
_Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _rounding_cast, _rounding_cast, _dot_of_values
_Builder.create_fma = _fused_multiply_add
