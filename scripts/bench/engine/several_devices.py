"""Measure the engine on several devices.

A layout is a mesh: the number of devices along each axis. There are three measurements:

- Engine (`run`). Prefill and decode speed of requests that arrive at once, as in scripts/bench/engine/serving.py, for
each layout. A new model with random weights is made for each layout.
- Exchanges (`exchanges`). The time of an all-reduce and of an all-to-all among all devices, by number of bytes.
- Operation (`decode_over_contexts`). `mla_decode` with 128 heads on one device, and with the tokens of each context
split over several devices, by batch and context length.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn import PagedLatent, mla_decode, parallel, plan_decode
from pallas_attn.models.config import GQA_PRESETS, PRESETS, ModelConfig
from pallas_attn.models.decoder import AttentionSettings, make_mesh
from pallas_attn.models.decoder.mesh import DATA
from pallas_attn.models.engine import Engine, Processes
from scripts.bench.engine.random_model import random_model
from scripts.bench.engine.serving import Serving, generate, summary
from scripts.bench.harness.timing import SERIAL, Stopwatch
from scripts.bench.shapes import DEEPSEEK_V3

CONFIGS: dict[str, ModelConfig] = {
    "v3-tiny": PRESETS["v3-tiny"],
    "qwen3-tiny": GQA_PRESETS["qwen3-tiny"],
    "v2-lite": PRESETS["v2-lite"],
    "llama-8b": dataclasses.replace(
        GQA_PRESETS["qwen3-tiny"],
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=5e5,
        max_position_embeddings=131072,
        dtype="bfloat16",
    ),
    "v3-2-layers": DEEPSEEK_V3,
    "v3-3-layers": dataclasses.replace(DEEPSEEK_V3, num_hidden_layers=3),
}
"""Configurations by name: tiny ones for tests, DeepSeek-V2-Lite, a model of Llama-3-8B's sizes, and models of
DeepSeek-V3's widths with one dense layer and one or two expert layers (28 and 51 GB of weights).
"""

type Layout = Mapping[str, int]
"""Devices along each axis of a mesh; empty for one device without a mesh."""


@dataclasses.dataclass(frozen=True)
class MeshWork:
    """Measured model, layouts and requests. A data rank is a group of devices that serves its own requests.

    Attributes:
      config: name of a configuration in `CONFIGS`.
      layouts: meshes, in order.
      batches: numbers of requests that arrive at once.
        contexts: tokens per prompt.
        new_tokens: output tokens of the last request.
        per_device: whether `batches` are per device, instead of totals of all devices.
      max_batched_tokens: maximum new tokens of a step on each data rank.
      page_size: tokens per page.
      most_tokens: maximum total prompt tokens of a case on a data rank; larger cases are skipped. None for no limit.
    """

    config: str
    layouts: tuple[Layout, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    new_tokens: int
    per_device: bool = False
    max_batched_tokens: int = 4096
    page_size: int = 64
    most_tokens: int | None = None

    def serving(self, mesh: Mesh | None) -> Serving:
        """Return the workload of each data rank of a mesh; None is one device without a mesh."""
        devices, ranks = (1, 1) if mesh is None else (mesh.size, mesh.shape[DATA])
        total = [batch * devices if self.per_device else batch for batch in self.batches]
        of_rank = tuple(sorted({-(-batch // ranks) for batch in total}))
        return Serving(
            of_rank,
            self.contexts,
            self.new_tokens,
            limit_seconds=float("inf"),
            page_size=self.page_size,
            max_batched_tokens=self.max_batched_tokens,
            most_tokens=self.most_tokens,
        )


def run(
    work: MeshWork, settings: AttentionSettings, dtype: str, processes: Processes | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the result of each layout after its compilation and after each case. With several processes, every process
    runs this function.
    """
    for layout in work.layouts:
        mesh = make_mesh(layout) if layout else None
        result: dict[str, Any] = {"mesh": dict(layout), "devices": 1 if mesh is None else mesh.size, "cases": []}
        began = time.perf_counter()
        model = jax.block_until_ready(random_model(CONFIGS[work.config], dtype, settings, mesh=mesh))
        made = time.perf_counter()
        serving = work.serving(model.mesh)
        engine = Engine(model, dataclasses.replace(serving.engine_config(), mesh=model.mesh), processes=processes)
        engine.warmup()
        ranks = 1 if model.mesh is None else model.mesh.shape[DATA]
        generate(engine, [[1, 2, 3]] * ranks, [3] * ranks)
        stats = engine.stats()
        result |= {"made_s": made - began, "compile_s": stats.compile_s, "cache_bytes": stats.cache_bytes}
        yield result
        for batch, context in serving.cases:
            prompts = np.random.default_rng(batch).integers(0, model.config.vocab_size, (batch * ranks, context))
            result["cases"].append(measure(engine, serving, prompts.tolist(), ranks))
            yield result
        del engine, model
        gc.collect()  # the next model needs the memory


