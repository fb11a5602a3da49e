"""Evaluator of jaxprs in numpy, for programs that take longer to compile than to run.

The evaluator runs one equation at a time on numpy arrays. A rule makes the numpy function of an equation; `RULES` and
`CONTROL` have the rules by primitive. Primitives without a rule are evaluated by jax.

Where numpy and XLA differ, the evaluator computes the results of XLA: integer division and remainder, shifts,
conversion of floats to integers, and indices out of bounds. The sum of a float32 product and another value is rounded
once, like a fused multiply-add.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

type Values = list[Any]
type Step = Callable[..., Any]
type Program = Callable[[Sequence[Any]], Values]

_PROGRAMS: weakref.WeakKeyDictionary[core.Jaxpr, Program] = weakref.WeakKeyDictionary()


def evaluate(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Values:
    """Evaluate a jaxpr for these constants and arguments. Return numpy arrays."""
    with np.errstate(all="ignore"):
        return program_of(jaxpr)([np.asarray(x) for x in (*consts, *args)])


def program_of(jaxpr: core.Jaxpr) -> Program:
    """Return the function that runs a jaxpr. It is cached, because the same jaxpr runs for every thread and
    iteration.
    """
    if jaxpr not in _PROGRAMS:
        _PROGRAMS[jaxpr] = _program(jaxpr)
    return _PROGRAMS[jaxpr]


def _program(jaxpr: core.Jaxpr) -> Program:
    places: dict[Any, int] = {}

    def place(var: Any) -> int:
        return places.setdefault(var, len(places))

    for var in (*jaxpr.constvars, *jaxpr.invars):
        place(var)
    num_inputs = len(places)
    literals: list[tuple[int, Any]] = []

    def source(atom: Any) -> int:
        if isinstance(atom, core.Literal):
            at = place(object())
            literals.append((at, np.asarray(atom.val, getattr(atom.aval, "dtype", None))))
            return at
        return place(atom)

    steps, products = [], {}
    for eqn in jaxpr.eqns:
        step, atoms = _contracted(eqn, products) or (_step(eqn), eqn.invars)
        inputs = tuple(source(atom) for atom in atoms)
        outputs = tuple(place(var) for var in eqn.outvars)
        steps.append((step, inputs, outputs, eqn.primitive.multiple_results))
    results = [source(atom) for atom in jaxpr.outvars]
    initial = [None] * (len(places) - num_inputs)
    for at, value in literals:
        initial[at - num_inputs] = value

    def run(inputs: Sequence[Any]) -> Values:
        if len(inputs) != num_inputs:
            raise ValueError(f"expected {num_inputs} inputs, got {len(inputs)}")
        values = [*inputs, *initial]
        for step, sources, targets, several in steps:
            got = step(*[values[at] for at in sources])
            if several:
                for at, value in zip(targets, got, strict=True):
                    values[at] = value
            else:
                values[targets[0]] = got
        return [values[at] for at in results]

    return run


def _contracted(eqn: Any, products: dict[Any, Any]) -> tuple[Step, Sequence[Any]] | None:
    """Return the step and the operands of a fused multiply-add, if the equation adds or subtracts a float32 product.

    Otherwise, return None. The result is rounded once, as in the code that compilers for CPUs and GPUs generate.
    `products` maps the result of each earlier float32 multiplication to its equation. If this equation is a float32
    multiplication, it is added to `products`.
    """
    name = eqn.primitive.name
    if name == "mul" and eqn.outvars[0].aval.dtype == np.float32:
        products[eqn.outvars[0]] = eqn
    if name not in ("add", "sub"):
        return None
    for this, (factors, other) in enumerate(zip(eqn.invars, eqn.invars[::-1], strict=True)):
        if not isinstance(factors, core.Literal) and factors in products:
            product = -1 if this and name == "sub" else 1
            rest = -1 if not this and name == "sub" else 1

            def step(x: Any, y: Any, z: Any, product: int = product, rest: int = rest) -> Any:
                exact = x.astype(np.float64) * y
                return (product * exact + rest * z).astype(np.float32)

            return step, [*products[factors].invars, other]
    return None


def _step(eqn: Any) -> Step:
    name = eqn.primitive.name
    if name in CONTROL:
        return CONTROL[name](eqn)
    if name in RULES:
        return RULES[name](eqn)
    return _by_jax(eqn)


def _by_jax(eqn: Any) -> Step:
    def step(*args: Any) -> Any:
        return jax.tree.map(np.asarray, eqn.primitive.bind(*map(jnp.asarray, args), **eqn.params))

    return step


# --- control


def _call(eqn: Any) -> Step:
    inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return _closed(inner)


def _closed(inner: core.Jaxpr) -> Step:
    run, consts = program_of(inner), [np.asarray(x) for x in inner.consts]
    return lambda *args: run([*consts, *args])


def _while(eqn: Any) -> Step:
    params = eqn.params
    again, body = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]

    def step(*args: Any) -> Values:
        cond, consts = args[:num_cond], args[num_cond : num_cond + num_body]
        carry = list(args[num_cond + num_body :])
        while again(*cond, *carry)[0]:
            carry = body(*consts, *carry)
        return carry

    return step


def _cond(eqn: Any) -> Step:
    branches = [_closed(branch) for branch in eqn.params["branches"]]

    def step(index: Any, *args: Any) -> Values:
        return branches[min(max(int(index), 0), len(branches) - 1)](*args)

    return step


def _scan(eqn: Any) -> Step:
    params = eqn.params
    body, length = _closed(params["jaxpr"]), params["length"]
    num_consts, num_carry, _ = (len(group) for group in params["ft_in"].unpack())
    stacked = [var.aval for var in eqn.outvars[num_carry:]]
    order = range(length)[::-1] if params["reverse"] else range(length)

    def step(*args: Any) -> Values:
        consts, carry = args[:num_consts], list(args[num_consts : num_consts + num_carry])
        slices = args[num_consts + num_carry :]
        gathered = [np.empty(aval.shape, aval.dtype) for aval in stacked]
        for i in order:
            got = body(*consts, *carry, *(x[i] for x in slices))
            carry = got[:num_carry]
            for to, value in zip(gathered, got[num_carry:], strict=True):
                to[i] = value
        return [*carry, *gathered]

    return step


def _io_callback(eqn: Any) -> Step:
    callback = eqn.params["callback"]

    def step(*args: Any) -> Values:
        return [np.array(x) for x in callback(*map(np.array, args))]

    return step


CONTROL: dict[str, Callable[[Any], Step]] = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "core_call": _call,
    "custom_jvp_call": _call,
    "custom_vjp_call": _call,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
    "io_callback": _io_callback,
}

# --- arithmetic


def _is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is a float of 8 or 16 bits. These are computed in float32, and the result is rounded."""
    return dtype.itemsize <= 2 and jnp.issubdtype(dtype, jnp.floating)


