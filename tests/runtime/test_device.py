"""The device that a call is traced for may come from a mesh, the default device or the interpreter. Dispatch, tuning
and kernels must use the same device.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_attn import Capability, capability, explain
from pallas_attn.mosaic.primitives import basics
from pallas_attn.runtime import device, dispatch, tuning

H200 = SimpleNamespace(
    platform="gpu",
    device_kind="NVIDIA H200",
    compute_capability="9.0",
    core_count=132,
    shared_memory_per_block_optin=232448,
)
AS_H200 = device.Device("gpu", "NVIDIA H200", (9, 0), 132, 232448, 228 * 1024)


def mesh_of(kind: str, cores: int) -> AbstractMesh:
    """Return a mesh with the facts about its devices that JAX gives while a call is traced: name
    and number of cores.
    """
    card = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    return AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=card)


def default_device(card: Any) -> Any:
    """Return a context in which a device is the default device. It replaces `jax.config`, because JAX accepts only
    attached devices.
    """
    return mock.patch.object(device.jax, "config", SimpleNamespace(jax_default_device=card))


def test_default_device() -> None:
    here = device.current()
    assert here.platform == jax.default_backend()
    assert here.name == jax.devices()[0].device_kind
    assert tuning.device_name() == here.file_name
    with jax.default_device("cpu"):
        assert device.current() == device.Device("cpu", "cpu")
        assert capability() == Capability("cpu", None)


def test_inside_a_mesh_and_a_traced_function() -> None:
    here, seen = device.current(), []
    with jax.default_device(jax.devices()[0]), jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert device.current() == here
        jax.jit(lambda x: (seen.append(device.current()), x)[1])(1.0)
    assert seen == [here]


def test_a_gpu_mesh_over_a_cpu_as_default_device() -> None:
    """No GPU of the mesh is attached. The name and the number of cores come from the mesh, and other facts come from
    the table of architectures. An unknown name has no other facts.
    """
    with jax.default_device(jax.devices("cpu")[0]), use_abstract_mesh(mesh_of("NVIDIA H200", 132)):
        assert device.current() == device.Device("gpu", "NVIDIA H200", (9, 0), 132, 227 * 1024, 228 * 1024)
        assert (capability(), capability().num_multiprocessors) == (Capability("gpu", (9, 0)), 132)
        assert tuning.device_name() == "nvidia_h200"
        assert basics.multiprocessors() == 132
    with jax.default_device(jax.devices("cpu")[0]), use_abstract_mesh(mesh_of("NVIDIA Something New", 10)):
        assert device.current() == device.Device("gpu", "NVIDIA Something New", None, 10)


def test_attached_device_describes_the_mesh() -> None:
    with mock.patch.object(device.jax, "devices", return_value=[H200]), use_abstract_mesh(mesh_of("NVIDIA H200", 1)):
        assert device.current() == AS_H200


def test_described_device() -> None:
    """A default device that is not attached is used with all its facts, also inside a mesh of devices with its name."""
    with default_device(H200):
        assert device.current() == AS_H200
        assert (capability(), tuning.device_name()) == (Capability("gpu", (9, 0)), "nvidia_h200")
        with use_abstract_mesh(mesh_of("NVIDIA H200", 7)):
            assert device.current() == AS_H200


@pytest.mark.parametrize(("version", "pair"), [("9.0", (9, 0)), ("10.3", (10, 3)), ("8", (8, 0)), ("gfx942", None)])
def test_compute_capability_is_parsed(version: str, pair: tuple[int, int] | None) -> None:
    card = SimpleNamespace(platform="cuda", compute_capability=version, device_kind="A Card/2")
    with mock.patch.object(device.jax, "local_devices", return_value=[card]):
        assert capability() == Capability("gpu", pair)
        assert tuning.device_name() == "a_card_2"


def test_unknown_number_of_multiprocessors() -> None:
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")
    silent = "needs the number of multiprocessors, which NVIDIA H100 does not report"
    with default_device(card), pytest.raises(NotImplementedError, match=silent):
        basics.multiprocessors()


# --- the interpreter


@pytest.mark.parametrize(("named", "architecture"), [(None, (9, 0)), ("9.0", (9, 0)), ("10.0", (10, 0))])
def test_interpreter_emulates_an_architecture(
    monkeypatch: pytest.MonkeyPatch, named: str | None, architecture: tuple[int, int]
) -> None:
    """In interpret mode, XLA compiles for the CPU, with configurations for the CPU. Kernels are traced for the emulated
    architecture.
    """
    if named is None:
        monkeypatch.delenv(device.INTERPRET_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(device.INTERPRET_VARIABLE, named)
    with jax.default_device("cpu"), plgpu.force_gpu_interpret_mode():
        here = device.current()
        assert (here.platform, here.capability, here.interpreted) == ("cpu", architecture, True)
        assert capability() == Capability("cpu", None)
        assert (tuning.device_name(), basics.multiprocessors()) == ("cpu", device.INTERPRETED_MULTIPROCESSORS)
        assert basics.interpreted()
        basics.require_capability(architecture)
    assert not device.current().interpreted


def test_hopper_kernels_are_not_interpreted_for_other_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Blackwell is emulated, a call does not run the Hopper kernel of an operation without a Blackwell kernel."""
    monkeypatch.setenv(device.INTERPRET_VARIABLE, "10.0")
    only_hopper = {("mosaic", (9, 0)): "mosaic_sm90", ("xla", None): "xla"}
    monkeypatch.setitem(dispatch.MODULES, "ragged_attention", only_hopper)
    pages, lens = jnp.zeros((2, 1, 16, 64), jnp.bfloat16), jnp.ones((1,), jnp.int32)
    kv = {"k": pages[:, :, 0], "v": pages[:, :, 0]}
    arguments = {"q": jnp.zeros((1, 4, 64), jnp.bfloat16), **kv, "cu_q_lens": jnp.arange(2, dtype=jnp.int32)}
    with plgpu.force_gpu_interpret_mode():
        explanation = explain("ragged_attention", **arguments, cu_kv_lens=jnp.append(0 * lens, 2))
    wanted = "needs a GPU of compute capability 9.0 (H100, H200), this is cpu 10.0"
    assert (explanation.chosen, explanation.refused["mosaic"]) == ("xla", wanted)


