"""Strict JAX settings, runtime checks of jaxtyping annotations, and a hook for the mark `gpu`."""

import gc
import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

from tests.kit import eager_constants, faster_interpreter

pytest_plugins = ("tests.kit.shards", "tests.kit.slow_cases", "pytester")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests of meshes use several devices. All other tests run on the first.
jax.config.update("jax_num_cpu_devices", 8)

faster_interpreter.apply()

# Number of threads of XLA's pool; the default is the number of cores. Each warpgroup of an interpreted kernel occupies
# a thread while it waits, so a small pool would deadlock. XLA reads the variable when the first computation runs.
os.environ.setdefault("NPROC", "16")

# Tests spend most of their time compiling, often equal programs. Each process has a separate cache, because jax writes
# cache entries in place and a process that reads a partial entry may crash.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Traces are millions of long-lived objects. With the default thresholds, garbage collection took 10% of the time.
gc.set_threshold(50_000, 20, 20)

# Tests change configurations, constants and the number of multiprocessors while kernels are traced. Keys of the kernel
# cache do not contain these, so on a GPU the second of two variants would get the kernel of the first.
os.environ["PALLAS_ATTN_KERNEL_CACHE"] = "0"

# Without a GPU, Triton kernels are interpreted. The variable must be set before triton is imported, and after the
# settings with which jax creates its backend.
if jax.default_backend() != "gpu":
    os.environ["TRITON_INTERPRET"] = "1"
    eager_constants.apply()

# Modules with shape annotations. The scheduler is left out: type checks took a quarter of the time of the engine tests.
# pallas_attn.types is left out, because a pytree node may contain shapes, axes or shardings instead of arrays.
_CHECKED = [
    *(
        "pallas_attn.ops",
        "pallas_attn.cache",
        "pallas_attn.convert",
        "pallas_attn.models.decoder",
        "pallas_attn.models.checkpoints",
    ),
    "pallas_attn.models.moe",
    *(
        f"pallas_attn.models.engine.{name}"
        for name in ("runner", "sampler", "verify", "step.packed", "step.plan", "step.result")
    ),
    "pallas_attn.models.engine.kv_transfer.cache_rows",
]
_hook = install_import_hook(_CHECKED, "beartype.beartype")


@pytest.fixture
def compiled_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset TRITON_INTERPRET. The modules of all kernels are imported before: `triton.jit` reads the variable when a
    module is imported, and later tests interpret the same kernels.
    """
    for package in ("pallas_attn.ops", "pallas_attn.triton"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if ".triton" in module.name:
                importlib.import_module(module.name)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of GPUs on machines without a GPU."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled():
    """Free compiled programs. Each takes several memory mappings, and a process may have about 65,000."""
    yield
    jax.clear_caches()


@pytest.fixture
def unchecked_shapes():
    """Switch the annotation checks off, so that a test sees the error of the library for a wrong argument."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def short_rows_are_cut() -> Iterator[None]:
    """Make the planner split rows of a few pages, too. It would normally split long rows only."""
    from pallas_attn.ops.plan_decode.config import PlanConfig
    from pallas_attn.runtime import tuning

    def decide(op: str, key: Mapping[str, Any], config: Any) -> Any:
        return PlanConfig(row_overhead_pages=1, cut_pages=0) if op == "plan_decode" else config

    with tuning.deciding(decide):
        yield
