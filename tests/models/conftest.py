"""Fixtures shared by the tests of models."""

import numpy as np
import pytest

from tests.kit.shared_steps import compiled_steps, shared_steps

__all__ = ["compiled_steps", "rng", "shared_steps"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
