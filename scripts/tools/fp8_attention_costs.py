"""Measure what each rounding of FlashMLA's dense fp8 attention changes in the golden MLA models.

    python -m scripts.tools.fp8_attention_costs [NAME ...] [--weights float32 bfloat16] [--goldens DIR] [--json OUT]

FlashMLA's dense fp8 decode kernel for Hopper (csrc/extension/sm90/dense_fp8 of vLLM's FlashMLA at 46d64a8) multiplies
operands in float8_e4m3fn: the latents and rotated keys of a token with one scale for the cache, the absorbed queries
with one scale for all heads, and softmax weights without a scale. A weight is exp(score - m), where m is the maximum of
the tiles of 64 tokens read so far, newest first. The denominator is the sum of the weights before rounding.

Sequences and measures are those of `cache_costs`. All attention has the absorbed form, in float32 except for the
rounded operands. Scales are the maxima of the baseline for the same sequences divided by 448; larger values saturate,
which only values that earlier layers changed can do. The limited precision with which Hopper's tensor cores add fp8
products is not part of this study.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_attn import PagedLatent, gather_latent, latent_cache_spec, write_latent
from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.cli.command_line import exit_status
from pallas_attn.models.decoder import AttentionSettings, Decoder, mla, pad_tokens, run_sequence, split_model
from pallas_attn.models.decoder import model as decoder
from scripts.tools import cache_costs
from scripts.tools.cache_costs import cost, sequences_of
from scripts.tools.wide_latents import save_wide

FP8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FP8).max)
TILE = 64
"""Tokens per tile of FlashMLA."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Operands of attention that are rounded to float8_e4m3fn.

    Attributes:
      keys: "token": latents with a scale per token and 128 columns, rotated keys in bfloat16, like the library's fp8
        cache. "latents": latents with one scale per layer, rotated keys in bfloat16. "all": latents and rotated keys
        with one scale per layer.
      queries: number of scales per layer: one, or one per head.
      weights: softmax weights.
    """

    keys: Literal["token", "latents", "all"] | None = None
    queries: Literal["one", "head"] | None = None
    weights: bool = False


ROUNDINGS = {
    "none": Rounding(),
    "scale per token": Rounding("token"),
    "one scale, rotated keys in bf16": Rounding("latents"),
    "one scale": Rounding("all"),
    "one scale; queries, scale per head": Rounding("all", "head"),
    "one scale; queries": Rounding("all", "one"),
    "one scale; queries; weights": Rounding("all", "one", weights=True),
    "queries only": Rounding(queries="one"),
    "weights only": Rounding(weights=True),
}
"""Roundings by name. The first is the baseline; "one scale; queries; weights" is FlashMLA's."""


class Maxima(NamedTuple):
    """Maximum magnitudes of a layer: of latents and rotated keys, and of the absorbed queries of each head."""

    keys: Float32[Array, ""]
    queries: Float32[Array, "Hq"]


def round_to_fp8(x: Float32[Array, "*shape"], largest: Float[Array, "*#shape"] | float) -> Float32[Array, "*shape"]:
    """Round to float8_e4m3fn with the scale that maps `largest` to 448. Larger values saturate."""
    scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / LARGEST
    # Without the barrier, XLA may remove a conversion and its inverse.
    return lax.optimization_barrier(jnp.clip(x / scale, -LARGEST, LARGEST).astype(FP8)).astype(jnp.float32) * scale


