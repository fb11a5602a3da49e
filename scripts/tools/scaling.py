"""Estimate the communication of a decode step on many GPUs from latencies and bandwidths.

`python -m scripts.tools.scaling` prints the table of docs/scaling.md; its options set the latencies and bandwidths.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

HOST = 8
"""Number of GPUs of a host. NVLink connects each pair."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Latencies and bandwidths of collective operations between GPUs.

    Attributes:
      host_us, network_us: microseconds of a collective operation without data, within a host and over several hosts.
      host_gb_s, network_gb_s: GB/s of a GPU in each direction, to GPUs of its host and to other hosts.
    """

    host_us: float = 24
    network_us: float = 30
    host_gb_s: float = 270
    network_gb_s: float = 50

    def latency_us(self, gpus: int) -> float:
        return self.host_us if gpus <= HOST else self.network_us

    def all_reduce(self, num_bytes: float, gpus: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in an all-reduce of `num_bytes`, and its microseconds. The data is reduced
        within each host first, then between hosts.
        """
        inside, hosts = min(gpus, HOST), -(-gpus // HOST)
        near = 2 * (inside - 1) / inside * num_bytes
        far = 2 * (hosts - 1) / hosts * num_bytes / inside
        us = self.latency_us(gpus) + near / self.host_gb_s / 1e3 + far / self.network_gb_s / 1e3
        return near + far, us

    def all_to_all(self, num_bytes: float, gpus: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in an all-to-all, and its microseconds. Each GPU sends an equal share of
        its `num_bytes` to each GPU. Links within the host and to other hosts work at the same time.
        """
        near, far = (num_bytes * count / gpus for count in (min(gpus, HOST) - 1, max(gpus - HOST, 0)))
        us = max(near / self.host_gb_s, far / self.network_gb_s) / 1e3
        return near + far, self.latency_us(gpus) + us

    def gather(self, num_bytes: float, gpus: int) -> tuple[float, float]:
        """Return the bytes that a GPU receives in an all-gather of `num_bytes` per GPU, and its microseconds.

        Each GPU first receives the data of the GPUs at its place on the other hosts. The GPUs of a host then exchange
        all received data. A reduce-scatter takes the same time.
        """
        inside, hosts = min(gpus, HOST), -(-gpus // HOST)
        near, far = (inside - 1) * hosts * num_bytes, (hosts - 1) * num_bytes
        us = self.latency_us(gpus) + near / self.host_gb_s / 1e3 + far / self.network_gb_s / 1e3
        return near + far, us

    def among_hosts(self, num_bytes: float, hosts: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in an all-to-all among one GPU of each host, and its microseconds. Each GPU
        sends an equal share of its `num_bytes` to each of these GPUs.
        """
        sent = num_bytes * (hosts - 1) / hosts
        return sent, self.network_us + sent / self.network_gb_s / 1e3


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a bfloat16 model that determine communication and memory.

    Attributes:
      hidden: hidden size.
      heads: number of query heads.
      layers, moe_layers: number of all layers, and of mixture-of-experts layers.
      top_k: number of routed experts per token.
      expert_gb, other_gb: gigabytes of routed experts, and of all other weights.
    """

    hidden: int
    heads: int
    layers: int
    moe_layers: int
    top_k: int
    expert_gb: float
    other_gb: float


MODELS = {
    "DeepSeek-V2-Lite": Shape(2048, 16, 27, 26, 6, 2 * 26 * 64 * 3 * 2048 * 1408 / 1e9, 2.6),
    "DeepSeek-V3": Shape(7168, 128, 61, 58, 8, 2 * 58 * 256 * 3 * 7168 * 2048 / 1e9, 34),
}


@dataclasses.dataclass(frozen=True)
class StepTraffic:
    """Communication of a decode step, and memory of the weights.

    Attributes:
      sent_mb: megabytes that each GPU sends.
      ms: milliseconds of communication, without overlap with computation.
      weights_gb: gigabytes of weights per GPU.
    """

    sent_mb: float
    ms: float
    weights_gb: float


def tensor_step(model: Shape, rows: int, gpus: int, links: Links) -> StepTraffic:
    """Return the traffic of the layouts `tensor=N` and `expert=N`. Every GPU has the tokens of all `rows` * N requests,
    and each layer has two all-reduces over all GPUs.
    """
    sent, us = links.all_reduce(2 * model.hidden * rows * gpus, gpus)
    sums = 2 * model.layers
    return StepTraffic(sums * sent / 1e6, sums * us / 1e3, (model.expert_gb + model.other_gb) / gpus)


def data_step(model: Shape, rows: int, gpus: int, links: Links) -> StepTraffic:
    """Return the traffic of the layout `data=N`. A row is the token of one request; every GPU has `rows` of them.

    Each mixture-of-experts layer has an all-gather of all rows and a reduce-scatter of the results. If N exceeds twice
    `top_k`, it has three all-to-alls instead: of row counts, of rows to the GPUs of their experts, and of results.
    """
    if gpus <= 2 * model.top_k:
        sent, us = links.gather(2 * model.hidden * rows, gpus)
        us = 2 * us
    else:
        sent, us = links.all_to_all(2 * model.hidden * rows * model.top_k, gpus)
        us = links.latency_us(gpus) + 2 * us
    layers = model.moe_layers
    return StepTraffic(2 * layers * sent / 1e6, layers * us / 1e3, model.expert_gb / gpus + model.other_gb)


def host_step(model: Shape, rows: int, gpus: int, links: Links) -> StepTraffic:
    """Return the traffic of the layout `data=N/8,expert=N`. All GPUs of a host have the same rows. Each layer has
    all-reduces within the host, as in `tensor_step`. Each mixture-of-experts layer also has the exchange of `data_step`
    between hosts.
    """
    hosts = gpus // HOST
    of_sums, layers = tensor_step(model, rows, HOST, links), model.moe_layers
    if gpus <= 2 * model.top_k:
        sent = (hosts - 1) * HOST * 2 * model.hidden * rows
        us = 2 * (links.network_us + sent / links.network_gb_s / 1e3)
    else:
        sent, us = links.among_hosts(2 * model.hidden * rows * model.top_k, hosts)
        us = links.network_us + 2 * us
    weights = model.expert_gb / gpus + model.other_gb / HOST
    return StepTraffic(of_sums.sent_mb + 2 * layers * sent / 1e6, of_sums.ms + layers * us / 1e3, weights)


def table(links: Links = Links(), rows: int = 64) -> str:
    """Return a Markdown table for 8, 16 and 64 GPUs, with `rows` decoding requests per GPU. Layouts that would split
    the heads unevenly are left out.
    """
    lines = [
        "| model | GPUs | layout | sent by each, MB | time, ms | weights on each, GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for gpus in (8, 16, 64):
            layouts = {f"`data={gpus}`": data_step}
            if model.heads % gpus == 0:
                layouts = {f"`expert={gpus}` or `tensor={gpus}`": tensor_step} | layouts
            if gpus > HOST:
                layouts[f"`data={gpus // HOST},expert={gpus}`"] = host_step
            for layout, step_of in layouts.items():
                step = step_of(model, rows, gpus, links)
                lines.append(
                    f"| {name} | {gpus} | {layout} | {step.sent_mb:,.0f} | {step.ms:.1f} | {step.weights_gb:.1f} |"
                )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    given = (
        ("--host-us", "latency within a host"),
        ("--network-us", "latency over several hosts"),
        ("--host-gb-s", "bandwidth of a GPU within its host, in each direction"),
        ("--network-gb-s", "bandwidth of a GPU to other hosts, in each direction"),
    )
    for (flag, meaning), field in zip(given, dataclasses.fields(Links), strict=True):
        parser.add_argument(flag, type=float, default=field.default, help=f"{meaning} (default: {field.default})")
    parser.add_argument("--rows", type=int, default=64, help="rows of a decode step per GPU (default: 64)")
    options = vars(parser.parse_args(argv))
    rows = options.pop("rows")
    print(table(Links(**options), rows))


if __name__ == "__main__":
    main()
