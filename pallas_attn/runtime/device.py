"""The device that a call is traced for: name, compute capability and sizes.

Dispatch, tuning and kernels get all device facts from `current`. They therefore agree, whether the device is the
default device, a device of a mesh, a described device that is not attached, or a CPU that interprets kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as jax_config  # JAX has no public name for the interpreter mode

type Architecture = tuple[int, int]
"""CUDA compute capability, for example (9, 0)."""

INTERPRET_VARIABLE = "PALLAS_ATTN_INTERPRET_CAPABILITY"
"""Environment variable that selects the architecture of interpreted kernels. Default: the first supported architecture.
"""

INTERPRETED_ARCHITECTURES: tuple[Architecture, ...] = ((9, 0), (10, 0))
"""Architectures that Mosaic kernels can be interpreted for."""

TRITON_ARCHITECTURES: tuple[Architecture, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Architectures of the Triton kernels. The compile gate compiles the kernels for each of them."""

TRITON_INTERPRET_VARIABLE = "TRITON_INTERPRET"
"""Environment variable of Triton. If it is 1 when triton is imported, Triton kernels run interpreted on the CPU."""

INTERPRETED_MULTIPROCESSORS = 2
"""Number of multiprocessors in the interpreter. It is small because the interpreter runs CTAs one after the other."""


@dataclasses.dataclass(frozen=True)
class Capability:
    """Platform and compute capability that a call is compiled for.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...
      compute_capability: (9, 0) on an H200; None on a platform without compute capabilities.
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
    """Facts about a device that the choice of a kernel and its sizes depend on.

    Attributes:
      platform: platform that XLA compiles for: "cpu", "gpu", "tpu", ...
      name: the device kind, for example "NVIDIA H200" or "cpu".
      capability: compute capability of kernels; in the interpreter, the emulated compute capability. None if the device
        has none.
      multiprocessors: number of multiprocessors; None if unknown.
      shared_bytes_per_block: maximum shared memory of one thread block; None if unknown.
      shared_bytes_per_multiprocessor: shared memory of one multiprocessor; None if unknown.
      interpreted: whether kernels run interpreted on the CPU. `current()` reports this for Mosaic kernels
        (`plgpu.force_gpu_interpret_mode`), `triton_card()` for Triton kernels (TRITON_INTERPRET=1).
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
        """The name as part of a file name, for example "nvidia_h200"."""
        return self.name.lower().replace(" ", "_").replace("/", "_")

    @property
    def words(self) -> str:
        """Platform and compute capability for messages, for example "gpu 8.0" or "cpu"."""
        return self.platform if self.capability is None else f"{self.platform} {_dotted(self.capability)}"

    def require(self, *architectures: Architecture) -> None:
        """Raise NotImplementedError unless kernels of one of these architectures run or are interpreted here."""
        if self.capability in architectures and (self.platform == "gpu" or self.interpreted):
            return
        wanted = " or ".join(
            f"{_dotted(a)} ({', '.join(EXAMPLES[a])})" if a in EXAMPLES else _dotted(a) for a in architectures
        )
        raise NotImplementedError(f"needs a GPU of compute capability {wanted}, this is {self.words}")


EXAMPLES: dict[Architecture, tuple[str, ...]] = {(9, 0): ("H100", "H200"), (10, 0): ("B200", "GB200")}
"""Example devices of an architecture, for messages."""

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
"""Architecture by a word of the device name, for mesh devices that have only a name."""

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
    """Return the device that a call traced now is compiled for.

    It is the device of the current mesh, or the default device, or the first device of the default backend, in this
    order. Arrays that are committed to another device are not considered; for such arrays, name the implementation.

    Raises:
      ValueError: the interpreter is on, and its environment variable names an unsupported architecture.
    """
    device = _described(_traced_device())
    return _interpreting(device, INTERPRETED_ARCHITECTURES) if interpreted() else device


