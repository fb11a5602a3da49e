"""Steps of the engine on Hopper: layers of DeepSeek-V2-Lite's widths, one dense and two of experts,
and whatever is chosen there by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.mla import AttentionSettings
from models.model import Decoder, split_model
from models.presets import PRESETS
from models.runner import Bucket, PackedStep, RunnerConfig, _run_step
from pallas_attn import PagedLatent
from tests.aot.case import Case, shape

CONFIG = dataclasses.replace(PRESETS["v2-lite"], num_hidden_layers=3)
SIZES = RunnerConfig(
    num_pages=32768,
    page_size=64,
    table_pages=512,
    max_num_seqs=64,
    max_prefill_seqs=8,
    decode_buckets=(64,),
    prefill_buckets=(2048,),
)
MODEL = nnx.eval_shape(lambda: Decoder(CONFIG, AttentionSettings(), jnp.bfloat16))


def step(bucket: Bucket) -> Case:
    """A step of a bucket: all that it makes beside its caches are activations, at most those of all rows' experts."""
    spec = MODEL.cache_spec(SIZES.num_pages, SIZES.page_size)
    arguments = {
        "weights": jax.tree.leaves(nnx.state(MODEL)),
        "caches": tuple(jax.eval_shape(lambda: PagedLatent.allocate(spec)) for _ in range(CONFIG.num_hidden_layers)),
        "last_tokens": shape(SIZES.max_num_seqs, dtype=jnp.int32),
        "packed": shape(PackedStep.size(SIZES, bucket), dtype=jnp.int32),
    }

    def call(weights: Any, caches: Any, last_tokens: Any, packed: Any) -> Any:
        run, _ = split_model(MODEL)
        return _run_step(run, SIZES, bucket, weights, caches, last_tokens, packed)

    return Case(call, arguments, cache="caches", donated=True, temporaries=512 * 2**20)


ENGINE = {"engine-decode": step(Bucket(64, 0)), "engine-mixed": step(Bucket(64, 2048))}
