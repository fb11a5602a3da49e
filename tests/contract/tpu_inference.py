"""Access to the tests of tpu-inference (the TPU backend of vLLM), which our suites run with our operations.

The environment variable TPU_INFERENCE names a checkout of tpu-inference. Without it, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src import test_util


def module(path: str) -> Any:
    """Import a file of tpu-inference by its path without ".py". Modules that need vLLM or a TPU are replaced by
    stubs.
    """
    root = os.environ.get("TPU_INFERENCE")
    if not root:
        pytest.skip("the environment variable TPU_INFERENCE names no checkout of tpu-inference")
    contents = {
        "tpu_inference": {"__path__": [str(Path(root) / "tpu_inference")]},
        "tpu_inference.logger": {"init_logger": logging.getLogger},
        "tpu_inference.utils": {"get_device_name": str},
    }
    for name, names in contents.items():
        stand_in = types.ModuleType(name)
        vars(stand_in).update(names)
        sys.modules.setdefault(name, stand_in)
    spec = importlib.util.spec_from_file_location(Path(path).name, Path(root) / f"{path}.py")
    if spec is None or spec.loader is None:
        raise ValueError(f"TPU_INFERENCE: expected a checkout with {path}.py, got {root}")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(case: type[unittest.TestCase], prefix: str) -> list[tuple[str, str]]:
    """Run the tests of a class whose names start with `prefix`, as if on a TPU. Float32 results have a tolerance of
    5e-5.

    Returns:
      (name of the test, unsupported argument) for each test whose call is unsupported. All other tests must pass.

    """
    refused, ran = [], 0
    close = case.assertAllClose  # pyrefly: ignore[missing-attribute]

    def assert_close(self: Any, got: Any, want: Any, *, atol: float, rtol: float) -> None:
        bound = {"atol": 5e-5, "rtol": 5e-5} if got.dtype == np.float32 else {"atol": atol, "rtol": rtol}
        close(self, got, want, **bound)

    names = [name for name in unittest.defaultTestLoader.getTestCaseNames(case) if name.startswith(prefix)]
    with (
        mock.patch.object(test_util, "is_device_tpu_at_least", return_value=True),
        mock.patch.object(case, "assertAllClose", assert_close),
    ):
        for name in names:
            result = unittest.TestResult()
            case(name).run(result)
            assert not result.skipped, (name, result.skipped)
            trouble = "".join(text for _, text in [*result.errors, *result.failures])
            last = trouble.strip().splitlines()[-1] if trouble else ""
            reasons = [word for word in ("q_scale", "e5m2", "sliding_window", "soft_cap", "k_scale") if word in last]
            assert not trouble or (reasons and ("NotImplementedError" in last or "ValueError" in last)), trouble
            refused += [(name, reason) for reason in reasons[:1]]
            ran += not trouble
            print(name, *reasons, flush=True)
            jax.clear_caches()  # each test compiles hundreds of small modules, which would fill the memory
    assert ran
    print(f"{ran} passed, {len(refused)} refused")
    return refused
