"""Loading of models from Hugging Face directories, and calibration of quantised caches.

The package imports `models.config` and `models.decoder`. Modules in reading order: `files` (reads config.json and
headers of safetensors files), `sources` (a parameter and the tensors that it is made from), `weights` (converts tensors
to parameters, makes random models), `v4_sources` (parameters of DeepSeek-V4), `mxfp4` (unpacks experts of gpt-oss and
DeepSeek-V4), `tokenizer_files` (reads special tokens, settings and chat templates), `tokenizer` (converts between texts
and token ids; `text_process` runs it in a separate process), `detokenizer` (converts token ids to text while they are
generated), `kv_scales` (files with static scales of quantised caches) and `calibration` (computes these scales).
"""

from pallas_attn.models.checkpoints.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
from pallas_attn.models.checkpoints.files import CheckpointError as CheckpointError
from pallas_attn.models.checkpoints.files import load_config as load_config
from pallas_attn.models.checkpoints.kv_scales import kv_scales_content as kv_scales_content
from pallas_attn.models.checkpoints.kv_scales import load_kv_scales as load_kv_scales
from pallas_attn.models.checkpoints.kv_scales import save_kv_scales as save_kv_scales
from pallas_attn.models.checkpoints.tokenizer import Tokenizer as Tokenizer
from pallas_attn.models.checkpoints.tokenizer import load_tokenizer as load_tokenizer
from pallas_attn.models.checkpoints.tokenizer_files import TokenizerError as TokenizerError
from pallas_attn.models.checkpoints.weights import count_parameters as count_parameters
from pallas_attn.models.checkpoints.weights import load_model as load_model
from pallas_attn.models.checkpoints.weights import load_mtp as load_mtp
from pallas_attn.models.checkpoints.weights import random_model as random_model
from pallas_attn.models.checkpoints.weights import random_mtp as random_mtp
from pallas_attn.models.checkpoints.weights import save_random_checkpoint as save_random_checkpoint
from pallas_attn.models.checkpoints.weights import weight_axes as weight_axes
