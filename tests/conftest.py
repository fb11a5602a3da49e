"""JAX as strict as it gets, and the jaxtyping annotations of the library checked at run time."""

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Not pallas_attn.types: a pytree node may hold shapes, axes or shardings in place of its arrays.
_hook = install_import_hook(["pallas_attn.ops", "pallas_attn.cache", "models"], "beartype.beartype")


@pytest.fixture
def unchecked_shapes():
    """Lets a test hand over arguments the annotations forbid, to see the library's own error."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