@pytest.mark.parametrize("named", ["8.0", "hopper", "sm_90"])
def test_unsupported_interpreted_architecture(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv(device.INTERPRET_VARIABLE, named)
    wanted = f"^{device.INTERPRET_VARIABLE}: expected 9.0 or 10.0, got '{named}'"
    with plgpu.force_gpu_interpret_mode(), pytest.raises(ValueError, match=wanted):
        device.current()


# --- Triton


@pytest.mark.parametrize(("named", "pair"), [(None, (8, 0)), ("8.6", (8, 6)), ("12.0", (12, 0))])
def test_triton_interpreter_emulates_an_architecture(
    monkeypatch: pytest.MonkeyPatch, named: str | None, pair: tuple[int, int]
) -> None:
    monkeypatch.delenv(device.INTERPRET_VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(device.INTERPRET_VARIABLE, named)
    monkeypatch.setenv(device.TRITON_INTERPRET_VARIABLE, "1")
    with jax.default_device("cpu"):
        here = device.triton_card()
        assert (here.platform, here.capability, here.interpreted) == ("cpu", pair, True)
        assert here.shared_bytes_per_block == (99 if pair > (8, 0) else 163) * 1024
        assert not device.current().interpreted


def test_triton_needs_ampere_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(device.TRITON_INTERPRET_VARIABLE, raising=False)
    for card, words in [
        (SimpleNamespace(platform="gpu", device_kind="NVIDIA T4", compute_capability="7.5"), "gpu 7.5"),
        (SimpleNamespace(platform="cpu", device_kind="cpu"), "cpu"),
    ]:
        wanted = f"^needs a GPU of compute capability 8.0 or later, this is {words}$"
        with default_device(card), pytest.raises(NotImplementedError, match=wanted):
            device.triton_card()
    with default_device(H200):
        assert device.triton_card() == device.triton_card(named=False) == AS_H200
    with jax.default_device("cpu"), use_abstract_mesh(mesh_of("NVIDIA GeForce RTX 4090", 128)):
        assert device.triton_card().capability == (8, 9)
