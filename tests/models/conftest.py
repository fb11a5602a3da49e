"""Fixtures shared by the tests of models."""

import numpy as np
import pytest

from tests.kit.shared_steps import shared_steps
from tests.models.text_process_case import load_layout

__all__ = ["load_layout", "rng", "shared_steps"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