def rounded_keys(
    keys: Float32[Array, "n LR"], latent_dim: int, kind: str | None, largest: Float32[Array, ""]
) -> Float32[Array, "n LR"]:
    """Round latents and rotated keys; `kind` is `Rounding.keys`, `largest` their maximum magnitude."""
    if kind is None:
        return keys
    if kind == "all":
        return round_to_fp8(keys, largest)
    if kind == "latents":
        latents, rotated = keys[:, :latent_dim], keys[:, latent_dim:]
        rotated = lax.optimization_barrier(rotated.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.concatenate([round_to_fp8(latents, largest), rotated], axis=1)
    count, width = keys.shape
    spec = latent_cache_spec(
        num_pages=count // TILE, page_size=TILE, latent_dim=latent_dim, rope_dim=width - latent_dim, dtype=FP8
    )
    cache = PagedLatent.allocate(spec)
    cache = write_latent(cache, keys, jnp.arange(count, dtype=jnp.int32), implementation="xla")
    return all_latents(cache)


def all_latents(cache: PagedLatent) -> Float32[Array, "n LR"]:
    """Return the latents and rotated keys of all slots of a cache."""
    pages, page_size = cache.pages.shape[:2]
    dtype = jnp.float32 if cache.is_quantised else cache.pages.dtype
    return gather_latent(
        cache,
        jnp.zeros((0, cache.width), dtype),
        jnp.arange(pages, dtype=jnp.int32)[None],
        jnp.zeros(2, jnp.int32),
        jnp.full(1, pages * page_size, jnp.int32),
        length=pages * page_size,
        implementation="xla",
    ).astype(jnp.float32)


def softmax_weights(scores: Float32[Array, "*rows K"], *, rounded: bool) -> tuple[Float32[Array, "*rows K"], Any]:
    """Return unnormalised softmax weights, rounded as in FlashMLA or unrounded, and their sum before rounding.

    Invisible keys have scores of -inf. The last token is the newest.
    """
    count = scores.shape[-1]
    tiles = jnp.pad(scores, ((0, 0),) * (scores.ndim - 1) + ((0, -count % TILE),), constant_values=-jnp.inf)
    tiles = tiles.reshape(*scores.shape[:-1], -1, TILE)
    running = lax.cummax(tiles.max(-1), axis=tiles.ndim - 2, reverse=True)
    highest = jnp.where(running[..., :1] == -jnp.inf, 0.0, running[..., :1])
    running = jnp.where(running == -jnp.inf, highest, running)
    weights, shrink = jnp.exp(tiles - running[..., None]), jnp.exp(running - highest)[..., None]
    total = (weights * shrink).sum((-1, -2))
    if rounded:
        weights = round_to_fp8(weights, LARGEST)  # a scale of 1
    return (weights * shrink).reshape(*scores.shape[:-1], -1)[..., :count], total


def attend(
    q: Float32[Array, "T Hq LR"],
    keys: Float32[Array, "n LR"],
    slots: Int32[Array, "T K"],
    latent_dim: int,
    sm_scale: float,
    rounding: Rounding,
    maxima: Maxima,
) -> Float32[Array, "T Hq L"]:
    """Compute absorbed attention of T tokens to the keys of their slots; slots below 0 are invisible."""
    if rounding.queries:
        q = round_to_fp8(q, maxima.queries[None, :, None] if rounding.queries == "head" else maxima.queries.max())
    seen = rounded_keys(keys, latent_dim, rounding.keys, maxima.keys)[jnp.maximum(slots, 0)]
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    scores = product("thd,tkd->thk", q, seen) * sm_scale
    scores = jnp.where((slots >= 0)[:, None], scores, -jnp.inf)
    weights, total = softmax_weights(scores, rounded=rounding.weights)
    return product("thk,tkl->thl", weights, seen[..., :latent_dim]) / jnp.where(total > 0, total, 1.0)[..., None]


class LayerRecord(NamedTuple):
    """Measures of one layer in one pass: its maxima, and sums of squares of the attention output: of each rounding's
    difference from the baseline, and of the baseline."""

    maxima: Maxima
    moved: Float32[Array, "roundings"]
    size: Float32[Array, ""]


class Attention:
    """Replacement of `mla_decode` and `mla_sparse` in the layers of a model.

    Each layer computes its attention with all `ROUNDINGS` from the same inputs and continues with number `chosen`.
    """

    def __init__(self, chosen: Int32[Array, ""], maxima: Sequence[Maxima]):
        self._chosen, self._maxima = chosen, maxima
        self.records: list[LayerRecord] = []

    def decode(
        self, q_latent: Array, q_rope: Array, cache: PagedLatent, tables: Array, kv_lens: Array, **options: Any
    ) -> Array:
        """Attend to all tokens up to the own one. Each row has one query."""
        index = jnp.arange(tables.shape[1] * cache.page_size, dtype=jnp.int32)
        slots = tables[:, index // cache.page_size] * cache.page_size + (index % cache.page_size)[None]
        slots = jnp.where(index[None] < kv_lens[:, None], slots, -1)
        return self.sparse(q_latent[:, 0], q_rope[:, 0], cache, slots, sm_scale=options["sm_scale"])[:, None]

    def sparse(
        self, q_latent: Array, q_rope: Array, cache: PagedLatent, slots: Array, *, sm_scale: float, **_: Any
    ) -> Array:
        """Attend to the tokens of the given slots."""
        q = jnp.concatenate([q_latent, q_rope], axis=-1).astype(jnp.float32)
        q = jnp.where((slots >= 0).any(1)[:, None, None], q, 0.0)  # padding
        keys, latent_dim = all_latents(cache), q_latent.shape[-1]
        maxima = self._maxima[len(self.records)]
        outs = jnp.stack([attend(q, keys, slots, latent_dim, sm_scale, x, maxima) for x in ROUNDINGS.values()])
        found = Maxima(jnp.abs(keys).max(), jnp.abs(q).max((0, 2)))
        self.records.append(LayerRecord(found, ((outs - outs[:1]) ** 2).sum((1, 2, 3)), (outs[0] ** 2).sum()))
        return outs[self._chosen].astype(q_latent.dtype)


def apply_layer(graph: Any, state: Any, *arguments: Any) -> Any:
    """Apply a layer that `nnx.split` split."""
    return nnx.merge(graph, state)(*arguments)


class Study:
    """Passes of a model over the sequences of a golden."""

    def __init__(self, model: Decoder, sequences: Sequence[Sequence[int]]):
        self._step, self._weights = split_model(model)
        self._model, self._sequences = model, sequences
        heads = model.config.num_attention_heads
        one = Maxima(jnp.ones(()), jnp.ones(heads))
        self._maxima = [one] * model.config.num_hidden_layers
        self._run = jax.jit(self._pass)
        self._maxima = jax.tree.map(lambda *x: jnp.stack(x).max(0), *[[r.maxima for r in y] for _, y in self.passes(0)])

    def _pass(self, weights: Any, tokens: Array, num_tokens: Array, chosen: Array, maxima: Any) -> Any:
        attention, rows = Attention(chosen, maxima), jnp.arange(len(tokens), dtype=jnp.int32)
        # Equal layers would share a trace, and `attention` would be called once for all of them.
        traced_alone = mock.patch.object(decoder, "layer_function", return_value=apply_layer)
        with traced_alone, mock.patch.multiple(mla, mla_decode=attention.decode, mla_sparse=attention.sparse):
            logits, _ = run_sequence(
                self._step, weights, self._model.allocate_caches, tokens, num_tokens, rows, page_size=TILE
            )
        return logits, attention.records

    def passes(self, chosen: int) -> Iterator[tuple[Float[np.ndarray, "n V"], list[LayerRecord]]]:
        """Yield the logits at all positions and the records of all layers, for each sequence."""
        for sequence in self._sequences:
            logits, records = self._run(
                self._weights, pad_tokens(sequence), np.int32(len(sequence)), np.int32(chosen), self._maxima
            )
            yield np.asarray(logits)[: len(sequence)], records

    def logits(self, chosen: int) -> Float[np.ndarray, "n V"]:
        """Return the logits at all positions of all sequences, concatenated."""
        return np.concatenate([logits for logits, _ in self.passes(chosen)])

    def attention_errors(self) -> Float[np.ndarray, "roundings"]:
        """Return for each rounding the root mean square of the change of attention outputs relative to the outputs, a
        mean over layers. All roundings have the inputs of the baseline."""
        of_sequences = [records for _, records in self.passes(0)]
        of_layers = [jax.tree.map(lambda *x: np.sum(x, axis=0), *layer) for layer in zip(*of_sequences, strict=True)]
        return np.mean([np.sqrt(layer.moved / layer.size) for layer in of_layers], axis=0)


def load_study(golden: Path, weights: str) -> Study:
    """Load the model of a golden, with latents of 128 columns."""
    settings = AttentionSettings(mla="absorb", implementation="xla")
    with tempfile.TemporaryDirectory() as directory:
        save_wide(golden, Path(directory))
        model = load_model(Path(directory), jnp.dtype(weights), settings)
    return Study(model, sequences_of(golden))


def compare(golden: Path, weights: str) -> Iterator[dict[str, Any]]:
    """Yield the cost of each rounding for the model of a golden."""
    study = load_study(golden, weights)
    wanted, errors = study.logits(0), study.attention_errors()
    for i, name in enumerate(ROUNDINGS):
        if i:
            yield {
                "weights": weights,
                "rounding": name,
                "positions": len(wanted),
                "deviation": float(wanted.std()),
                "attention_error": float(errors[i]),
                **dataclasses.asdict(cost(study.logits(i), wanted)),
            }


CONTEXTS, SPREADS = (128, 1024, 8192, 65536), (1.0, 2.0, 3.0)


def lost_weights() -> Iterator[dict[str, Any]]:
    """Yield the share of the softmax that rounding changes to 0, for normally distributed scores.

    The goldens have short sequences. In long ones, more of the softmax is in weights below 2**-10, which round to 0.
    """
    for context in CONTEXTS:
        normal = np.random.default_rng(0).standard_normal((64, context), np.float32)
        for spread in SPREADS:
            scores = jnp.asarray(normal * np.float32(spread))
            (exact, total), (rounded, _) = (softmax_weights(scores, rounded=x) for x in (False, True))
            lost = jnp.where(rounded == 0, exact, 0.0).sum(-1) / total
            yield {"context": context, "spread": spread, "lost": float(lost.mean())}


def report(goldens: Path, names: Sequence[str], weights: Sequence[str]) -> dict[str, Any]:
    """Compare and print all cases. Return the report."""

    def describe(case: dict[str, Any]) -> str:
        return f"{case['rounding']:<35} attention {case['attention_error']:.2g},"

    costs = cache_costs.report(goldens, names, weights, compare, describe)
    return {**costs, "lost_weights": list(lost_weights())}


def latent_goldens(goldens: Path) -> list[str]:
    """Return the names of the goldens with multi-head latent attention."""
    configs = {path.parent.name: path.parent / "config.json" for path in goldens.glob("*/golden.npz")}
    return sorted(name for name, path in configs.items() if "kv_lora_rank" in json.loads(path.read_text()))


def main() -> int:
    """Run the command line."""
    return exit_status("fp8_attention_costs", run)


def run() -> int:
    """Run the tool. Return the exit status."""
    kind = "golden with latent attention"
    return cache_costs.compare_goldens("fp8_attention_costs", __doc__, latent_goldens, report, kind)


if __name__ == "__main__":
    sys.exit(main())
