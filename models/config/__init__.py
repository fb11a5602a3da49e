"""Model configurations, read from and written to Hugging Face's config.json. The package imports no other package of
`models`.

Modules in reading order: `json_files` (reads untrusted JSON), `entries` (entries that several families have, with their
types and ranges), `rope` (rotary embedding and its scaling), `windows` (attention windows and cache groups), `gqa`,
`gemma`, `deepseek` and `deepseek_v4` (the four configuration classes), `families` (reads a config.json of any family),
`presets` (named configurations).
"""

from pallas_attn.models.config.deepseek import INDEX_ROPE_INTERLEAVE as INDEX_ROPE_INTERLEAVE
from pallas_attn.models.config.deepseek import DeepSeekConfig as DeepSeekConfig
from pallas_attn.models.config.deepseek_v4 import DeepseekV4Config as DeepseekV4Config
from pallas_attn.models.config.families import HeadsConfig as HeadsConfig
from pallas_attn.models.config.families import ModelConfig as ModelConfig
from pallas_attn.models.config.families import cache_groups as cache_groups
from pallas_attn.models.config.families import read_config as read_config
from pallas_attn.models.config.families import require_mtp as require_mtp
from pallas_attn.models.config.families import with_windows as with_windows
from pallas_attn.models.config.gemma import Gemma4Config as Gemma4Config
from pallas_attn.models.config.gqa import GQAConfig as GQAConfig
from pallas_attn.models.config.presets import GEMMA_PRESETS as GEMMA_PRESETS
from pallas_attn.models.config.presets import GQA_PRESETS as GQA_PRESETS
from pallas_attn.models.config.presets import PRESETS as PRESETS
from pallas_attn.models.config.presets import V4_PRESETS as V4_PRESETS
from pallas_attn.models.config.rope import Llama3RopeConfig as Llama3RopeConfig
from pallas_attn.models.config.rope import YarnConfig as YarnConfig
from pallas_attn.models.config.windows import CacheGroup as CacheGroup
from pallas_attn.models.config.windows import HeadShape as HeadShape
from pallas_attn.models.config.windows import HeadWindows as HeadWindows
from pallas_attn.models.config.windows import LayerWindow as LayerWindow
from pallas_attn.models.config.windows import Windows as Windows
from pallas_attn.models.config.windows import load_windows as load_windows
