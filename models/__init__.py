"""Decoder models, checkpoints and the inference engine. They use only public names of `pallas_attn`.

Raises ModuleNotFoundError if a package of the extra `engine` is not installed.
"""

import importlib.util

REQUIRED = ("filelock", "flax", "huggingface_hub", "jinja2", "llguidance", "rich", "safetensors", "tokenizers")
"""Packages of the extra `engine`, without flatbuffers: the kernel cache reports if it is missing."""

if _missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"pallas_attn.models needs {', '.join(_missing)}: pip install 'pallas_attn[engine]'", name=_missing[0]
    )