def _plain(function: Step) -> Callable[[Any], Step]:
    """Make the rule of an elementwise numpy function. Narrow floats are converted to float32 for the computation."""

    def rule(eqn: Any) -> Step:
        dtype = eqn.outvars[0].aval.dtype
        if not any(_is_narrow(atom.aval.dtype) for atom in eqn.invars):
            return function

        def step(*args: Any) -> Any:
            wide = [x.astype(np.float32) if _is_narrow(x.dtype) else x for x in args]
            return function(*wide).astype(dtype)

        return step

    return rule


def _divide(x: Any, y: Any) -> Any:
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    quotient = np.floor_divide(x, y)
    return quotient + ((quotient < 0) & (quotient * y != x)).astype(quotient.dtype)


def _shift(function: Step) -> Step:
    def step(x: Any, by: Any) -> Any:
        bits = x.dtype.itemsize * 8
        inside = by.astype(np.uint32) < bits
        return np.where(inside, function(x, np.where(inside, by, 0).astype(x.dtype)), np.zeros((), x.dtype))

    return step


def _unsigned(x: Any) -> Any:
    return x.view(x.dtype.str.replace("i", "u"))


def _shift_right_logical(x: Any, by: Any) -> Any:
    return np.right_shift(_unsigned(x), _unsigned(by)).view(x.dtype)


