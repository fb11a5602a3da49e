"""The card that a call is traced for: its name, capability and sizes.

Dispatch, tuning and kernels ask `current` and nothing else, so that they agree whether the card is the default device,
that of a mesh, one that is only described (compiled for and never run on), or the CPU that interprets kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as jax_config  # the mode a kernel is traced in has no public name

type Architecture = tuple[int, int]
"""A CUDA compute capability, such as (9, 0)."""

INTERPRET_VARIABLE = "PALLAS_ATTN_INTERPRET_CAPABILITY"
"""Names the architecture that interpreted kernels are traced for, one of those below; the first of them by default."""

INTERPRETED_ARCHITECTURES: tuple[Architecture, ...] = ((9, 0), (10, 0))
"""For Mosaic kernels."""

TRITON_ARCHITECTURES: tuple[Architecture, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""For Triton kernels, which the compile gate compiles for each of them."""

TRITON_INTERPRET_VARIABLE = "TRITON_INTERPRET"
"""Triton's own: where it is 1 before triton is imported, its kernels run interpreted on the CPU."""

INTERPRETED_MULTIPROCESSORS = 2
"""Few, since the programs of an interpreted kernel run one after the other."""


@dataclasses.dataclass(frozen=True)
class Capability:
    """The platform and compute capability that a call is compiled for.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...
      compute_capability: (9, 0) on an H200; None where there is none.
      num_multiprocessors: number of multiprocessors of the device, or None if unknown; does not affect equality. In the
        interpreter it is the small number that interpreted kernels use.

    Example:
      >>> pallas_attn.Capability("gpu", (9, 0)).compute_capability
      (9, 0)
    """

    platform: str
    compute_capability: Architecture | None
    num_multiprocessors: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Device:
    """A card, as far as the choice and the sizes of a kernel depend on it.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...: what XLA compiles for.
      name: the device's kind, such as "NVIDIA H200" or "cpu".
      capability: architecture of its kernels; in the interpreter the one that the CPU stands in for. None without one.
      multiprocessors: None where unknown.
      shared_bytes_per_block: shared memory that one thread block may have; None where unknown.
      shared_bytes_per_multiprocessor: shared memory that the blocks of a multiprocessor share; None where unknown.
      interpreted: whether kernels run interpreted on the CPU: those of Mosaic in `current()`
        (`plgpu.force_gpu_interpret_mode`), those of Triton in `triton_card()` (TRITON_INTERPRET=1).
    """

    platform: str
    name: str
    capability: Architecture | None = None
    multiprocessors: int | None = None
    shared_bytes_per_block: int | None = None
    shared_bytes_per_multiprocessor: int | None = None
    interpreted: bool = False

    @property
    def file_name(self) -> str:
        """The name as part of a file name, such as "nvidia_h200"."""
        return self.name.lower().replace(" ", "_").replace("/", "_")

    @property
    def words(self) -> str:
        """Platform and capability for messages, such as "gpu 8.0" or "cpu"."""
        return self.platform if self.capability is None else f"{self.platform} {_dotted(self.capability)}"

    def require(self, *architectures: Architecture) -> None:
        """Raises NotImplementedError unless kernels for one of these architectures run here, or are interpreted."""
        if self.capability in architectures and (self.platform == "gpu" or self.interpreted):
            return
        wanted = " or ".join(
            f"{_dotted(a)} ({', '.join(EXAMPLES[a])})" if a in EXAMPLES else _dotted(a) for a in architectures
        )
        raise NotImplementedError(f"needs a GPU of compute capability {wanted}, this is {self.words}")


EXAMPLES: dict[Architecture, tuple[str, ...]] = {(9, 0): ("H100", "H200"), (10, 0): ("B200", "GB200")}
"""Cards of an architecture, for messages."""

_ARCHITECTURES: dict[str, Architecture] = {
    "A100": (8, 0),
    "A30": (8, 0),
    "A10": (8, 6),
    "A10G": (8, 6),
    "A40": (8, 6),
    "A6000": (8, 6),
    "3090": (8, 6),
    "L4": (8, 9),
    "L40": (8, 9),
    "L40S": (8, 9),
    "4080": (8, 9),
    "4090": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "H20": (9, 0),
    "GH200": (9, 0),
    "B200": (10, 0),
    "GB200": (10, 0),
    "B300": (10, 3),
    "GB300": (10, 3),
    "5080": (12, 0),
    "5090": (12, 0),
}
"""By a word of a card's name, for cards of which a mesh tells no more than that name."""

_SHARED_KIB: dict[Architecture, tuple[int, int]] = {
    (8, 0): (163, 164),
    (8, 6): (99, 100),
    (8, 7): (163, 164),
    (8, 9): (99, 100),
    (9, 0): (227, 228),
    (10, 0): (227, 228),
    (10, 3): (227, 228),
    (12, 0): (99, 100),
    (12, 1): (99, 100),
}
"""Shared memory of a block and of a multiprocessor, in KiB (CUDA C++ Programming Guide, technical specifications)."""


