"""Measure how much rounded index keys change selections and logits of the DeepSeek-V4 goldens.

    python -m scripts.tools.index_key_costs [NAME ...] [--json OUT]

Weights and all other caches are float32, and so are the queries of the indexer. Each call of `index_top_k` selects with
rounded keys instead of exact keys. Sequences, positions and the comparison of logits are those of `cache_costs`. There
is no cache of fp4 index keys: this tool rounds the keys and converts them back.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_attn import PagedIndexKeys
from pallas_attn.models.checkpoints import load_model
from pallas_attn.models.cli.command_line import check_outputs, exit_status, write_report
from pallas_attn.models.decoder import AttentionSettings, deepseek_v4
from scripts.bench.harness import device
from scripts.tools import cache_costs

GROUP = 32
"""Columns of an fp4 key that share a scale."""

LARGEST_E2M1, LARGEST_E4M3 = 6.0, 448.0
"""Largest values of e2m1 (float4_e2m1fn) and float8_e4m3fn."""

type Rounding = Callable[[Float[Array, "... D"]], Float[Array, "... D"]]
"""Function from keys to rounded keys, both in float32."""


def to_fp8(keys: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Round keys to float8_e4m3fn with one scale per key, as `write_index_keys` stores them."""
    scale = jnp.max(jnp.abs(keys), axis=-1, keepdims=True) / LARGEST_E4M3
    scale = jnp.where(scale > 0, scale, 1.0)
    return (keys / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def to_fp4(keys: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Round keys to e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) with the smallest power of two per `GROUP` columns that avoids
    overflow.

    >>> to_fp4(jnp.array([12.0, 5.1, -0.6, *[0.0] * 29]))[:3].tolist()
    [12.0, 6.0, -1.0]
    """
    groups = keys.reshape(*keys.shape[:-1], -1, GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(largest > 0, largest, LARGEST_E2M1) / LARGEST_E2M1)))
    size = jnp.abs(groups) / scale
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))  # XLA's conversion rounds twice
    return (jnp.sign(groups) * jnp.round(size / step) * step * scale).reshape(keys.shape)


def to_rotated_fp4(keys: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Round keys to fp4 after a product with a normalised Hadamard matrix, and rotate them back. Scores are those of
    rotated queries, because the matrix is orthogonal."""
    matrix = functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * (keys.shape[-1].bit_length() - 1))
    matrix = jnp.asarray(matrix / keys.shape[-1] ** 0.5, jnp.float32)
    multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    return multiply(to_fp4(multiply(keys, matrix)), matrix)


ROUNDINGS: dict[str, Rounding] = {
    "bfloat16": lambda keys: keys.astype(jnp.bfloat16).astype(jnp.float32),
    "fp8": to_fp8,
    "fp4": to_fp4,
    "fp4 after a Hadamard product": to_rotated_fp4,
}


class Selections:
    """Replacement of `index_top_k` that selects with rounded keys, and counts selected entries.

    Attributes:
      kept, selected: number of entries that both rounded and exact keys select, and that exact keys select; only of
        tokens that see more entries than they select.
    """

    def __init__(self, rounding: Rounding):
        self.rounding, self.kept, self.selected = rounding, 0, 0
        self._top_k = deepseek_v4.index_top_k

    def __call__(self, q: Array, weights: Array, index: PagedIndexKeys, *tables: Array, top_k: int, **rest: Any) -> Any:
        """Call `index_top_k` with rounded keys. Arguments and result as there."""
        select = functools.partial(self._top_k, q, weights, top_k=top_k, **rest)
        # One more entry shows which tokens see more entries than they select.
        seen = functools.partial(self._top_k, q, weights, index, *tables, **rest)(top_k=top_k + 1)
        rounded = select(PagedIndexKeys(self.rounding(index.keys)), *tables)
        jax.debug.callback(self._count, select(index, *tables), rounded, seen)
        return rounded

    def _count(self, exact: Int[Array, "T k"], rounded: Int[Array, "T k"], seen: Int[Array, "T k_plus_1"]) -> None:
        chooses = np.asarray(seen)[:, -1] >= 0
        for mine, others in zip(np.asarray(exact)[chooses], np.asarray(rounded)[chooses], strict=True):
            self.selected += mine.size
            self.kept += int(np.isin(mine, others).sum())


def compare(golden: Path) -> Iterator[dict[str, Any]]:
    """Yield the cost of each rounding for the model of a golden. The baseline has float32 keys."""
    sequences = cache_costs.sequences_of(golden)
    model = load_model(golden, jnp.float32, AttentionSettings(implementation="xla"))
    wanted = cache_costs.all_logits(model, sequences, "float32")
    for name, rounding in ROUNDINGS.items():
        with mock.patch.object(deepseek_v4, "index_top_k", Selections(rounding)) as selections:
            logits = cache_costs.all_logits(model, sequences, "float32")
            jax.effects_barrier()
        yield {
            "cached": "index keys",
            "weights": "float32",
            "cache": name,
            "positions": len(wanted),
            "deviation": float(wanted.std()),
            "selected": int(selections.selected),
            "kept": int(selections.kept),
            **dataclasses.asdict(cache_costs.cost(logits, wanted)),
        }


def main() -> int:
    """Run the command line."""
    return exit_status("index_key_costs", run)


def run() -> int:
    """Parse the command line, compare, print and write the report. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    goldens, results = (cache_costs.ROOT / folder for folder in ("tests/goldens", "benchmarks/results"))
    known = ["v4", "v4-published"]
    parser.add_argument("names", nargs="*", metavar="NAME", help="goldens; all of DeepSeek-V4 by default")
    parser.add_argument("--json", type=Path, default=results / "index_key_costs.json")
    args = parser.parse_args()
    if unknown := set(args.names) - {*known}:
        parser.error(f"NAME: expected goldens of DeepSeek-V4 ({', '.join(known)}), got {', '.join(sorted(unknown))}")
    check_outputs({"--json": args.json}, make_folders=True)
    here = device.description()
    cases = [{"model": name, **case} for name in args.names or known for case in compare(goldens / name)]
    write_report("--json", args.json, {**here, "cases": cases})
    print(json.dumps(cases, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