def _shift_right_arithmetic(x: Any, by: Any) -> Any:
    return np.right_shift(x, np.minimum(by.astype(np.uint32), x.dtype.itemsize * 8 - 1).astype(x.dtype))


def _rsqrt(x: Any) -> Any:
    return (1 / np.sqrt(x)).astype(x.dtype)


def _logistic(x: Any) -> Any:
    return (1 / (1 + np.exp(-x))).astype(x.dtype)


def _select(which: Any, *cases: Any) -> Any:
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _clamp(low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _convert(eqn: Any) -> Step:
    dtype = np.dtype(eqn.params["new_dtype"])
    source = eqn.invars[0].aval.dtype
    floating = jnp.issubdtype(source, jnp.floating)
    if dtype == np.bool_:
        return lambda x: x != 0
    if floating and dtype.kind in "iu":
        info = np.iinfo(dtype)

        def step(x: Any) -> Any:
            whole = np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0, posinf=info.max, neginf=info.min)
            return np.clip(whole, info.min, info.max).astype(np.int64).astype(dtype)

        return step
    return lambda x: x.astype(dtype)


def _bitcast(eqn: Any) -> Step:
    aval = eqn.outvars[0].aval
    return lambda x: np.ascontiguousarray(x).view(aval.dtype).reshape(aval.shape)


def _integer_pow(eqn: Any) -> Step:
    power = eqn.params["y"]
    return _plain(lambda x: np.power(x, np.asarray(power, x.dtype)))(eqn)


# --- shapes


def _broadcast_in_dim(eqn: Any) -> Step:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    aligned = [1] * len(shape)
    for axis, dim in enumerate(dims):
        aligned[dim] = eqn.invars[0].aval.shape[axis]
    return lambda x, *_: np.broadcast_to(np.reshape(x, aligned), shape)


def _to_shape(eqn: Any) -> Step:
    shape = eqn.outvars[0].aval.shape
    return lambda x: np.reshape(x, shape)


def _transpose(eqn: Any) -> Step:
    order = eqn.params["permutation"]
    return lambda x: np.transpose(x, order)


def _concatenate(eqn: Any) -> Step:
    axis = eqn.params["dimension"]
    return lambda *parts: np.concatenate(parts, axis)


def _slice(eqn: Any) -> Step:
    params = eqn.params
    steps = params["strides"] or (1,) * len(params["start_indices"])
    at = tuple(map(slice, params["start_indices"], params["limit_indices"], steps))
    return lambda x: x[at]


