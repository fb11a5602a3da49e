"""The decoder models in Flax NNX. A step is one forward pass over the packed new tokens of several sequences.

The package imports `models.config` and `models.moe` (mixtures of experts). Modules in reading order: `model` (the
decoder and its layers), `settings` (attention settings), `step_metadata` (positions and cache slots of a step's
tokens), `caches` (KV caches of each model family), `gqa` and `mla` (attention), `indexer` (key selection of sparse
attention), `layers` and `rope`, `mesh` (a model split over devices), `contexts` (the tokens of each page split over
devices), `mtp` (multi-token prediction modules), `explain` (which implementations attention would use) and
`whole_sequence` (one sequence in one forward pass).
"""

from models.decoder.caches import Caches as Caches
from models.decoder.caches import KVScales as KVScales
from models.decoder.caches import LayerCache as LayerCache
from models.decoder.caches import cache_arrays as cache_arrays
from models.decoder.caches import move_tokens as move_tokens
from models.decoder.caches import with_arrays as with_arrays
from models.decoder.explain import StepSizes as StepSizes
from models.decoder.explain import explain_attention as explain_attention
from models.decoder.mesh import device_part as device_part
from models.decoder.mesh import make_mesh as make_mesh
from models.decoder.mesh import normal_mesh as normal_mesh
from models.decoder.mesh import over_mesh as over_mesh
from models.decoder.mesh import specs_of as specs_of
from models.decoder.model import Decoder as Decoder
from models.decoder.model import Step as Step
from models.decoder.model import apply_layers as apply_layers
from models.decoder.model import split_model as split_model
from models.decoder.model import split_module as split_module
from models.decoder.model import with_settings as with_settings
from models.decoder.mtp import MTP as MTP
from models.decoder.mtp import MTPModule as MTPModule
from models.decoder.settings import AttentionSettings as AttentionSettings
from models.decoder.step_metadata import GroupTables as GroupTables
from models.decoder.step_metadata import StepMetadata as StepMetadata
from models.decoder.whole_sequence import pad_tokens as pad_tokens
from models.decoder.whole_sequence import power_of_two as power_of_two
from models.decoder.whole_sequence import run_sequence as run_sequence
