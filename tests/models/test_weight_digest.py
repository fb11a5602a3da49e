"""The digest of the weights depends on every bit and its position, and does not depend on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from pallas_attn.models.checkpoints import random_model
from pallas_attn.models.config import GQA_PRESETS, PRESETS, ModelConfig
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.kv_transfer.weight_digest import weight_digest
from tests.models import engine_case
from tests.models.test_mesh import Sizes, devices_of

type Change = Callable[[np.ndarray], object]
"""A function that changes an array in place."""

V3 = dataclasses.replace(
    PRESETS["v3-tiny"], vocab_size=64, hidden_size=32, num_hidden_layers=1, first_k_dense_replace=0
)
GPT_OSS = dataclasses.replace(GQA_PRESETS["gpt-oss-tiny"], vocab_size=64, num_hidden_layers=1, windows=(8,))
QWEN3 = dataclasses.replace(GQA_PRESETS["qwen3-tiny"], vocab_size=64, num_hidden_layers=1)
CONFIGS: dict[str, ModelConfig] = {
    "v3": V3,
    "v3, biased, vocabulary not split": dataclasses.replace(
        V3, vocab_size=63, q_lora_rank=None, attention_bias=True, n_shared_experts=0
    ),
    "v3, padded experts": dataclasses.replace(
        V3, n_routed_experts=9, num_experts_per_tok=2, n_group=3, n_shared_experts=4
    ),
    "v32": dataclasses.replace(PRESETS["v32-tiny"], vocab_size=64, hidden_size=32, num_hidden_layers=1),
    "gpt-oss": GPT_OSS,
    "gpt-oss, padded experts": dataclasses.replace(GPT_OSS, num_local_experts=7),
    "qwen3": QWEN3,
    "llama, biased": dataclasses.replace(QWEN3, model_type="llama", attention_bias=True),
}
EMBEDDING = "embed_tokens"


@functools.cache
def model(config: ModelConfig, devices: Sizes | None = None) -> Decoder:
    return random_model(config, seed=3, mesh=None if devices is None else devices_of(devices))


def with_weight(model: Decoder, name: str, change: Change, dtype: Any = None) -> Decoder:
    """Return the model with a changed copy of one weight. The copy is converted to `dtype` first, if given."""
    graph, state = nnx.split(model)

    def changed(path: tuple[Any, ...], weight: nnx.Variable) -> nnx.Variable:
        if ".".join(map(str, path)) != name:
            return weight
        old = weight.get_value()
        values = np.array(old).astype(dtype or old.dtype)
        change(values)
        return weight.replace(jax.device_put(values, old.sharding))

    return nnx.merge(graph, nnx.map_state(changed, state))


def keep(values: np.ndarray) -> None:
    pass


def exchange_rows(values: np.ndarray) -> None:
    values[[3, 50]] = values[[50, 3]]


def exchange_elements(values: np.ndarray) -> None:
    values[3, 5], values[3, 6] = values[3, 6], values[3, 5]


def reverse_columns(values: np.ndarray) -> None:
    values[:] = values[:, ::-1]


def flip(bit: int) -> Change:
    def change(values: np.ndarray) -> None:
        bits = values.view(f"uint{8 * values.itemsize}")
        bits[7, 9] ^= bits.dtype.type(1 << bit)

    return change


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
def test_positions_and_bits_of_elements(dtype: type):
    """The digest changes if elements are exchanged or single bits change.

    Minimum and maximum of the weights are equal in all cases, except for the changes of single bits.
    """

    def digest(change: Change) -> str:
        return weight_digest(with_weight(model(QWEN3), EMBEDDING, change, dtype))

    bits = 8 * np.dtype(dtype).itemsize
    changes = [keep, exchange_rows, exchange_elements, reverse_columns, *map(flip, {*range(0, bits, 5), bits - 1})]
    digests = [digest(change) for change in changes]
    assert len({*digests}) == len(changes)
    assert digest(keep) == digests[0]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_zeros_and_nans(dtype: type):
    """The digest depends on the signs of zeros and on the payloads of NaN.

    It also changes if two elements that differ only in the sign bit are exchanged.
    """

    def digest(*elements: int) -> str:
        """Return the digest of weights whose first elements have these upper 16 bits of a float32."""

        def change(values: np.ndarray) -> None:
            bits = values.view(f"uint{8 * values.itemsize}")
            bits[0, : len(elements)] = [element << (bits.itemsize * 8 - 16) for element in elements]

        return weight_digest(with_weight(model(QWEN3), EMBEDDING, change, dtype))

    pairs = [
        (0, 0),
        (0x8000, 0),
        (0, 0x8000),
        (0x7FC0, 0),
        (0x7FC1, 0),
        (0xFFC0, 0),
        (0x3F80, 0xBF80),
        (0xBF80, 0x3F80),
    ]
    assert len({digest(*pair) for pair in pairs}) == len(pairs)


def test_names_and_dtypes():
    """The digest depends on the names and dtypes of weights, not only on their values and shapes."""
    plain = model(QWEN3)

    def zero(values: np.ndarray) -> None:
        values[:] = 0

    def one(values: np.ndarray) -> None:
        values[:] = 1

    zeros = with_weight(plain, EMBEDDING, zero)
    assert weight_digest(zeros) != weight_digest(with_weight(zeros, EMBEDDING, keep, ml_dtypes.bfloat16))
    norms = ["layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"]
    exchanged = [with_weight(with_weight(plain, first, zero), second, one) for first, second in (norms, norms[::-1])]
    assert weight_digest(exchanged[0]) != weight_digest(exchanged[1])


SPLIT = [2, 4, "expert=2", "context=2", "context=2,tensor=2", "data=2", "data=2,tensor=2", "data=2,expert=4"]
IN_EVERY_RUN = [
    ("v3, padded experts", "data=2,expert=4"),
    ("llama, biased", "context=2,tensor=2"),
]
"""Models and meshes that run without `make test-slow`.

