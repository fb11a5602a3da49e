"""Goldens of Gemma 4 and DeepSeek-V4, engine runs that are compared with them, and planted mistakes in checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Container, Iterable

import jax.numpy as jnp
import numpy as np

from pallas_attn.models.checkpoints import files, load_model
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig, RequestOutput, SamplingParams
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, Patch, read_golden, replaced

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


golden = functools.cache(read_golden)


def continued(name: str, engine: Engine, sizes: EngineConfig, cached_tokens: list[int]) -> Engine:
    """Return another engine of a golden's model that has imported the cached pages of an engine. Assert that it
    generates the tokens of the golden, with `cached_tokens` cached tokens of each prompt.
    """
    other = Engine(loaded(name), sizes)
    other.import_pages(CachedPages.from_bytes(engine.export_prefix_cache().to_bytes()))
    outputs = other.generate(golden(name).prompts, GREEDY)
    expect_golden(name, [*outputs, *outputs])
    assert [output.cached_tokens for output in outputs] == cached_tokens
    return other


def expect_mutations_of_transformers(names: Iterable[str], mistakes: Container[str]) -> None:
    """Assert that the mistakes include the mutations of transformers of each golden, and that each mutation changed
    transformers' logits clearly."""
    for name in names:
        mutations = json.loads((GOLDENS / name / "golden.json").read_text())["mutations"]
        assert all(mutation in mistakes for mutation in mutations)
        assert min(mutations.values()) > 100 * LOGIT_TOLERANCE


@functools.cache
def loaded(name: str) -> Decoder:
    return load_model(GOLDENS / name, jnp.float32)


def run_twice(
    decoder: Decoder,
    sizes: EngineConfig,
    prompts: list[list[int]],
    max_model_len: int,
    separate_prefill: bool = False,
) -> tuple[Engine, list[RequestOutput]]:
    """Run the prompts twice, so that the second run has prefix hits. The engine has one bucket of each kind, so it
    compiles two forward passes, or three with `separate_prefill`.
    """
    one_size = {"decode_buckets": (sizes.max_num_seqs,), "prefill_buckets": (sizes.max_batched_tokens,)}
    limits = {"max_model_len": max_model_len, "separate_prefill": separate_prefill}
    engine = Engine(decoder, dataclasses.replace(sizes, **one_size, **limits))
    return engine, [*engine.generate(prompts, GREEDY), *engine.generate(prompts, GREEDY)]


def expect_golden(name: str, outputs: list[RequestOutput]) -> None:
    """Assert that the outputs of `run_twice` are the tokens of the golden."""
    tokens = golden(name)["tokens"]
    for output, wanted in zip(outputs, [*tokens, *tokens], strict=True):
        np.testing.assert_array_equal(output.output_ids, wanted)


def tensors_changed(ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Patch], None]:
    """Return a mistake that changes the tensors whose names end with `ending`."""
    right = files.Checkpoint.read

    def read(checkpoint: files.Checkpoint, name: str, part: files.Slices = ()) -> np.ndarray:
        tensor = right(checkpoint, name, part)
        return change(tensor) if name.endswith(ending) else tensor

    return replaced(files.Checkpoint, "read", read)
