"""Report of a run of run_decode.py: results and statistics, as JSON, as a table and in one line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import platform
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import pallas_attn
from pallas_attn.models.engine import Difference, EngineStats, RequestOutput, Verification


@dataclasses.dataclass(frozen=True)
class Loading:
    """Time and memory of loading a model.

    Attributes:
      seconds: time from the start of loading until all weights are on the devices.
      peak_host_bytes: peak memory of this process when loading ended. It includes weights on CPU devices.
    """

    seconds: float
    peak_host_bytes: int


def peak_host_bytes() -> int:
    """Return the peak memory of this process since its start, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of a run.

    Attributes:
      model: name of the model.
      outputs: outputs of the requests, in order.
      texts: texts of the outputs; None without a tokenizer.
      stats: statistics of the engine.
      page_size: tokens per page.
      run_s: seconds from the first step to the last. Steps are compiled before the first step.
      implementation: name of the attention implementation of each operation.
      verification: result of --verify; None without this option, if the run was interrupted, or if verification failed
        or has not run yet.
      speculate: value of --speculate; None if it is "none".
      mesh: number of devices along each axis of --mesh; None for one device.
      loading: time and memory of loading; None if they were not measured.
    """

    model: str
    outputs: Sequence[RequestOutput]
    texts: Sequence[str] | None
    stats: EngineStats
    page_size: int
    run_s: float
    implementation: Mapping[str, str]
    verification: Verification | None
    speculate: str | None = None
    mesh: Mapping[str, int] | None = None
    loading: Loading | None = None

    @property
    def title(self) -> str:
        noun = "request" if len(self.outputs) == 1 else "requests"
        return f"{len(self.outputs)} {noun} on {self.model}"

    def to_json(self) -> dict[str, Any]:
        """Return the report for --json: {"requests": [...], "run": {...}}, with times in seconds."""
        requests: list[dict[str, Any]] = [
            {
                "prompt_tokens": output.prompt_tokens,
                "cached_tokens": output.cached_tokens,
                "output_ids": output.output_ids,
                "finish_reason": output.finish_reason,
                "ttft_s": output.ttft_s,
                "itl_s": output.itl_s,
            }
            for output in self.outputs
        ]
        if self.texts is not None:
            for request, text in zip(requests, self.texts, strict=True):
                request["text"] = text
        if self.speculate is not None:
            for request, output in zip(requests, self.outputs, strict=True):
                request |= {"drafted": list(output.drafted), "accepted": list(output.accepted)}
        stats = self.stats
        run: dict[str, Any] = {
            "prefill_tokens_per_s": stats.prefill_tokens_per_s,
            "decode_tokens_per_s": stats.decode_tokens_per_s,
            "prefix_hit_rate": stats.prefix_hit_rate,
            "peak_pages": stats.peak_pages,
            "num_pages": stats.num_pages,
            "preemptions": stats.preemptions,
            "steps": stats.num_steps,
            "compilations": stats.compilations,
            "compile_s": stats.compile_s,
            "run_s": self.run_s,
            "implementation": dict(self.implementation),
            "device": device_name(),
            "versions": versions(),
        }
        if self.verification is not None:
            run["verified"] = self.verification.passed
            if (rounding := self.verification.rounding) is not None:
                run |= {"verified_loss": rounding.loss, "verified_loss_allowed": rounding.allowed}
        if self.speculate is not None:
            run |= {"speculate": self.speculate, "drafted": self.drafted, "accepted": self.accepted}
        if self.mesh is not None:
            run["mesh"] = dict(self.mesh)
        if self.loading is not None:
            run |= {"load_s": self.loading.seconds, "load_peak_host_bytes": self.loading.peak_host_bytes}
        return {"requests": requests, "run": run}

    @property
    def drafted(self) -> list[int]:
        """Entry i is the sum of `RequestOutput.drafted[i]` of all requests: how often a step verified a draft i + 1
        positions after the newest token of a request. Several drafts of one step for the same position count once."""
        return _by_position([output.drafted for output in self.outputs])

    @property
    def accepted(self) -> list[int]:
        """Entry i is the sum of `RequestOutput.accepted[i]` of all requests: how often a step accepted a draft i + 1
        positions after the newest token of a request."""
        return _by_position([output.accepted for output in self.outputs])

    def summary(self) -> str:
        """Return the most important statistics in one line."""
        stats = self.stats
        if len(self.outputs) == 1:
            decoded = answer_summary(self.outputs[0])
        else:
            tokens = sum(len(output.output_ids) for output in self.outputs)
            decoded = (
                f"{len(self.outputs)} requests, {tokens:,} tokens, decode {stats.decode_tokens_per_s:,.0f} tokens/s"
            )
        programs = "1 program" if stats.compilations == 1 else f"{stats.compilations} programs"
        loading = "" if self.loading is None else f"; loaded in {self.loading.seconds:.1f} s"
        return f"{decoded}{loading}; {programs} ready after {stats.compile_s:.1f} s"

    def print(self, console: Console) -> None:
        """Print a table of the requests, then the statistics of the run."""
        console.print(Group(self._requests_table(), self._run_table()))

    def _requests_table(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        speculates = self.speculate is not None
        of_drafts = ("drafts",) if speculates else ()
        for header in ("", "prompt", "cached", "new", *of_drafts, "TTFT", "per token", "p95"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("end", no_wrap=True)
        for i, output in enumerate(self.outputs):
            table.add_row(
                *map(str, (i, output.prompt_tokens, output.cached_tokens, len(output.output_ids))),
                *([_share(sum(output.accepted), sum(output.drafted))] if speculates else []),
                "-" if output.ttft_s is None else _ms(output.ttft_s),
                *(("-", "-") if not output.itl_s else map(_ms, np.percentile(output.itl_s, [50, 95]))),
                output.finish_reason,
            )
        return table

    def _drafts(self) -> str:
        drafted, accepted = self.drafted, self.accepted
        shares = ", ".join(_share(a, d) for a, d in zip(accepted, drafted, strict=True))
        positions = f"; by position {shares}" if len(drafted) > 1 else ""
        return f"{self.speculate}, {sum(accepted):,} of {sum(drafted):,} accepted{positions}"

    def _run_table(self) -> Table:
        stats = self.stats
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column()
        computed = sum(output.prompt_tokens - output.cached_tokens for output in self.outputs)
        again = stats.prefill_tokens - computed
        rows: dict[str, RenderableType] = {
            "prefill": f"{stats.prefill_tokens_per_s:,.0f} tokens/s ({stats.prefill_tokens:,} tokens"
            + (f", {again:,} of them again, after a preemption)" if stats.preemptions and again > 0 else ")"),
            "decode": f"{stats.decode_tokens_per_s:,.0f} tokens/s ({stats.decode_tokens:,} tokens)",
            **({} if self.speculate is None else {"drafts": self._drafts()}),
            "prefix hits": f"{stats.prefix_hit_rate:.0%} of the tokens looked up",
            "pages": f"{stats.peak_pages:,} of {stats.num_pages:,} at the peak, {self.page_size} tokens each;"
            f" {stats.cache_bytes / 2**20:,.1f} MiB in all layers",
            "preemptions": f"{stats.preemptions}",
            "run": f"{self.run_s:.2f} s, {stats.num_steps:,} steps",
            "compilation": f"{stats.compile_s:.1f} s before that, {stats.compilations} shapes of a step",
            **({} if self.loading is None else {"loading": _loading(self.loading)}),
            "attention": _by_implementation(self.implementation),
            "device": ", ".join([device_name(), *(f"{name} {version}" for name, version in versions().items())]),
        }
        if self.mesh is not None:
            rows["mesh"] = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        if self.verification is not None:
            rows["verified"] = verdict(self.verification)
        for name, value in rows.items():
            grid.add_row(name, value)
        return grid


def answer_summary(output: RequestOutput) -> str:
    """Return the statistics of one answer in one line: numbers of tokens, tokens per second after the first token, and
    time to the first token."""
    tokens = "1 token" if len(output.output_ids) == 1 else f"{len(output.output_ids):,} tokens"
    rate = f", {len(output.itl_s) / sum(output.itl_s):,.0f} tokens/s" if sum(output.itl_s) else ""
    first = "" if output.ttft_s is None else f", first token after {_ms(output.ttft_s)}"
    cached = f" ({output.cached_tokens:,} cached)" if output.cached_tokens else ""
    return f"{prompt_tokens(output.prompt_tokens)}{cached}, {tokens}{rate}{first}"


def prompt_tokens(number: int) -> str:
    return "1 prompt token" if number == 1 else f"{number:,} prompt tokens"


def _loading(loading: Loading) -> str:
    return f"{loading.seconds:.1f} s, at most {loading.peak_host_bytes / 2**30:.1f} GiB of host memory"


def _by_position(counts: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of the lists by position. Missing entries of shorter lists count as 0."""
    return [sum(of_position) for of_position in itertools.zip_longest(*counts, fillvalue=0)]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def device_name() -> str:
    """Return the name of jax's platform and of the device, such as "gpu (NVIDIA H200)"."""
    device = jax.devices()[0]
    return device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"