Together the cases have most kinds of slices of weights: heads, columns, padded experts, and biases of outputs that are
summed over the devices.
"""


def splits(config: ModelConfig, devices: Sizes) -> bool:
    """Return whether a mesh can split a model."""
    sizes = str(devices)
    without_experts = config.is_dense(config.num_hidden_layers - 1)
    return not ("expert" in sizes and without_experts) and not (
        "context" in sizes and (config.is_sparse or config.windows is not None)
    )


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(name, devices, marks=[] if (name, devices) in IN_EVERY_RUN else pytest.mark.slow)
        for name, config in CONFIGS.items()
        for devices in SPLIT
        if splits(config, devices)
    ],
)
def test_digest_does_not_depend_on_the_mesh(name: str, devices: Sizes):
    whole, split = model(CONFIGS[name]), model(CONFIGS[name], devices)
    assert weight_digest(split) == weight_digest(whole)
    changed = with_weight(split, EMBEDDING, exchange_rows)
    assert weight_digest(changed) == weight_digest(with_weight(whole, EMBEDDING, exchange_rows))
    assert weight_digest(changed) != weight_digest(split)


def test_pages_of_a_model_with_exchanged_rows_are_rejected():
    """Pages of a model with exchanged rows of a weight are rejected.

    Minimum and maximum of every weight are equal, but the cached values differ.
    """
    config = dataclasses.replace(engine_case.CONFIG, num_hidden_layers=1)
    sizes = EngineConfig(num_pages=24, page_size=4, max_batched_tokens=16, max_num_seqs=2, max_model_len=64)
    target = random_model(config, seed=3, settings=engine_case.QUICK)
    first = Engine(target, engine_case.padded(sizes))
    first.generate([engine_case.PROMPTS[4]], SamplingParams(max_tokens=1))
    pages = first.export_prefix_cache()
    other = Engine(with_weight(target, EMBEDDING, exchange_rows), engine_case.padded(sizes))
    with pytest.raises(ValueError, match="pages: expected pages of an engine like this one, got weights of"):
        other.import_pages(pages)
    assert Engine(target, engine_case.padded(sizes)).import_pages(pages) == len(engine_case.PROMPTS[4]) // 4 * 4
