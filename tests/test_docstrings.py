"""Every public function and class has an example in its docstring. The examples run on a CPU and
print what they show.
"""

import doctest
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn
from pallas_attn import cache, parallel
from pallas_attn.compat.jax_gpu import decode_attention, paged_attention
from tests.kit.slow_cases import slow_cases

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that the package, `cache` and `compat` export, and that `parallel` defines."""
    of_parallel = {
        name: value for name, value in vars(parallel).items() if getattr(value, "__module__", "") == parallel.__name__
    }
    of_cache = {name: value for name, value in vars(cache).items() if name in cache.__all__}
    of_compat = {
        name: value
        for module in (paged_attention, decode_attention)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    for name, value in (vars(pallas_attn) | of_parallel | of_cache | of_compat).items():
        if not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            yield name, value


PUBLIC = dict(public())


def test_there_are_public_names() -> None:
    assert {"paged_decode", "plan_decode", "PagedKV", "explain", "head_split", "PagePool"} <= set(PUBLIC)


@slow_cases("decode_over_contexts")
@pytest.mark.parametrize("name", PUBLIC)
def test_example_gives_the_shown_output(name: str) -> None:
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    names = {"pallas_attn": pallas_attn, "jax": jax, "jnp": jnp, "np": np}
    example = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert "Example:\n" in docstring
    assert example.examples
    with jax.default_device("cpu"):
        result = doctest.DocTestRunner(optionflags=FLAGS).run(example)
    assert not result.failed
