"""The decoder models in Flax NNX. A step is one forward pass over the packed new tokens of several sequences.

The package imports `models.config` and `models.moe` (mixtures of experts). Modules in reading order: `model` (the
decoder and its layers), `settings` (attention settings), `step_metadata` (positions and cache slots of a step's
tokens), `caches` (KV caches of each model family), `gqa` and `mla` (attention), `gemma` (layers of Gemma 4),
`deepseek_v4` and `hyper_connections` (layers and residual streams of DeepSeek-V4), `indexer` (key selection of sparse
attention), `layers` and `rope`, `mesh` (a model split over devices), `contexts` (the tokens of each page split over
devices), `mtp` and `v4_mtp` (multi-token prediction modules), `explain` (which implementations attention would use) and
`whole_sequence` (one sequence in one forward pass).
"""

from pallas_attn.models.decoder.caches import Caches as Caches
from pallas_attn.models.decoder.caches import KVScales as KVScales
from pallas_attn.models.decoder.caches import LayerCache as LayerCache
from pallas_attn.models.decoder.caches import cache_arrays as cache_arrays
from pallas_attn.models.decoder.caches import move_tokens as move_tokens
from pallas_attn.models.decoder.caches import with_arrays as with_arrays
from pallas_attn.models.decoder.explain import StepSizes as StepSizes
from pallas_attn.models.decoder.explain import explain_attention as explain_attention
from pallas_attn.models.decoder.mesh import device_part as device_part
from pallas_attn.models.decoder.mesh import make_mesh as make_mesh
from pallas_attn.models.decoder.mesh import normal_mesh as normal_mesh
from pallas_attn.models.decoder.mesh import over_mesh as over_mesh
from pallas_attn.models.decoder.mesh import specs_of as specs_of
from pallas_attn.models.decoder.model import Decoder as Decoder
from pallas_attn.models.decoder.model import Step as Step
from pallas_attn.models.decoder.model import apply_layers as apply_layers
from pallas_attn.models.decoder.model import named_weights as named_weights
from pallas_attn.models.decoder.model import shapes_of as shapes_of
from pallas_attn.models.decoder.model import split_model as split_model
from pallas_attn.models.decoder.model import split_module as split_module
from pallas_attn.models.decoder.model import with_settings as with_settings
from pallas_attn.models.decoder.mtp import MTP as MTP
from pallas_attn.models.decoder.mtp import MTPModule as MTPModule
from pallas_attn.models.decoder.settings import AttentionSettings as AttentionSettings
from pallas_attn.models.decoder.step_metadata import GroupTables as GroupTables
from pallas_attn.models.decoder.step_metadata import StepMetadata as StepMetadata
from pallas_attn.models.decoder.v4_mtp import V4MTP as V4MTP
from pallas_attn.models.decoder.v4_mtp import V4MTPModule as V4MTPModule
from pallas_attn.models.decoder.whole_sequence import pad_tokens as pad_tokens
from pallas_attn.models.decoder.whole_sequence import page_size_of as page_size_of
from pallas_attn.models.decoder.whole_sequence import power_of_two as power_of_two
from pallas_attn.models.decoder.whole_sequence import run_sequence as run_sequence
