"""JAX as strict as it gets, and the jaxtyping annotations of the library checked at run time."""

import gc
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

from tests.kit import faster_interpreter
from tests.slow import SLOW

pytest_plugins = ("tests.kit.shards", "pytester")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# For tests of meshes; all others run on the first.
jax.config.update("jax_num_cpu_devices", 8)

faster_interpreter.apply()

# Threads of XLA's pool, else as many as there are cores. The warpgroups of an interpreted kernel hold some while they
# wait for one another, and those they wait for need some, too. XLA reads it when the first computation runs.
os.environ.setdefault("NPROC", "16")

# Tests mostly compile, and many of them the same things. Each process has a cache of its own: jax writes entries in
# place, and who reads half of one may crash.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Traces and their tables are millions of objects that stay; looking for garbage among them took a tenth of the time.
gc.set_threshold(50_000, 20, 20)

# Tests change what kernels are traced with: configurations, constants, the number of multiprocessors. Keys of kept
# kernels know nothing of that, so on a card the second of two variants would be the first once more.
os.environ["PALLAS_ATTN_KERNEL_CACHE"] = "0"

# Triton kernels run interpreted where there is no card. Before triton is imported, and once all is set that the backend
# is made with.
if jax.default_backend() != "gpu":
    os.environ["TRITON_INTERPRET"] = "1"

# Modules that have annotations of shapes; checks of a scheduler's own types took a quarter of the engine's tests. Not
# pallas_attn.types: a pytree node may hold shapes, axes or shardings in place of its arrays.
_CHECKED = [
    *("pallas_attn.ops", "pallas_attn.cache", "pallas_attn.convert", "models.decoder", "models.checkpoints"),
    *(f"models.engine.{name}" for name in ("packed_step", "runner", "sampler", "step_plan", "verify")),
]
_hook = install_import_hook(_CHECKED, "beartype.beartype")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow, and skips, and so counts, what needs a GPU where there is none."""
    any_of, slow = re.compile("|".join(SLOW)), set()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if any_of.search(name):
            item.add_marker(pytest.mark.slow)
            slow.add(name)
    ignored = config.getoption("ignore") or config.getoption("ignore_glob")
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not ignored
    if everything and (unused := [p for p in SLOW if not any(re.search(p, name) for name in slow)]):
        raise pytest.UsageError(f"tests/slow.py: no test has the name {unused}")
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled():
    """Every executable takes several mappings of memory, of which a process may have some 65,000: too few for all."""
    yield
    jax.clear_caches()


@pytest.fixture
def unchecked_shapes():
    """Lets a test hand over arguments the annotations forbid, to see the library's own error."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def short_rows_are_cut() -> Iterator[None]:
    """Lets rows of a few pages be cut into pieces, which would pay only if they were long."""
    from pallas_attn.ops.plan_decode.config import PlanConfig
    from pallas_attn.runtime import tuning

    def decide(op: str, key: Mapping[str, Any], config: Any) -> Any:
        return PlanConfig(row_overhead_pages=1, cut_pages=0) if op == "plan_decode" else config

    with tuning.deciding(decide):
        yield
