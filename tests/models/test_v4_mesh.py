"""DeepSeek-V4 on meshes of several devices: logits and tokens equal the goldens, and pages move between layouts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_attn.models.checkpoints import files, load_model, random_model, random_mtp
from pallas_attn.models.config import V4_PRESETS
from pallas_attn.models.config.deepseek_v4 import CSA_KIND, HASH_MOE
from pallas_attn.models.decoder import (
    Decoder,
    GroupTables,
    StepMetadata,
    deepseek_v4,
    over_mesh,
    page_size_of,
    specs_of,
    split_model,
)
from pallas_attn.models.decoder.caches import CompressedCache
from pallas_attn.models.engine import CachedPages, Engine, EngineConfig, MTPProposer, NGramProposer, Speculation
from pallas_attn.models.engine.kv_transfer.weight_digest import weight_digest
from pallas_attn.models.moe import router
from tests.models.golden_case import GREEDY, golden, loaded
from tests.models.test_mesh import devices_of
from tests.models.test_parity import GOLDENS, LOGIT_TOLERANCE, Patch

MAX_LEN = 176
SIZES = {
    "v4": EngineConfig(num_pages=40, page_size=8, max_batched_tokens=32, max_num_seqs=4),
    "v4-published": EngineConfig(num_pages=8, page_size=128, max_batched_tokens=48, max_num_seqs=2),
}


@functools.cache
def split(name: str, devices: str) -> Decoder:
    return load_model(GOLDENS / name, jnp.float32, mesh=devices_of(devices))


def make(name: str, devices: str, **changes: Any) -> Engine:
    """Make an engine with one bucket of each kind."""
    model = split(name, devices)
    sizes = dataclasses.replace(SIZES[name], mesh=model.mesh, max_model_len=MAX_LEN, **changes)
    buckets = {"decode_buckets": (sizes.max_num_seqs,), "prefill_buckets": (sizes.max_batched_tokens,)}
    return Engine(model, dataclasses.replace(sizes, **buckets), capture_logits=True)


def run(engine: Engine, name: str) -> list[Any]:
    """Run the prompts of a golden, and check tokens and prompt logits."""
    expected = golden(name)
    ids = [engine.add_request(prompt, GREEDY) for prompt in expected.prompts]
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.output(i) for i in ids]
    for i, output, wanted, logits in zip(ids, outputs, expected["tokens"], expected["logits"], strict=True):
        np.testing.assert_array_equal(output.output_ids, wanted)
        np.testing.assert_allclose(
            engine.prompt_logits(i)[output.cached_tokens :], logits[output.cached_tokens :], atol=LOGIT_TOLERANCE
        )
    return outputs


def prompt_logits(model: Decoder, prompt: list[int]) -> np.ndarray:
    """Return the logits of one step with a whole prompt, from the first device of the mesh."""

    size, model_mesh = page_size_of(model.config), model.mesh
    pages = -(-len(prompt) // size)
    assert model_mesh is not None
    step, weights = split_model(model)

    def logits(weights: list[jax.Array], tokens: jax.Array) -> jax.Array:
        positions, none = jnp.arange(len(prompt), dtype=jnp.int32), jnp.zeros((0,), jnp.int32)
        lens = jnp.full((1,), len(prompt), jnp.int32)
        metadata = StepMetadata(
            positions=positions,
            groups=(GroupTables(positions, none[:, None], jnp.arange(pages, dtype=jnp.int32)[None]),),
            decode_kv_lens=none,
            cu_q_lens=jnp.concatenate([jnp.zeros_like(lens), lens]),
            prefill_kv_lens=lens,
            logit_rows=positions,
        )
        return step(weights, tokens, model.allocate_caches(pages, size), metadata)[0]

    everywhere = PartitionSpec()
    run = over_mesh(logits, model_mesh, (specs_of(weights), everywhere), everywhere)
    return np.asarray(jax.jit(run)(weights, jnp.asarray(prompt, jnp.int32)))


def test_layer_with_an_indexer():
    """Logits of a random model with one layer, which has hashed experts, equal the logits on one device."""
    kinds = {"layer_types": (CSA_KIND,), "mlp_layer_types": (HASH_MOE,)}
    config = dataclasses.replace(V4_PRESETS["v4-tiny"], num_hidden_layers=1, vocab_size=64, **kinds)
    prompt = np.random.default_rng(0).integers(0, 64, 70).tolist()
    one, two = (random_model(config, mesh=devices_of(devices)) for devices in ("tensor=1", "expert=2"))
    np.testing.assert_allclose(prompt_logits(two, prompt), prompt_logits(one, prompt), atol=LOGIT_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["tensor=2", "expert=2"])
def test_prompt_logits(devices: str):
    """Logits equal the results of Hugging Face transformers. The model has indexers, and hashed experts with a table of
    all tokens, while the vocabulary is split."""
    prompt, wanted = golden("v4").prompts[2], golden("v4")["logits"][2]
    np.testing.assert_allclose(prompt_logits(split("v4", devices), prompt), wanted, atol=LOGIT_TOLERANCE)


def without_sums(patch: Patch) -> None:
    patch.setattr(deepseek_v4, "sum_over", lambda x, axes: x)


def sinks_of_other_heads(patch: Patch) -> None:
    right = deepseek_v4.mla_sparse
    patch.setattr(deepseek_v4, "mla_sparse", lambda *args, sinks, **options: right(*args, sinks=sinks[::-1], **options))


def table_of_other_tokens(patch: Patch) -> None:
    """Look up the row of a token in the device's part of the vocabulary."""
    right = router.HashRouter.__call__

    def routed(gate: Any, x: jax.Array, tokens: jax.Array) -> Any:
        return right(gate, x, tokens % (gate.config.vocab_size))

    patch.setattr(router.HashRouter, "__call__", routed)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [without_sums, sinks_of_other_heads, table_of_other_tokens])
