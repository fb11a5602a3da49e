"""The device that a call is compiled for: name, compute capability, and sizes of its hardware.

All other modules (the choice of implementations, tuning, kernels) get these facts from `current` or `triton_card`. The
device may be the default device, a device of a mesh, a device that is described by a mesh but not attached, or a CPU
that emulates a GPU by interpreting kernels.
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
"""Environment variable with the compute capability that the interpreter emulates, for example "10.0".

Default: the first of `INTERPRETED_ARCHITECTURES` or `TRITON_ARCHITECTURES`.
"""

INTERPRETED_ARCHITECTURES: tuple[Architecture, ...] = ((9, 0), (10, 0))
"""Compute capabilities that the interpreter of Mosaic kernels can emulate."""

TRITON_ARCHITECTURES: tuple[Architecture, ...] = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
"""Compute capabilities that Triton kernels are tested for: tests compile all Triton kernels for each of them."""

TRITON_INTERPRET_VARIABLE = "TRITON_INTERPRET"
"""Environment variable of Triton. If it is 1 when `triton` is imported, Triton kernels are interpreted on the CPU."""

JAX_TRITON_VARIABLE = "PALLAS_ATTN_JAX_TRITON"
"""Environment variable. If it is 1 when a call is traced, jax-triton launches Triton kernels."""

INTERPRETED_MULTIPROCESSORS = 2
"""Number of multiprocessors of an emulated GPU. It is small, because the interpreter runs CTAs one after the other."""


@dataclasses.dataclass(frozen=True)
class Capability:
    """Platform and compute capability that a call is compiled for.

    Attributes:
      platform: "cpu", "gpu", "tpu", ...
      compute_capability: (9, 0) on an H200; None on a platform without compute capabilities.
      num_multiprocessors: number of multiprocessors, or None if unknown. Not part of comparisons with ==. While kernels
        are interpreted, it is the number of multiprocessors of the emulated GPU, 2.

    Example:
      >>> pallas_attn.Capability("gpu", (9, 0)).compute_capability
      (9, 0)
    """

    platform: str
    compute_capability: Architecture | None
    num_multiprocessors: int | None = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class Device:
    """Facts about a device that determine which kernels run and with which sizes.

    Attributes:
      platform: platform that XLA compiles for: "cpu", "gpu", "tpu", ...
      name: the device kind, for example "NVIDIA H200" or "cpu".
      capability: compute capability; of the emulated GPU if kernels are interpreted. None if the device has none.
      multiprocessors: number of multiprocessors; None if unknown.
      shared_bytes_per_block: maximum shared memory of one thread block; None if unknown.
      shared_bytes_per_multiprocessor: shared memory of one multiprocessor; None if unknown.
      interpreted: whether kernels are interpreted on the CPU: Mosaic kernels for the result of `current()`
        (`plgpu.force_gpu_interpret_mode`), Triton kernels for the result of `triton_card()` (TRITON_INTERPRET=1).
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
        """The device name in the form that file names contain, for example "nvidia_h200"."""
        return self.name.lower().replace(" ", "_").replace("/", "_")

    @property
    def words(self) -> str:
        """Platform and compute capability for messages, for example "gpu 8.0" or "cpu"."""
        return self.platform if self.capability is None else f"{self.platform} {_dotted(self.capability)}"

    def require(self, *architectures: Architecture) -> None:
        """Raise NotImplementedError unless the device is a GPU with one of these compute capabilities, or emulates
        one.
        """
        if self.capability in architectures and (self.platform == "gpu" or self.interpreted):
            return
        wanted = " or ".join(
            f"{_dotted(a)} ({', '.join(EXAMPLES[a])})" if a in EXAMPLES else _dotted(a) for a in architectures
        )
        raise NotImplementedError(f"needs a GPU of compute capability {wanted}, this is {self.words}")


EXAMPLES: dict[Architecture, tuple[str, ...]] = {(9, 0): ("H100", "H200"), (10, 0): ("B200", "GB200")}
"""Examples of devices with a compute capability, for error messages."""

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
"""Compute capability by a word of the device name, for devices of a mesh that are not attached and only have a name."""

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
"""Maximum shared memory per thread block and per multiprocessor, in KiB, by compute capability (CUDA C++ Programming
Guide, technical specifications).
"""


