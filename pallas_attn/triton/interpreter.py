"""Run Triton kernels on the CPU with Triton's interpreter, with fixes for bfloat16 and float8, and check each access.

Triton's interpreter (3.6 to 3.9) runs kernels in numpy. It has three faults: `tl.dot` multiplies the bit patterns of
bfloat16 numbers, casts to bfloat16 and float8 truncate instead of rounding, and scalar indices fail with numpy 2.5.
Importing this module replaces the faulty functions of the interpreter for the whole process.

The checks raise `KernelFlawError` for behaviour that is undefined on a GPU:

- a load or store outside the arrays of the launch, or with an element size other than the array's (words of several
  bytes may be loaded from arrays of bytes);
- two programs store the same element, or one store instruction stores the same element twice;
- a load of an element that was never written, or that another program has written;
- an atomic addition to an element that was never written, or that a program also loads or stores without an atomic.

The checks do not detect races between the threads of a program or in shared memory. Matrix products are computed in
float32, so a GPU's reduced precision (such as TF32) is not reproduced.
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
"""Triton's float8 types that kernels use, with the equivalent numpy dtypes."""
_HELD_AS_BITS = {tl.bfloat16: ml_dtypes.bfloat16, **FLOAT8_NAMES}
"""Triton types that the interpreter represents by integer bit patterns, with the equivalent numpy dtypes."""


HELD_AS_BYTES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu)
"""Dtypes of arrays that kernels get as bytes."""


class KernelFlawError(Exception):
    """A kernel has behaviour that is undefined on a GPU."""


class HostArray:
    """A numpy array with the methods of a torch tensor that the interpreter calls."""

    def __init__(self, array: np.ndarray, name: str):
        self.array, self.name = array, name
        self.dtype = np.dtype(np.uint8) if array.dtype in HELD_AS_BYTES else array.dtype
        self.address = array.ctypes.data

    def data_ptr(self) -> int:
        return self.address

    # The interpreter calls these methods to copy tensors from the GPU to the CPU and back. Here they copy nothing.
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
    """Record of the accesses of one launch: the last writer of each array element, and whether it was loaded.

    The writer is NOBODY, CALLER (the element is part of an input), the number of a program (from FIRST_PROGRAM on), or
    ATOMIC for atomic additions by any programs.

    Args:
      inputs: arrays that programs may only read.
      outputs: arrays that programs may write. Their elements are unwritten at first, except in `held`.
      held: the outputs that alias an input, and therefore contain its values at first.
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
        """Return each array that contains some of the addresses (uint64), with the indices of the accessed elements.

        Args:
          itemsize: bytes per accessed element.
          what: "load", "store" or "addition", for error messages.

        Raises:
          KernelFlawError: an address is outside all arrays, or does not refer to an element of this size. A load may
            refer to several elements of one byte.
        """
        which = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        found = []
        for index in np.unique(which):
            if index < 0:
                raise KernelFlawError(f"{what} below every array")
            array = self.arrays[index]
            offset = (addresses[which == index] - np.uint64(array.address)).astype(np.int64)
            is_word = what == "load" and array.array.itemsize == 1  # a load of several bytes
            if (itemsize != array.array.itemsize and not is_word) or (offset % itemsize).any():
                raise KernelFlawError(f"{what} of {itemsize} bytes, misaligned or of another type, in {array.name}")
            element = (offset[:, None] + np.arange(itemsize)).reshape(-1) if is_word else offset // itemsize
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
        """Record atomic additions, which are allowed to elements that no program loads or stores: the result does not
        depend on the order of the additions.
        """
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
    """Run a kernel on the CPU, with the arguments and results of `pallas_attn.triton.launch.launch`.

    The kernel runs in `jax.pure_callback`, so the call works inside jit, vmap and shard_map.
    """
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
    """Run a kernel on numpy arrays and return the outputs. Arguments are as for `launch`.

    Output elements that no program writes are NaN, or -1 in integer arrays, unless the output aliases an input.

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
        # `_patch_lang` patches the language modules in the globals of a function. The globals of a kernel have only
        # triton.language. The globals of tl.zeros also have triton.language.core, whose functions call one another.
        patched = interpreter._patch_lang(standard.fn)
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
    """Return the exception that was raised in a kernel. The interpreter wraps it in InterpreterErrors."""
    while isinstance(error, interpreter.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


# --- patches of triton's interpreter

_memory: LaunchMemory | None = None
# XLA runs callbacks on several threads, but the interpreter stores the grid position in a global variable.
_lock = threading.Lock()

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
    """Convert an integer mask to bool. numpy would interpret integers as indices, and Triton 3.9 raises an error."""
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
    """Return the numbers of a tensor; as float32 if the interpreter represents the type by bit patterns."""
    held = _HELD_AS_BITS.get(handle.dtype.scalar)
    return handle.data if held is None else np.ascontiguousarray(handle.data).view(held).astype(np.float32)


def _rounding_cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
    """Cast with rounding to nearest even, if one of the types is represented by bit patterns."""
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
    """Compute x·y + z in float64 and round to the dtype of z.

    For float32, the float64 product is exact. The sum is rounded twice (to float64, then to float32), so the result
    can differ from a GPU's FMA by one ulp near ties.
    """
    wide = [handle.data.astype(np.float64) for handle in (x, y, z)]
    return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)


def _patch_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    # Triton 3.6 converts a one-element array with int(), which numpy 2.5 does not allow.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:  # noqa: A002
    """Reduce by maximum or minimum, ignoring NaN unless all values are NaN, as on a GPU. numpy's nanmax would warn."""
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return _reduce(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a device function. `run` has patched `triton.language`; Triton's own method would patch it at every call."""
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang_tensor = _patch_index
interpreter.InterpretedFunction.__call__ = _call_device_function
interpreter.ReduceOps.min_max = _min_max
_Builder.create_masked_load, _Builder.create_masked_store = _checked_load, _checked_store
_Builder.create_atomic_rmw = _checked_atomic
_Builder.cast_impl, _Builder.create_fp_to_fp, _Builder.create_dot = _rounding_cast, _rounding_cast, _dot_of_values
_Builder.create_fma = _fused_multiply_add