def current() -> Device:
    """The card that a call traced now is compiled for.

    It is the card of the mesh in use, else the default device, else the first of the default backend. Arrays committed
    to another card are not seen here: name the implementation for those.

    Raises:
      ValueError: the interpreter is on, and its environment variable names no architecture that it stands in for.
    """
    device = _described(_traced_device())
    return _interpreting(device, INTERPRETED_ARCHITECTURES) if interpreted() else device


def triton_card(*, named: bool = True) -> Device:
    """The card that Triton kernels traced now are for: `current()`, or what the CPU stands in for (TRITON_INTERPRET=1).

    Args:
      named: whether the caller named the implementation. Interpreted kernels run only then, since they are slow.

    Raises:
      NotImplementedError: Triton kernels do not run here.
      ValueError: as in `current`.
    """
    device = _described(_traced_device())
    if interprets_triton():
        if named:
            return _interpreting(device, TRITON_ARCHITECTURES)
        if device.platform == "gpu":
            raise NotImplementedError(f"runs interpreted, and so only where it is named: {TRITON_INTERPRET_VARIABLE}=1")
    if device.platform != "gpu" or device.capability is None or device.capability < TRITON_ARCHITECTURES[0]:
        raise NotImplementedError(
            f"needs a GPU of compute capability {_dotted(TRITON_ARCHITECTURES[0])} or later, this is {device.words}"
        )
    return device


def interprets_triton() -> bool:
    """Whether Triton kernels run interpreted on the CPU."""
    return os.environ.get(TRITON_INTERPRET_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")


def capability() -> Capability:
    """The platform and compute capability that XLA compiles a call traced now for.

    They are those of the mesh in use, else of the default device, else of the default backend. In the interpreter they
    are the CPU's.

    Example:
      >>> pallas_attn.capability()
      Capability(platform='cpu', compute_capability=None, num_multiprocessors=None)
    """
    here = _described(_traced_device())
    multiprocessors = INTERPRETED_MULTIPROCESSORS if interpreted() else here.multiprocessors
    return Capability(here.platform, here.capability, multiprocessors)


def interpreted() -> bool:
    """Whether a Mosaic kernel traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    mode = jax_config.pallas_tpu_interpret_mode_context_manager.value
    if mode is None:
        return False
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not at the top: it takes long, and only kernels need it

    return isinstance(mode, plgpu.InterpretGPUParams)


@contextlib.contextmanager
def on_one_device(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """Within it the mesh in use is of one device of another's kind: whatever is traced is one device's."""
    if mesh.empty:
        yield
        return
    one = jax.sharding.AbstractMesh(
        (1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=mesh.abstract_device
    )
    none = jax.sharding.AbstractMesh((), ())  # one mesh may not replace another of another size
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(one):
        yield


def _traced_device() -> Any:
    """The jax device, or the `AbstractDevice` of a mesh of cards that are not attached."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is None or of_mesh.device_kind == device.device_kind:
        return device
    return next((d for d in jax.devices() if d.device_kind == of_mesh.device_kind), of_mesh)


def _described(device: Any) -> Device:
    """A `Device` of what a jax device tells, completed by what is known of its kind and architecture."""
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    version = getattr(device, "compute_capability", None)
    if version is None and platform == "gpu":
        architecture = _architecture_of(device.device_kind)
    else:
        architecture = _parsed(str(version))
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    per_block, per_multiprocessor = _SHARED_KIB.get(architecture, (None, None)) if architecture else (None, None)
    told = getattr(device, "shared_memory_per_block_optin", None)
    return Device(
        platform=platform,
        name=device.device_kind,
        capability=architecture,
        multiprocessors=cores if platform == "gpu" else None,
        shared_bytes_per_block=told or (per_block and per_block * 1024),
        shared_bytes_per_multiprocessor=per_multiprocessor and per_multiprocessor * 1024,
    )


def _interpreting(device: Device, architectures: tuple[Architecture, ...]) -> Device:
    """The device with the capability and sizes of the card that it stands in for, one of these."""
    named = os.environ.get(INTERPRET_VARIABLE) or _dotted(architectures[0])
    architecture = _parsed(named)
    if architecture not in architectures:
        wanted = " or ".join(map(_dotted, architectures))
        raise ValueError(f"{INTERPRET_VARIABLE}: expected {wanted}, got {named!r}")
    per_block, per_multiprocessor = _SHARED_KIB[architecture]
    return dataclasses.replace(
        device,
        capability=architecture,
        multiprocessors=INTERPRETED_MULTIPROCESSORS,
        shared_bytes_per_block=per_block * 1024,
        shared_bytes_per_multiprocessor=per_multiprocessor * 1024,
        interpreted=True,
    )


def _architecture_of(kind: str) -> Architecture | None:
    """The architecture of a card by its name; None for one that is not listed."""
    return next((_ARCHITECTURES[word] for word in re.split(r"[ \-_/]", kind) if word in _ARCHITECTURES), None)


def _parsed(version: str) -> Architecture | None:
    """The version as a pair, (9, 0) for "9.0"; None for anything else, such as "gfx942"."""
    major, _, minor = version.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else None


def _dotted(architecture: Architecture) -> str:
    return ".".join(map(str, architecture))
