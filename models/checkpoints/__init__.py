"""Loading of Hugging Face directories, and calibration. It imports `models.config` and `models.decoder`.

In reading order: `files` (config.json and safetensors headers), `weights` (conversion of tensors to parameters, random
models), `mxfp4` (packed experts), `tokenizer` (texts and chat templates; `text_process` handles them in a separate
process), `kv_scales` (files of static scales of quantised caches) and `calibration` (computation of these scales).
"""

from models.checkpoints.files import CheckpointError as CheckpointError
from models.checkpoints.files import load_config as load_config
from models.checkpoints.kv_scales import kv_scales_content as kv_scales_content
from models.checkpoints.kv_scales import load_kv_scales as load_kv_scales
from models.checkpoints.kv_scales import save_kv_scales as save_kv_scales
from models.checkpoints.tokenizer import Tokenizer as Tokenizer
from models.checkpoints.tokenizer import TokenizerError as TokenizerError
from models.checkpoints.tokenizer import load_tokenizer as load_tokenizer
from models.checkpoints.weights import count_parameters as count_parameters
from models.checkpoints.weights import load_model as load_model
from models.checkpoints.weights import load_mtp as load_mtp
from models.checkpoints.weights import random_model as random_model
from models.checkpoints.weights import random_mtp as random_mtp
from models.checkpoints.weights import save_random_checkpoint as save_random_checkpoint
from models.checkpoints.weights import weight_axes as weight_axes