def triton_card(*, named: bool = True) -> Device:
    """Return the device that Triton kernels traced now run on: `current()`, or the emulated device with
    TRITON_INTERPRET=1.

    Args:
      named: whether the caller named the implementation. Interpreted kernels are slow and run only if they are named.

    Raises:
      NotImplementedError: Triton kernels do not run here.
      ValueError: see `current`.
    """
    device = _described(_traced_device())
    if interprets_triton():
        if named:
            return _interpreting(device, TRITON_ARCHITECTURES)
        if device.platform == "gpu":
            raise NotImplementedError(
                f"runs interpreted ({TRITON_INTERPRET_VARIABLE}=1), and interpreted kernels run only if they are named"
            )
    if device.platform != "gpu" or device.capability is None or device.capability < TRITON_ARCHITECTURES[0]:
        raise NotImplementedError(
            f"needs a GPU of compute capability {_dotted(TRITON_ARCHITECTURES[0])} or later, this is {device.words}"
        )
    return device


def interprets_triton() -> bool:
    """Return whether Triton kernels run interpreted on the CPU."""
    return os.environ.get(TRITON_INTERPRET_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")


def capability() -> Capability:
    """Return the platform and compute capability that XLA compiles a call traced now for.

    They belong to the current mesh, or the default device, or the default backend, in this order. In the interpreter,
    they are the platform and compute capability of the CPU.

    Example:
      >>> pallas_attn.capability()
      Capability(platform='cpu', compute_capability=None, num_multiprocessors=None)
    """
    here = _described(_traced_device())
    multiprocessors = INTERPRETED_MULTIPROCESSORS if interpreted() else here.multiprocessors
    return Capability(here.platform, here.capability, multiprocessors)


def interpreted() -> bool:
    """Return whether a Mosaic kernel traced now runs interpreted on the CPU (`plgpu.force_gpu_interpret_mode`)."""
    mode = jax_config.pallas_tpu_interpret_mode_context_manager.value
    if mode is None:
        return False
    from jax.experimental.pallas import mosaic_gpu as plgpu  # slow import that only kernels need

    return isinstance(mode, plgpu.InterpretGPUParams)


@contextlib.contextmanager
def on_one_device(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """Within this context, the current mesh has one device of the kind of `mesh`, so traced calls are not split."""
    if mesh.empty:
        yield
        return
    one = jax.sharding.AbstractMesh(
        (1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=mesh.abstract_device
    )
    none = jax.sharding.AbstractMesh((), ())  # JAX does not replace a mesh by a mesh of another size
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(one):
        yield


def _traced_device() -> Any:
    """Return the JAX device, or the `AbstractDevice` of a mesh whose devices are not attached."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is None or of_mesh.device_kind == device.device_kind:
        return device
    return next((d for d in jax.devices() if d.device_kind == of_mesh.device_kind), of_mesh)


def _described(device: Any) -> Device:
    """Return the `Device` of a JAX device. Facts that JAX does not report come from tables by name and architecture."""
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    version = getattr(device, "compute_capability", None)
    if version is None and platform == "gpu":
        architecture = _architecture_of(device.device_kind)
    else:
        architecture = _parsed(str(version))
    cores = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
    per_block, per_multiprocessor = _SHARED_KIB.get(architecture, (None, None)) if architecture else (None, None)
    reported = getattr(device, "shared_memory_per_block_optin", None)
    return Device(
        platform=platform,
        name=device.device_kind,
        capability=architecture,
        multiprocessors=cores if platform == "gpu" else None,
        shared_bytes_per_block=reported or (per_block and per_block * 1024),
        shared_bytes_per_multiprocessor=per_multiprocessor and per_multiprocessor * 1024,
    )


def _interpreting(device: Device, architectures: tuple[Architecture, ...]) -> Device:
    """Return the device with the capability and sizes of the emulated architecture, which is one of `architectures`."""
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
    """Return the architecture of a device by its name; None if the name is not listed."""
    return next((_ARCHITECTURES[word] for word in re.split(r"[ \-_/]", kind) if word in _ARCHITECTURES), None)


def _parsed(version: str) -> Architecture | None:
    """Return the version as a pair, (9, 0) for "9.0"; None for other formats such as "gfx942"."""
    major, _, minor = version.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else None


def _dotted(architecture: Architecture) -> str:
    return ".".join(map(str, architecture))