def current() -> Device:
    """Return the device for which a call that is traced now is compiled.

    It is the first of these that exists: the device of the current mesh, the default device (`jax_default_device`), the
    first device of the default backend. The function cannot see which device the arrays are on. If they are on another
    device, pass `implementation` to the operation.

    Raises:
      ValueError: Mosaic kernels are interpreted, and PALLAS_ATTN_INTERPRET_CAPABILITY names a compute capability that
        the interpreter does not emulate.
    """
    device = _described(_traced_device())
    return _interpreting(device, INTERPRETED_ARCHITECTURES) if interpreted() else device


def triton_card(*, named: bool = True) -> Device:
    """Return the device for which a Triton kernel that is traced now is compiled, or with TRITON_INTERPRET=1 the
    emulated GPU.

    Args:
      named: whether the caller requested the implementation "triton" by name. Interpreted kernels are slow, so they run
        only on request.

    Raises:
      NotImplementedError: the device does not run Triton kernels.
      ValueError: Triton kernels are interpreted, and PALLAS_ATTN_INTERPRET_CAPABILITY names another compute capability
        than `TRITON_ARCHITECTURES`.
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
    """Return whether Triton kernels are interpreted on the CPU."""
    return os.environ.get(TRITON_INTERPRET_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")


def calls_jax_triton() -> bool:
    """Return whether Triton kernels are launched through jax-triton.

    Raises:
      ValueError: PALLAS_ATTN_JAX_TRITON is neither 0 nor 1.
    """
    wanted = os.environ.get(JAX_TRITON_VARIABLE, "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"{JAX_TRITON_VARIABLE}: expected 0 or 1, got {wanted!r}")
    return wanted == "1"


def capability() -> Capability:
    """Return the platform and the compute capability for which XLA compiles a call that is traced now.

    The device is the first of these that exists: the device of the current mesh, the default device, the first device
    of the default backend. While kernels are interpreted, the result still describes the CPU: `compute_capability` is
    None.

    Example:
      >>> pallas_attn.capability()
      Capability(platform='cpu', compute_capability=None, num_multiprocessors=None)
    """
    here = _described(_traced_device())
    multiprocessors = INTERPRETED_MULTIPROCESSORS if interpreted() else here.multiprocessors
    return Capability(here.platform, here.capability, multiprocessors)


def interpreted() -> bool:
    """Return whether Mosaic kernels that are traced now are interpreted on the CPU (`force_gpu_interpret_mode`)."""
    mode = jax_config.pallas_tpu_interpret_mode_context_manager.value
    if mode is None:
        return False
    from jax.experimental.pallas import mosaic_gpu as plgpu  # imported here because the import is slow

    return isinstance(mode, plgpu.InterpretGPUParams)


@contextlib.contextmanager
def on_one_device(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """Set the current mesh to one device of the same kind as the devices of `mesh`, within this context.

    Calls that are traced in the context are compiled for this kind of device, and their arrays are not split.
    """
    if mesh.empty:
        yield
        return
    one = jax.sharding.AbstractMesh(
        (1,), ("device",), (jax.sharding.AxisType.Auto,), abstract_device=mesh.abstract_device
    )
    none = jax.sharding.AbstractMesh((), ())  # JAX replaces a mesh by a mesh of another size only via an empty mesh
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(one):
        yield


def _traced_device() -> Any:
    """Return the device for which a call that is traced now is compiled: a JAX device, or the `AbstractDevice` of a
    mesh whose devices are not attached.
    """
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    if of_mesh is None or of_mesh.device_kind == device.device_kind:
        return device
    return next((d for d in jax.devices() if d.device_kind == of_mesh.device_kind), of_mesh)


def _described(device: Any) -> Device:
    """Return the facts about a JAX device. Facts that JAX does not report come from the tables above."""
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
    """Return `device` with the compute capability and sizes of the emulated GPU.

    The compute capability is the value of PALLAS_ATTN_INTERPRET_CAPABILITY, or the first of `architectures`.

    Raises:
      ValueError: the value is not one of `architectures`.
    """
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
    """Return the compute capability of a device by its name; None if the name is not in the table."""
    return next((_ARCHITECTURES[word] for word in re.split(r"[ \-_/]", kind) if word in _ARCHITECTURES), None)


def _parsed(version: str) -> Architecture | None:
    """Parse a compute capability: (9, 0) for "9.0"; None for other formats, such as AMD's "gfx942"."""
    major, _, minor = version.partition(".")
    return (int(major), int(minor or 0)) if major.isdigit() and (minor or "0").isdigit() else None


def _dotted(architecture: Architecture) -> str:
    return ".".join(map(str, architecture))
