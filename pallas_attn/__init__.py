"""Attention for LLM inference engines in JAX. This module is the complete public API."""

from typing import TYPE_CHECKING

# Attention over paged caches, and over packed sequences without pages.
from pallas_attn.ops.cascade_decode import cascade_decode as cascade_decode
from pallas_attn.ops.cascade_decode import count_shared_pages as count_shared_pages
from pallas_attn.ops.mla_decode import mla_decode as mla_decode
from pallas_attn.ops.mla_prefill import mla_prefill as mla_prefill
from pallas_attn.ops.paged_decode import paged_decode as paged_decode
from pallas_attn.ops.paged_prefill import paged_prefill as paged_prefill
from pallas_attn.ops.ragged_attention import ragged_attention as ragged_attention
from pallas_attn.portable.merge import lse_from_base2 as lse_from_base2
from pallas_attn.portable.merge import lse_to_base2 as lse_to_base2
from pallas_attn.portable.merge import merge_states as merge_states

# One call for a whole step, which writes the new tokens and then attends: the interface of JAX engines for TPUs.
from pallas_attn.ops.mla_ragged_paged_attention import mla_ragged_paged_attention as mla_ragged_paged_attention
from pallas_attn.ops.ragged_paged_attention import ragged_paged_attention as ragged_paged_attention

# Sparse attention: compressed entries, scores of keys, selection of keys, and attention to the selected keys.
from pallas_attn.ops.compress_and_write import compress_and_write as compress_and_write
from pallas_attn.ops.index_scores import index_scores as index_scores
from pallas_attn.ops.index_top_k import index_top_k as index_top_k
from pallas_attn.ops.mla_sparse import mla_sparse as mla_sparse
from pallas_attn.ops.select_top_k import select_top_k as select_top_k

# Weights of residual streams.
from pallas_attn.ops.hyper_connection_weights import hyper_connection_weights as hyper_connection_weights

# Cache writes, and reads of latents.
from pallas_attn.ops.gather_latent import gather_latent as gather_latent
from pallas_attn.ops.write_index_keys import write_index_keys as write_index_keys
from pallas_attn.ops.write_kv import write_kv as write_kv
from pallas_attn.ops.write_latent import write_latent as write_latent

# Metadata of a step (plans, slots, positions, prefix sums), computed once for all layers.
from pallas_attn.ops.plan_decode import plan_decode as plan_decode
from pallas_attn.portable.metadata import cumulative_lens as cumulative_lens
from pallas_attn.portable.metadata import entry_range as entry_range
from pallas_attn.portable.metadata import entry_slots as entry_slots
from pallas_attn.portable.metadata import is_prefill as is_prefill
from pallas_attn.portable.metadata import layer_slots as layer_slots
from pallas_attn.portable.metadata import layer_tables as layer_tables
from pallas_attn.portable.metadata import slot_mapping as slot_mapping
from pallas_attn.portable.metadata import token_positions as token_positions
from pallas_attn.portable.metadata import token_slots as token_slots
from pallas_attn.portable.metadata import validate_metadata as validate_metadata
from pallas_attn.portable.metadata import window_range as window_range
from pallas_attn.portable.metadata import window_slots as window_slots

# Types: caches, their shapes, and other arguments of operations.
from pallas_attn.types import FULL as FULL
from pallas_attn.types import PAGE_NONE as PAGE_NONE
from pallas_attn.types import CacheSpec as CacheSpec
from pallas_attn.types import DecodePlan as DecodePlan
from pallas_attn.types import HeadWindow as HeadWindow
from pallas_attn.types import PagedIndexKeys as PagedIndexKeys
from pallas_attn.types import PagedKV as PagedKV
from pallas_attn.types import PagedLatent as PagedLatent
from pallas_attn.types import PlanKey as PlanKey
from pallas_attn.types import Rope as Rope
from pallas_attn.types import SlotRange as SlotRange
from pallas_attn.types import index_cache_spec as index_cache_spec
from pallas_attn.types import kv_cache_spec as kv_cache_spec
from pallas_attn.types import latent_cache_spec as latent_cache_spec

# Conversions between this cache layout and the layouts of other engines.
from pallas_attn.convert import from_csr as from_csr
from pallas_attn.convert import from_nhd as from_nhd
from pallas_attn.convert import from_records as from_records
from pallas_attn.convert import join_kv as join_kv
from pallas_attn.convert import split_kv as split_kv
from pallas_attn.convert import to_nhd as to_nhd
from pallas_attn.convert import to_records as to_records
from pallas_attn.convert import token_tables as token_tables
from pallas_attn.convert import view_fused as view_fused
from pallas_attn.convert import view_nhd as view_nhd

# Which implementation runs a call, and why implementations with a higher preference do not.
from pallas_attn.runtime.device import Capability as Capability
from pallas_attn.runtime.device import capability as capability
from pallas_attn.runtime.dispatch import Explanation as Explanation
from pallas_attn.runtime.explain import explain as explain

# Kernel cache on disk, also for functions of users, and compilation of kernels ahead of their first call.
from pallas_attn.runtime.kernel_cache import compile_ahead as compile_ahead
from pallas_attn.runtime.kernel_cache import call_cached as call_cached

# Splits over several devices.
from pallas_attn import parallel as parallel

# The engine for whole models. `__getattr__` imports it when one of its names is used.
if TYPE_CHECKING:
    from pallas_attn.models.engine import SamplingParams as SamplingParams
    from pallas_attn.models.llm import LLM as LLM

__version__ = "0.2.0"

_ENGINE = {"LLM": "pallas_attn.models.llm", "SamplingParams": "pallas_attn.models.engine"}
"""Public names of the engine and their modules, which need the extra `engine`."""

_RENAMED = {"run_kept": "call_cached"}
"""Former public names and their replacements. A former name works until the next minor version, with a
DeprecationWarning.
"""


def __getattr__(name: str) -> object:
    """Return a name of the engine, the package `cache`, or with a DeprecationWarning the object that has replaced a
    former public name. Modules are imported when they are first used.

    Raises:
      ModuleNotFoundError: the name belongs to the engine, and the extra `engine` is not installed.
    """
    if name in _ENGINE:
        import importlib

        return getattr(importlib.import_module(_ENGINE[name]), name)
    if name == "cache":
        import importlib

        return importlib.import_module("pallas_attn.cache")
    if name not in _RENAMED:
        raise AttributeError(f"module 'pallas_attn' has no attribute {name!r}")
    import warnings

    warnings.warn(f"pallas_attn.{name} is now pallas_attn.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


def __dir__() -> list[str]:
    """Return the names of this module, with the names of the engine if the extra `engine` is installed.

    Tools such as `help` import every name in the list, which fails without the extra.
    """
    import importlib

    try:
        importlib.import_module("pallas_attn.models")  # only checks that the packages are installed
    except ModuleNotFoundError:
        return sorted(globals())
    return sorted({*globals(), *_ENGINE})