def versions() -> dict[str, str]:
    """Return the versions of packages that affect the results, by name."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    return {"pallas_attn": pallas_attn.__version__, **packages, "python": platform.python_version()}


def nonfinite(outputs: Sequence[RequestOutput]) -> list[str]:
    """Return an error message for each request that ended because its logits were NaN or infinite."""
    why = "logits are NaN or infinite, for example because of broken weights"
    return [
        f"request {i} ended at output position {len(output.output_ids)}: {why}"
        for i, output in enumerate(outputs)
        if output.finish_reason == "nonfinite"
    ]


def differences(verification: Verification) -> list[str]:
    """Return the error messages of a verification: one for each request that differs from the plain run (an independent
    computation, see `models.engine.verify`), one if the sum of the losses of all requests is too large, and one if too
    many tokens differ within the tolerance. The loss of a token is the amount by which its logit would have to rise for
    the plain run to choose it.
    """
    found = [(i, check.difference) for i, check in enumerate(verification.requests)]
    sentences = [_difference(i, difference) for i, difference in found if difference is not None]
    rounding = verification.rounding
    if rounding is not None and verification.lost_too_much:
        sentences.append(
            f"{verification.tied} of {verification.compared} tokens differ, with a loss of {rounding.loss:.3g} in"
            f" float32 logits; rounding explains at most {rounding.allowed:.3g}"
        )
    if verification.too_many_tied:
        sentences.append(
            f"{verification.tied} of {verification.compared} tokens differ, each within"
            f" {verification.tolerance:g} of the plain run's; this is more than near ties explain"
        )
    return sentences


def _difference(i: int, found: Difference) -> str:
    got = "the end" if found.got is None else found.got
    if not found.finite:
        return f"request {i}, output position {found.position}: got {got}, the plain run's logits are NaN or infinite"
    wanted = "the end" if found.wanted is None else found.wanted
    return f"request {i}, output position {found.position}: got {got}, wanted {wanted}, margin {found.margin:.3g}"


def verdict(verification: Verification) -> Text:
    """Return the result of --verify: "yes" and the number of equal tokens, or "NO" and the differences."""
    if not verification.passed:
        return Text("NO\n" + "\n".join(differences(verification)), style="bold red")
    rounding = verification.rounding
    if not verification.tied:
        ties = ""
    elif rounding is None:
        ties = f", {verification.tied} tied within {verification.tolerance:g}"
    else:
        ties = (
            f", {verification.tied} differ by rounding errors (loss {rounding.loss:.3g} in logits, allowed"
            f" {rounding.allowed:.3g})"
        )
    equal = f"{verification.equal} of {verification.compared} tokens equal the uncached, unchunked run's"
    return Text(f"yes: {equal}{ties}", "green")


def _by_implementation(implementation: Mapping[str, str]) -> str:
    names = dict.fromkeys(implementation.values())
    return "; ".join(
        f"{name}: {', '.join(op for op, chosen in implementation.items() if chosen == name)}" for name in names
    )


def _ms(seconds: float) -> str:
    """Return the time in milliseconds, with about three digits."""
    ms = 1e3 * seconds
    digits = 0 if ms >= 100 else 1 if ms >= 1 else 2
    return f"{ms:,.{digits}f} ms"