def _starts(starts: Sequence[Any], shape: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    first = [min(max(int(s), 0), extent - size) for s, extent, size in zip(starts, shape, sizes, strict=True)]
    return tuple(slice(at, at + size) for at, size in zip(first, sizes, strict=True))


def _dynamic_slice(eqn: Any) -> Step:
    sizes = eqn.params["slice_sizes"]
    return lambda x, *starts: x[_starts(starts, x.shape, sizes)]


def _dynamic_update_slice(_: Any) -> Step:
    def step(x: Any, new: Any, *starts: Any) -> Any:
        out = np.array(x)
        out[_starts(starts, x.shape, new.shape)] = new
        return out

    return step


def _iota(eqn: Any) -> Step:
    params = eqn.params
    shape, axis = params["shape"], params["dimension"]
    along = np.arange(shape[axis]).astype(params["dtype"])
    value = np.broadcast_to(along.reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)
    return lambda: value


def _rev(eqn: Any) -> Step:
    axes = eqn.params["dimensions"]
    return lambda x: np.flip(x, axes)


def _pad(eqn: Any) -> Step:
    config = eqn.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        return _by_jax(eqn)
    widths = [(low, high) for low, high, _ in config]
    return lambda x, value: np.pad(x, widths, constant_values=value)


# --- reductions and products


def _reduce(function: Any) -> Callable[[Any], Step]:
    def rule(eqn: Any) -> Step:
        axes, dtype = tuple(eqn.params["axes"]), eqn.outvars[0].aval.dtype
        if _is_narrow(dtype):
            return lambda x: function.reduce(x.astype(np.float32), axis=axes).astype(dtype)
        return lambda x: function.reduce(x, axis=axes, dtype=dtype)

    return rule


def _argument(function: Step) -> Callable[[Any], Step]:
    def rule(eqn: Any) -> Step:
        (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
        return lambda x: function(x, axis=axis).astype(dtype)

    return rule


def _cumulative(function: Any) -> Callable[[Any], Step]:
    def rule(eqn: Any) -> Step:
        axis, reverse = eqn.params["axis"], eqn.params["reverse"]

        def step(x: Any) -> Any:
            if reverse:
                return np.flip(function.accumulate(np.flip(x, axis), axis=axis, dtype=x.dtype), axis)
            return function.accumulate(x, axis=axis, dtype=x.dtype)

        return step

    return rule


def _dot_general(eqn: Any) -> Step:
    (x_sum, y_sum), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x_ndim, y_ndim = (atom.aval.ndim for atom in eqn.invars)
    dtype, shape = eqn.outvars[0].aval.dtype, eqn.outvars[0].aval.shape
    x_free = [i for i in range(x_ndim) if i not in x_sum and i not in x_batch]
    y_free = [i for i in range(y_ndim) if i not in y_sum and i not in y_batch]
    wide = np.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype
    num_batch, num_sum = len(x_batch), len(x_sum)

    def arranged(x: Any, order: list[int], first: int, second: int) -> Any:
        x = np.transpose(x, order).astype(wide)
        sizes = x.shape
        cut = [0, num_batch, num_batch + first, num_batch + first + second]
        return x.reshape([int(np.prod(sizes[a:b])) for a, b in itertools.pairwise(cut)])

    def step(x: Any, y: Any) -> Any:
        left = arranged(x, [*x_batch, *x_free, *x_sum], len(x_free), num_sum)
        right = arranged(y, [*y_batch, *y_sum, *y_free], num_sum, len(y_free))
        return np.matmul(left, right).astype(dtype).reshape(shape)

    return step


def _same(function: Step) -> Callable[[Any], Step]:
    return lambda eqn: function


ELEMENTS = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "div": _divide,
    "rem": np.fmod,
    "pow": np.power,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
    "logistic": _logistic,
    "square": np.square,
    "is_finite": np.isfinite,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": _clamp,
}
ALIKE = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "population_count": lambda x: np.bitwise_count(_unsigned(x)).astype(x.dtype),
    "shift_left": _shift(np.left_shift),
    "shift_right_logical": _shift(_shift_right_logical),
    "shift_right_arithmetic": _shift_right_arithmetic,
    "select_n": _select,
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "pvary": lambda x: x,
    "multiple_of": lambda x: x,
    "optimization_barrier": lambda *xs: list(xs),
    "device_put": lambda *xs: list(xs),
}
RULES: dict[str, Callable[[Any], Step]] = {
    **{name: _plain(function) for name, function in ELEMENTS.items()},
    **{name: _same(function) for name, function in ALIKE.items()},
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "integer_pow": _integer_pow,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _to_shape,
    "squeeze": _to_shape,
    "expand_dims": _to_shape,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "rev": _rev,
    "pad": _pad,
    "reduce_sum": _reduce(np.add),
    "reduce_max": _reduce(np.maximum),
    "reduce_min": _reduce(np.minimum),
    "reduce_prod": _reduce(np.multiply),
    "reduce_or": _reduce(np.bitwise_or),
    "reduce_and": _reduce(np.bitwise_and),
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "cumsum": _cumulative(np.add),
    "cummax": _cumulative(np.maximum),
    "dot_general": _dot_general,
}