def test_mistakes_are_detected(mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch):
    mistake(monkeypatch)
    prompt, wanted = golden("v4").prompts[2], golden("v4")["logits"][2]
    found = prompt_logits(split("v4", "tensor=2"), prompt)
    assert np.abs(found - wanted).max() > 100 * LOGIT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v4", "tensor=1"),
        ("v4", "tensor=2"),
        ("v4", "expert=2"),
        ("v4", "data=2"),
        ("v4", "data=4"),
        ("v4", "data=2,expert=4"),
        ("v4", "data=2,tensor=2"),
        ("v4", "data=4,tensor=2"),
        ("v4", "data=8"),  # one expert on each device
        ("v4-published", "expert=2"),  # weights in FP8 and FP4 with scales
        ("v4-published", "data=2"),
        ("v4-published", "tensor=2"),  # half of the hidden columns of each expert
        ("v4-published", "data=4"),  # six experts: the last device has padding
    ],
)
def test_goldens(name: str, devices: str):
    """Tokens and prompt logits equal the results of Hugging Face transformers, with chunks and prefix hits."""
    engine = make(name, devices)
    run(engine, name)
    assert sum(output.cached_tokens for output in run(engine, name)) > 0
    cache = engine._runner._caches[0]
    assert isinstance(cache, CompressedCache)
    pages = {shard.data.shape[0] for shard in cache.window.pages.addressable_shards}
    assert pages == {engine._runner._specs[0].num_pages}


@pytest.mark.slow
def test_preemption_on_data_ranks():
    engine = make("v4", "data=2,tensor=2", num_pages=14, recycling=False)
    run(engine, "v4")
    run(engine, "v4")
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["tensor=2", "data=2,expert=4"])
def test_drafts_change_no_token(devices: str):
    engine = make("v4", devices, speculate=Speculation(NGramProposer(shortest=1), 3, adaptive=False))
    outputs = run(engine, "v4")
    assert sum(sum(output.drafted) for output in outputs) > sum(sum(output.accepted) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["tensor=2", "data=2,expert=4"])
def test_prediction_module_on_a_mesh(devices: str):
    """As many drafts are accepted as on one device. The vocabulary is so small that some are accepted."""
    kinds = {"layer_types": (CSA_KIND,), "mlp_layer_types": (HASH_MOE,), "num_nextn_predict_layers": 1}
    config = dataclasses.replace(V4_PRESETS["v4-tiny"], num_hidden_layers=1, vocab_size=8, **kinds)
    prompts = [[token % 8 for token in prompt] for prompt in golden("v4").prompts]

    def generate(mesh: Mesh | None) -> list[tuple[Any, ...]]:
        model = random_model(config, mesh=mesh)
        speculate = Speculation(MTPProposer(random_mtp(model)), 2, adaptive=False)
        sizes = dataclasses.replace(SIZES["v4"], page_size=16, mesh=mesh, max_model_len=MAX_LEN, speculate=speculate)
        engine = Engine(model, dataclasses.replace(sizes, decode_buckets=(4,), prefill_buckets=(32,)))
        return [(o.output_ids, o.drafted, o.accepted) for o in engine.generate(prompts, GREEDY)]

    found = generate(devices_of(devices))
    assert found == generate(None)
    assert sum(sum(accepted) for *_, accepted in found) > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["tensor=2", "data=2,expert=4"])
def test_pages_move_between_layouts(devices: str):
    """One device continues from pages of a mesh, and the mesh from pages of one device."""
    one = Engine(loaded("v4"), dataclasses.replace(SIZES["v4"], max_model_len=MAX_LEN), capture_logits=True)
    run(one, "v4")
    mesh, other = make("v4", devices), make("v4", devices)
    mesh.import_pages(CachedPages.from_bytes(one.export_prefix_cache().to_bytes()))
    cached = [output.cached_tokens for output in run(mesh, "v4")]
    assert sum(cached) > 64
    run(other, "v4")
    again = Engine(loaded("v4"), dataclasses.replace(SIZES["v4"], max_model_len=MAX_LEN), capture_logits=True)
    again.import_pages(CachedPages.from_bytes(other.export_prefix_cache().to_bytes()))
    assert sum(output.cached_tokens for output in run(again, "v4")) > 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4", "v4-published"])
def test_weight_digest_is_that_of_one_device(name: str):
    wanted = weight_digest(loaded(name))
    for devices in ("tensor=2", "data=2,expert=4", "data=4"):
        assert weight_digest(split(name, devices)) == wanted


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ("tensor=4", ValueError, "mesh: tensor: expected a divisor of o_groups=2, got 4 devices"),
        ("tensor=3", ValueError, "mesh: tensor: devices: expected a divisor of 4 query heads, got 3"),
        (
            "context=2",
            NotImplementedError,
            "mesh: context: expected 1, windows and selected entries of a deepseek_v4 cannot be split by tokens",
        ),
    ],
)
def test_unsupported_meshes_raise_before_a_weight_is_read(
    devices: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files.Checkpoint, "read", lambda *args: pytest.fail("a weight was read"))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        load_model(GOLDENS / "v4", mesh=devices_of(devices))