def measure(engine: Engine, serving: Serving, prompts: list[list[int]], ranks: int) -> dict[str, Any]:
    """Measure prompts of equal lengths. Prompt i is computed by data rank i % `ranks`."""
    batch, context = len(prompts), len(prompts[0])
    new_tokens = [tokens for tokens in serving.tokens_each(batch // ranks, context) for _ in range(ranks)]
    outputs, steps = generate(engine, prompts, new_tokens)
    prefill_s = sum(step.duration_s for step in steps if step.prefill_tokens)
    decodes = [step.duration_s for step in steps if not step.prefill_tokens and step.decode_tokens == batch]
    return {
        "batch": batch,
        "context": context,
        "prefill_tokens_per_s": batch * context / prefill_s,
        "decode_tokens_per_s": batch / statistics.median(decodes),
        "ttft_s": summary([output.ttft_s for output in outputs if output.ttft_s is not None]),
        "between_tokens_s": summary(decodes),
    }


def line(result: dict[str, Any]) -> str:
    """Format the newest result of a layout as one line."""
    name = ",".join(f"{axis}={size}" for axis, size in result["mesh"].items()) or "one device"
    if not result["cases"]:
        return f"{name}: made in {result['made_s']:.1f} s, compiled in {result['compile_s']:.1f} s"
    case = result["cases"][-1]
    prefill, decode = (case[f"{kind}_tokens_per_s"] for kind in ("prefill", "decode"))
    return (
        f"{name}, batch {case['batch']}, context {case['context']}: prefill {prefill:,.0f} tokens/s,"
        f" decode {decode:,.0f} tokens/s ({decode / result['devices']:,.0f} a device)"
    )


# --- exchanges


ROWS = (1, 8, 64, 512, 4096)
"""Numbers of rows per device for which the exchanges of [rows, 2048] arrays are measured."""


def exchanges(stopwatch: Stopwatch, num_calls: int = 32) -> list[dict[str, Any]]:
    """Time all-reduce and all-to-all among all devices, in chains of `num_calls` dependent exchanges.

    Each result has the bytes per device and two times per exchange in microseconds. `us` is wall time and may include
    waiting for the host to launch. `device_us` excludes it: `PRODUCTS` GEMMs before the chain occupy the devices while
    the host launches the chain, and the time of the GEMMs alone is subtracted.
    """
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("all",), axis_types=(AxisType.Auto,))
    width = 8192 if jax.default_backend() == "gpu" else 128
    factor = jnp.full((width, width), 1 / width, jnp.bfloat16, device=NamedSharding(mesh, P()))

    def seconds(rows: int, exchange: Callable[..., jax.Array], calls: int, products: int) -> float:
        def chain(x: jax.Array, factor: jax.Array) -> jax.Array:
            product = factor
            for _ in range(products):
                product = product @ factor
            x = x + jnp.bfloat16(0) * product[0, 0] if products else x
            for _ in range(calls):
                x = exchange(x) * jnp.bfloat16(0.5)
            return x

        x = jnp.ones((rows * devices, 2048), jnp.bfloat16, device=NamedSharding(mesh, P("all")))
        split = jax.shard_map(chain, mesh=mesh, in_specs=(P("all"), P()), out_specs=P("all"), check_vma=False)
        run = jax.jit(split, donate_argnums=0, compiler_options=serial())
        return _time(lambda x: run(x, factor), x, stopwatch)

    found = []
    for rows in ROWS:
        for name, exchange in EXCHANGES.items():
            alone = seconds(rows, exchange, num_calls, 0)
            behind = seconds(rows, exchange, num_calls, PRODUCTS) - seconds(rows, exchange, 0, PRODUCTS)
            times = {"us": 1e6 * alone / num_calls, "device_us": 1e6 * behind / num_calls}
            found.append({"exchange": name, "rows": rows, "bytes": rows * 4096} | times)
    return found


PRODUCTS = 3
"""Number of GEMMs before a chain, about 1.6 ms each on an H100. The host launches the chain during this time."""


def _all_to_all(x: jax.Array) -> jax.Array:
    devices = lax.axis_size("all")
    padded = jnp.pad(x, ((0, -x.shape[0] % devices), (0, 0)))
    return lax.all_to_all(padded, "all", 0, 0, tiled=True)[: x.shape[0]]


EXCHANGES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda x: lax.psum(x, "all"),
    "all-to-all": _all_to_all,
}
"""Exchanges by name, as functions of bfloat16 [rows, 2048] per device."""


