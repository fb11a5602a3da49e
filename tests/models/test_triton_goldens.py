"""The models of tests/goldens with Triton kernels for all attention operations.

The kernels are interpreted on a CPU and compiled on a GPU. Triton kernels need 16-bit queries, so the models run in
bfloat16. Rounding to bfloat16 changes logits by 0.02 compared with the goldens, and by more if a router selects another
expert. The implementation `xla` in bfloat16 has the same rounding, so the results are compared with `xla`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.decoder import AttentionSettings, split_model
from pallas_attn.models.engine import Decoded, Engine, EngineConfig, SamplingParams
from pallas_attn.models.engine.verify import verify
from tests.kit.slow_cases import slow_cases
from tests.models.step_case import PAGE_SIZE, Pages, step
from tests.models.test_parity import GOLDENS, MUTATIONS, NAMES, golden

MEDIAN, MOST = 0.03, 0.06
"""Bounds of the median and of the 90th percentile, over the tokens, of the logit difference of a token.

The difference is the root mean square over the vocabulary. Correct kernels have a median of 0.004 and a 90th percentile
of 0.008. The attention mistake with the smallest effect has a median of 0.1. The tenth of the tokens with the largest
differences is excluded, because a router may select another expert for these tokens in bfloat16.
"""

ON_GPU = jax.default_backend() == "gpu"
slow = [] if ON_GPU else [pytest.mark.slow]
ORDINARY = ("v3", "gpt-oss")
PARAMS = SamplingParams(max_tokens=24 if ON_GPU else 3, ignore_eos=True)


def logits_of(name: str, implementation: str) -> np.ndarray:
    """Return the logits of all prompts, prefilled in one step, and of decode steps over the golden's tokens."""
    expected = golden(name)
    model = load_model(GOLDENS / name, jnp.bfloat16, settings=AttentionSettings(implementation=implementation))
    run, weights = split_model(model)
    run = jax.jit(run)
    lengths, tokens = [len(p) for p in expected.prompts], np.stack(expected["tokens"])
    pages = Pages.scatter(len(lengths), -(-(max(lengths) + 24) // PAGE_SIZE))
    prompts = step(pages, prefill=[(i, 0, length) for i, length in enumerate(lengths)])
    ids = jnp.asarray(np.concatenate(expected.prompts), jnp.int32)
    logits, caches = run(weights, ids, pages.allocate(model, fill=np.nan), prompts)
    found = [logits]
    for i in range(PARAMS.max_tokens):
        decode = [(s, length + i) for s, length in enumerate(lengths)]
        logits, caches = run(weights, jnp.asarray(tokens[:, i], jnp.int32), caches, step(pages, decode))
        found.append(logits)
    return np.concatenate([np.asarray(x, np.float32) for x in found])


by_xla = functools.cache(functools.partial(logits_of, implementation="xla"))


def differences(name: str) -> tuple[float, float]:
    """Return the median and the 90th percentile of the logit differences, which `MEDIAN` and `MOST` bound."""
    of_tokens = np.sqrt(np.square(logits_of(name, "triton") - by_xla(name)).mean(axis=-1))
    return float(np.median(of_tokens)), float(np.quantile(of_tokens, 0.9))


@pytest.mark.slow
@slow_cases("v3")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ORDINARY else slow) for n in NAMES])
def test_logits(name: str) -> None:
    """Logits with Triton kernels are close to logits with XLA.

    `implementation` names only Triton, so no attention operation can fall back to another implementation.
    """
    half, most = differences(name)
    assert half <= MEDIAN
    assert most <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("gpt-oss", "windows_one_wider"),
        ("gpt-oss", "sinks_scaled_as_scores"),
        ("qwen3-window", "scores_scaled_by_the_hidden_size"),
        ("v3", "rotary_mscale_dropped"),
        ("v32", "one_key_more"),
    ],
)
def test_a_mistake_is_noticed(name: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_xla(name)  # compute and cache the reference without the mistake
    MUTATIONS[mistake](monkeypatch)
    half, most = differences(name)
    assert half > MEDIAN
    assert most > MOST


@pytest.mark.parametrize("name", [pytest.param(n, marks=slow) for n in NAMES])
def test_the_engine(name: str) -> None:
    """Tokens of the engine with Triton kernels equal a plain uncached run.

    Prompts are prefilled in chunks while other requests decode, and prefixes are reused from the prefix cache.
    """
    model = load_model(GOLDENS / name, jnp.bfloat16, settings=AttentionSettings(implementation="triton"))
    engine = Engine(model, EngineConfig(num_pages=32, page_size=16, max_batched_tokens=32, max_num_seqs=3))
    prompts = golden(name).prompts
    outputs = engine.generate(prompts, PARAMS)
    assert sum(output.cached_tokens for output in outputs) >= 32
    decoded = [Decoded(p, out.output_ids, PARAMS) for p, out in zip(prompts, outputs, strict=True)]
    # The few tokens of the interpreter are no sample of rare events, such as another choice of experts or keys.
    verification = verify(model, decoded, max_len=128, tolerance=None if ON_GPU else 5.0)
    assert verification.passed, verification
    assert verification.equal >= 3 * verification.tied, verification
