"""Tests of `mosaic_tools.find`, which sets the environment variables of Mosaic GPU without importing it.

An import of Mosaic GPU sets the variables, too. Both must set the same values if a CUDA plugin is installed.
"""

import json
import subprocess
import sys

import pytest

from tests.aot import environment
from tests.kit.slow_cases import slow_cases

PROGRAM = """
import json, os, sys
import jax
from pallas_attn.runtime import mosaic_tools
if sys.argv[1] == "unknown":
    mosaic_tools.KNOWN_CORE = frozenset()
if sys.argv[1] == "imported":
    import jax.experimental.mosaic.gpu
else:
    mosaic_tools.find()
variables = {name: value for name, value in os.environ.items() if name.startswith("MOSAIC_GPU_")}
print(json.dumps([variables, mosaic_tools.CORE in sys.modules]))
"""


def found(plugin, how):
    """Return the MOSAIC_GPU_* variables that a new process sets, and whether it has imported Mosaic GPU. `how` is the
    argument of `PROGRAM`.
    """
    variables = {k: v for k, v in environment.variables(plugin).items() if not k.startswith("MOSAIC_GPU_")}
    variables["PYTHONPATH"] += f":{environment.ROOT}"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=variables, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@slow_cases("cuda13", "cuda12")
@pytest.mark.parametrize("plugin", environment.PLUGINS)
def test_find_sets_the_same_variables_as_importing_mosaic(plugin):
    if reason := environment.missing(plugin):
        pytest.skip(reason)
    want, _ = found(plugin, "imported")
    variables_of_nvshmem = {"MOSAIC_GPU_NVSHMEM_BC_PATH", "MOSAIC_GPU_NVSHMEM_SO_PATH"}  # if its package is installed
    assert set(want) - variables_of_nvshmem == {"MOSAIC_GPU_CUDA_ROOT", "MOSAIC_GPU_RUNTIME_LIB_PATH"}
    assert found(plugin, "known") == [want, False]
    assert found(plugin, "unknown") == [want, True]
