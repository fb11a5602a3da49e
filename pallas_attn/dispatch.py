"""Which implementation of an operation runs a call: candidates in order, and the reasons of those that cannot.

An implementation says what it does not support by raising NotImplementedError while it is traced, before anything runs.
So choosing is trying, and explaining is trying abstractly: there is no second description of what each one supports
that could drift from the first.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.types import Implementation

NAMES = ("mosaic", "triton", "xla", "reference")
"""Every implementation name there can be, best first."""

ENVIRONMENT_VARIABLE = "PALLAS_ATTN_IMPLEMENTATION"
"""Names the default (comma-separated names are tried in order) where a call says None. Read when a call is traced."""

type Loader = Callable[[], Callable[..., Any]]
"""Imports one implementation and returns its function; called only once that implementation is to be tried."""


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a call is compiled for.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...
      compute_capability: (9, 0) on an H200; None where there is none.
    """

    platform: str
    compute_capability: tuple[int, int] | None


def capability() -> Capability:
    """The capability of the mesh in use, else of the default device, else of the default backend.

    A card that is not attached, only described, has to be the default device: of a mesh's devices no more than their
    kind is known while a call is traced. Arrays committed elsewhere are not seen here: name the implementation for
    those.
    """
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind != device.device_kind:
        device = next((d for d in jax.devices() if d.device_kind == described.device_kind), described)
    version = str(getattr(device, "compute_capability", "") or "")
    major, _, minor = version.partition(".")
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    return Capability(platform, (int(major), int(minor or 0)) if major.isdigit() else None)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation would run a call.

    Attributes:
      op: name of the operation.
      chosen: name of the implementation that would run, None if every candidate refuses.
      refused: candidate name to the reason it would not run, in the order they were tried.
    """

    op: str
    chosen: str | None
    refused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no implementation supports this call'}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused.items()])


def candidates(op: str, loaders: Mapping[str, Loader], implementation: Implementation) -> list[str]:
    """Names to try, in order.

    Raises:
      ValueError: a name that no operation has.
    """
    source = "implementation"
    if implementation is None and (named := os.environ.get(ENVIRONMENT_VARIABLE)):
        source, implementation = ENVIRONMENT_VARIABLE, [name.strip() for name in named.split(",")]
    if implementation is None:
        return [name for name in NAMES if name in loaders and name != "reference"]
    names = [implementation] if isinstance(implementation, str) else list(implementation)
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise ValueError(f"{source}: expected None or names among {', '.join(NAMES)}, got {implementation!r}")
    return names


def _load(op: str, loaders: Mapping[str, Loader], name: str) -> Callable[..., Any]:
    if name not in loaders:
        raise NotImplementedError(f"{op} has no {name!r} implementation; it has {', '.join(loaders)}")
    try:
        return loaders[name]()
    except ModuleNotFoundError as missing:  # its file, or an optional dependency of it
        raise NotImplementedError(f"{op}'s {name!r} implementation cannot be imported: {missing}") from missing


def run(op: str, loaders: Mapping[str, Loader], implementation: Implementation, *args: Any, **kwargs: Any) -> Any:
    """Runs `op` with the first candidate that supports the call.

    Args:
      op: name of the operation; also the `jax.named_scope` it runs under.
      loaders: implementation name to its loader.
      implementation: as the user gave it.
      args, kwargs: of the implementation, which gets jax arrays for those of numpy.

    Raises:
      ValueError: an implementation name that does not exist.
      NotImplementedError: the one implementation named does not support the call.
      ExceptionGroup: several were tried and none supports it; holds each one's NotImplementedError.
    """
    names = candidates(op, loaders, implementation)
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs))
    refusals = []
    with jax.named_scope(op):
        for name in names:
            try:
                return _load(op, loaders, name)(*args, **kwargs)
            except NotImplementedError as refusal:
                refusals.append(refusal)
    if len(refusals) == 1:
        raise refusals[0]
    raise ExceptionGroup(f"{op}: no implementation among {', '.join(names)} supports this call", refusals)


def explain(
    op: str,
    function: Callable[..., Any],
    loaders: Mapping[str, Loader],
    implementation: Implementation,
    *args: Any,
    **kwargs: Any,
) -> Explanation:
    """What `function`, the public face of `op`, would choose; found by tracing it with each candidate, running none.

    Raises:
      ValueError: what the call itself would raise.
    """
    arrays, rebuild = _split_arrays((args, kwargs))
    refused: dict[str, str] = {}

    def call(name: str, arrays: Sequence[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        return function(*args, **kwargs, implementation=name)

    for name in candidates(op, loaders, implementation):
        try:
            jax.eval_shape(functools.partial(call, name), arrays)
        except NotImplementedError as refusal:
            refused[name] = str(refusal)
        else:
            return Explanation(op, name, refused)
    return Explanation(op, None, refused)


def _split_arrays(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The arrays (or their shapes) among the leaves of a call's arguments, and how to put others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def rebuild(arrays: Sequence[Any]) -> Any:
        replaced = iter(arrays)
        return treedef.unflatten(
            [next(replaced) if flag else leaf for leaf, flag in zip(leaves, is_array, strict=True)]
        )

    return [leaf for leaf, flag in zip(leaves, is_array, strict=True) if flag], rebuild