def serial() -> dict[str, str]:
    """Return compiler options with which a GPU runs the kernels of a program one after another."""
    return SERIAL if jax.default_backend() == "gpu" else {}


def _time(run: Callable[[Any], Any], given: Any, stopwatch: Stopwatch) -> float:
    """Return the median seconds of a program whose result is the argument of its next run."""
    held = [given]

    def repeat(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            held[0] = run(held[0])
            if jax.default_backend() == "cpu":
                jax.block_until_ready(held[0])  # CPU devices share threads: several pending runs can deadlock
        jax.block_until_ready(held[0])
        return time.perf_counter() - began

    samples, _ = stopwatch.take(repeat)
    return statistics.median(samples)


# --- the operation


@dataclasses.dataclass(frozen=True)
class SplitDecode:
    """Sizes of a measurement of `mla_decode` with the tokens of each context split over devices.

    Attributes:
      batch, context, heads, page_size: sizes of the call.
      calls: calls in a chain. The queries of a call depend on the output of the previous call.
    """

    batch: int = 64
    context: int = 32768
    heads: int = 128
    page_size: int = 64
    calls: int = 16

    def check(self, devices: int) -> None:
        """Raise ValueError if the pages or the heads do not divide evenly among `devices` devices."""
        if self.context % (self.page_size * devices):
            raise ValueError(
                f"context: expected a multiple of {self.page_size} tokens per page x {devices} devices,"
                f" got {self.context}"
            )
        if self.heads % devices:
            raise ValueError(f"heads: expected a multiple of {devices} devices, got {self.heads}")


SPLIT_DECODES = (SplitDecode(64, 2**15), SplitDecode(16, 2**17), SplitDecode(2, 2**20))
"""Contexts of 32k, 128k and 1M tokens with 2.4 GB of latents."""


def decode_over_contexts(work: SplitDecode, stopwatch: Stopwatch) -> Iterator[dict[str, Any]]:
    """Time `mla_decode` on one device, and with the pages of each context distributed over 2, 4, ... and all
    devices.
    """
    columns = work.context // work.page_size
    table = np.random.default_rng(0).permutation(work.batch * columns).astype(np.int32).reshape(work.batch, columns)
    for devices in sorted({2**i for i in range(jax.device_count().bit_length())} | {jax.device_count()}):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("context",), axis_types=(AxisType.Auto,))
        # Page j of a sequence is on device j % devices. `ids` has the index of each page among the pages of its device.
        order = np.arange(columns) % devices
        ids = np.empty_like(table)
        each = work.batch * columns // devices
        for device in range(devices):
            own = table[:, order == device]
            ids[:, order == device] = device * each + np.argsort(np.argsort(own.ravel())).reshape(own.shape)
        seconds = _decode_seconds(work, mesh, jnp.asarray(ids), stopwatch)
        yield dataclasses.asdict(work) | {"devices": devices, "us": 1e6 * seconds}


def _decode_seconds(work: SplitDecode, mesh: Mesh, table: jax.Array, stopwatch: Stopwatch) -> float:
    devices, dtype, pages = mesh.size, jnp.bfloat16, P("context")
    shape = (table.size, work.page_size, 576)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, pages))
    def cache() -> jax.Array:
        return jax.random.normal(jax.random.key(0, impl="rbg"), shape, dtype)

    lens = jnp.full(work.batch, work.context, jnp.int32)
    q = jax.random.normal(jax.random.key(1), (work.batch, 1, work.heads, 576), dtype)

    def chain(q: jax.Array, latents: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
        latent = PagedLatent(latents)
        q_latent, q_rope = q[..., :512], q[..., 512:]
        part = parallel.context_part(table, lens, latent, axis="context")
        plan = plan_decode((q_latent, q_rope), latent, part.block_tables, part.kv_lens)
        for _ in range(work.calls):
            out, _ = parallel.decode_over_contexts(
                mla_decode, [q_latent, q_rope], latent, table, lens, axis="context", sm_scale=192**-0.5, plan=plan
            )
            # Add 0 * output to the queries of this device's heads, so that the next call depends on this call.
            first = lax.axis_index("context") * (work.heads // devices)
            own = lax.dynamic_slice_in_dim(q_latent, first, work.heads // devices, axis=2)
            q_latent = lax.dynamic_update_slice_in_dim(q_latent, own + 0 * out, first, axis=2)
        return jnp.concatenate([q_latent, q_rope], axis=-1)

    split = jax.shard_map(chain, mesh=mesh, in_specs=(P(), pages, P(), P()), out_specs=P(), check_vma=False)
    latents, run = cache(), jax.jit(split, donate_argnums=0, compiler_options=serial())
    given = jax.device_put(q, NamedSharding(mesh, P()))
    return _time(lambda q: run(q, latents, table, lens), given, stopwatch) / work.calls
