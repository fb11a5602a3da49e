"""Decode a batch of prompts with the engine and report results and statistics: `python scripts/run_decode.py
--help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from pallas_attn.models.checkpoints import Tokenizer, TokenizerError, load_kv_scales, load_tokenizer
from pallas_attn.models.cli.command_line import (
    FAILED,
    Failure,
    Failures,
    StandardOutput,
    UsageError,
    as_failure,
    as_usage_error,
    exit_status,
    write_report,
    writing,
)
from pallas_attn.models.cli.decode.options import PROG, parse_options
from pallas_attn.models.cli.decode.plot import plot_run
from pallas_attn.models.cli.decode.progress import Display
from pallas_attn.models.cli.decode.report import (
    Loading,
    Report,
    device_name,
    differences,
    nonfinite,
    peak_host_bytes,
    versions,
)
from pallas_attn.models.cli.mesh import mesh_of
from pallas_attn.models.cli.model import dtype_of, implementations, load, name_of, read_config
from pallas_attn.models.cli.output_files import is_replaced
from pallas_attn.models.cli.processes import Joined, writes
from pallas_attn.models.cli.prompts import demo_ids, demo_texts, encode_texts, read_prompts
from pallas_attn.models.cli.speculate import announce_module, make_speculation
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import AttentionSettings, Decoder, KVScales, StepSizes, device_part
from pallas_attn.models.engine import (
    CachedPages,
    Decoded,
    Engine,
    EngineConfig,
    ProcessError,
    Processes,
    RequestOutput,
    Verification,
)
from pallas_attn.models.engine.verify import verify

DIFFERENT = 1
"""Exit status if --verify found a difference."""


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the command line and return its exit status.

    Args:
      argv: arguments of the command; None for the arguments of the process.
      prog: name of the command in its help and errors.
    """
    joined = Joined(prog)
    return joined.end(exit_status(prog, lambda: _join(parse_options(argv, prog), joined)))


def _join(options: argparse.Namespace, joined: Joined) -> int:
    with joined.processes(options) as processes:
        return run(options, processes)


def run(options: argparse.Namespace, processes: Processes | None = None) -> int:
    """Decode the prompts, verify the tokens if requested, and report. Return the exit status.

    With several processes, all processes decode and verify, and process 0 reports.

    Raises:
      UsageError: wrong options, or a wrong input file.
      Failure: decoding fails, results cannot be written or printed, or verification cannot be completed. All other
        results, and the tokens decoded before the failure, are written and printed.
    """
    display = Display(shown=sys.stderr.isatty() and not options.no_progress and writes(processes))
    with as_usage_error(RuntimeError, AssertionError, prefix="jax finds no device; check JAX_PLATFORMS. "):
        device_name()
    with as_usage_error(ValueError, NotImplementedError, OSError):
        config = announce_module(options, read_config(options))
        if options.index_topk is not None and not config.is_sparse:
            raise UsageError(f"--index-topk: a {config.model_type} attends to all keys")
        tokenizer = None if options.model is None else load_tokenizer(options.model)
        prompts = _prompts(options, config, tokenizer)
        mesh = mesh_of(options.mesh)
        sizes = dataclasses.replace(_engine_config(options, config, prompts), mesh=mesh)
        implementation = implementations(
            device_part(config, mesh),
            _settings(options),
            _largest_step(options, sizes, config),
            dtype_of(options, config),
        )
        with display.doing("loading the model"):
            began = time.perf_counter()
            model = load(options, config, _settings(options), mesh)
            loading = Loading(time.perf_counter() - began, peak_host_bytes())
            sizes = dataclasses.replace(sizes, speculate=make_speculation(options, model))
    engine = _engine(options, model, sizes, prompts, display, processes)
    run_s, stopped = _drive(options, engine, len(prompts), display)
    outputs = [engine.output(i) for i in range(len(prompts))]
    failures = Failures()
    report = Report(
        model=name_of(options),
        outputs=outputs,
        texts=_texts(tokenizer, outputs, failures),
        stats=engine.stats(),
        page_size=options.page_size,
        run_s=run_s,
        implementation=implementation,
        verification=None,
        speculate=None if options.speculate is None else str(options.speculate),
        mesh=options.mesh,
        loading=loading,
    )
    check = functools.partial(_verify, options, model, engine, prompts, outputs)
    if writes(processes):
        return _finish(options, engine, report, stopped, failures, check, display)
    if stopped is not None:
        raise stopped
    return _status(dataclasses.replace(report, verification=check()) if options.verify else report)


def _finish(
    options: argparse.Namespace,
    engine: Engine,
    report: Report,
    stopped: BaseException | None,
    failures: Failures,
    check: Callable[[], Verification],
    display: Display,
) -> int:
    """Write the results, verify and print. Return the exit status.

    Args:
      options: the options.
      engine: the engine, after the run.
      report: the report without verification.
      stopped: exception that interrupted the run; None for a complete run.
      failures: failures of earlier parts of the report; failures of this function are added.
      check: function that compares the tokens with an independent computation (`_verify`).
      display: shows progress.

    Raises:
      Failure: `stopped` is a Failure, or a part of the report failed.
      BaseException: `stopped`, after the results have been written.
    """
    # Every part of the report is written even if other parts fail. Printing is last, because it fails if the reader of
    # a pipe is gone.
    try:
        try:
            _write_files(options, report, engine, failures)
            if options.verify and stopped is None:
                if options.json is not None and is_replaced(options.json):  # a pipe would get two reports
                    # Verification may take long or be killed. After verification, the report is written again.
                    with contextlib.suppress(Failure):
                        write_report("--json", options.json, report.to_json())
                with failures.recording(), display.doing("verifying"):
                    report = dataclasses.replace(report, verification=check())
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
        finally:
            with failures.recording():
                if options.json is not None:
                    write_report("--json", options.json, report.to_json())
    finally:
        with failures.recording():
            report.print(StandardOutput())
    status = _status(report)
    _print_errors(options.prog, report)
    if isinstance(stopped, Failure):
        failures.messages.insert(0, str(stopped))
    failures.check()
    if stopped is not None:
        raise stopped
    return status


def _texts(tokenizer: Tokenizer | None, outputs: Sequence[RequestOutput], failures: Failures) -> Sequence[str] | None:
    """Return the texts of the outputs; None without a tokenizer, or if the tokenizer fails, which is recorded."""
    with failures.recording(), as_failure(TokenizerError):
        return None if tokenizer is None else [tokenizer.decode(output.output_ids) for output in outputs]


def _prompts(options: argparse.Namespace, config: ModelConfig, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the prompts of the options as token ids, or the prompts of the demonstration."""
    given = read_prompts(options, tokenizer)
    if given is not None:
        return given
    if tokenizer is None:
        return demo_ids(config.vocab_size, options.page_size)
    return encode_texts(demo_texts(), tokenizer)


def _engine_config(options: argparse.Namespace, config: ModelConfig, prompts: Sequence[Sequence[int]]) -> EngineConfig:
    """Return the engine configuration. Sizes that are not given as options are derived from the prompts and other
    sizes. All sizes are per data rank: a group of devices with its own requests.

    With --batch-invariant, sizes that affect the bits of the results do not depend on the prompts.
    """
    of_rank = -(-len(prompts) // (options.mesh or {}).get("data", 1))  # maximum number of requests per data rank
    lengths = sorted(len(prompt) for prompt in prompts)[-of_rank:]
    num_seqs, num_tokens, num_pages = options.max_num_seqs, options.max_batched_tokens, options.num_pages
    if num_seqs is None:
        num_seqs = options.decode_buckets[-1] if options.decode_buckets else min(4, num_tokens or 4)
    if num_tokens is None:
        whole = 0 if options.chunked_prefill else lengths[-1]
        num_tokens = options.prefill_buckets[-1] if options.prefill_buckets else max(64, num_seqs, whole)
    if num_pages is None:
        longest = config.max_position_embeddings if options.max_model_len is None else options.max_model_len
        most = [min(length + options.max_tokens, longest) for length in lengths[-num_seqs:]]
        num_pages = sum(-(-length // options.page_size) for length in most)
    sizes = EngineConfig(
        num_pages=num_pages,
        page_size=options.page_size,
        max_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        max_prefill_seqs=options.max_prefill_seqs,
        max_model_len=options.max_model_len,
        chunked_prefill=options.chunked_prefill,
        prefix_caching=options.prefix_caching,
        recycling=options.recycling,
        cache_dtype=options.kv_dtype,
        kv_scales=None if options.kv_scales is None else _kv_scales(options.kv_scales),
        decode_buckets=options.decode_buckets,
        prefill_buckets=options.prefill_buckets,
        batch_invariant=options.batch_invariant,
        history=None,
    )
    if options.batch_invariant:
        return sizes
    # Limit the sizes to the number of requests and tokens of the batch. Larger buckets (padded sizes of compiled steps)
    # would never be used, but take time to compile.
    if options.decode_buckets is None:
        num_seqs = min(num_seqs, of_rank)
        sizes = dataclasses.replace(sizes, max_num_seqs=num_seqs, decode_buckets=_buckets(num_seqs))
    if options.prefill_buckets is None:
        num_tokens = max(sizes.max_num_seqs, min(num_tokens, sum(lengths) + of_rank * options.max_tokens))
        sizes = dataclasses.replace(sizes, max_batched_tokens=num_tokens, prefill_buckets=_buckets(num_tokens))
    return sizes


def _largest_step(options: argparse.Namespace, sizes: EngineConfig, config: ModelConfig) -> StepSizes:
    """Return the sizes of the cache and of the largest step on one device."""
    largest = sizes.runner_config(sizes.max_model_len or config.max_position_embeddings).largest_step
    if options.speculate is not None:
        largest = dataclasses.replace(largest, decode_queries=1 + options.speculate.num_drafts)
    part = device_part(config, sizes.mesh)
    contexts = 1 if sizes.mesh is None else sizes.mesh.shape["context"]
    kv_scales = largest.kv_scales and largest.kv_scales.of_part(part)
    return dataclasses.replace(largest, kv_scales=kv_scales, page_size=max(largest.page_size // contexts, 1))


def _kv_scales(path: Path) -> KVScales:
    """Read the file of --kv-scales. Raise UsageError if this is not possible."""
    with (
        as_usage_error(OSError, prefix=f"--kv-scales: cannot read {path}: "),
        as_usage_error(ValueError, prefix="--kv-scales: "),
    ):
        return load_kv_scales(path)


def _buckets(size: int) -> tuple[int, ...] | None:
    """Return the buckets (padded sizes of compiled steps) up to `size`: only `size` if it is at most 64, because
    padding then takes less time than compiling several buckets; otherwise None, the engine's default."""
    return (size,) if size <= 64 else None


def _settings(options: argparse.Namespace) -> AttentionSettings:
    """Return the attention settings of the options."""
    return AttentionSettings(
        mla=options.mla,
        implementation=options.implementation,
        index_topk=options.index_topk,
        batch_invariant=options.batch_invariant,
    )


def _engine(
    options: argparse.Namespace,
    model: Decoder,
    sizes: EngineConfig,
    prompts: Sequence[Sequence[int]],
    display: Display,
    processes: Processes | None,
) -> Engine:
    """Return an engine whose steps are compiled, with the prompts as requests 0, 1, ...

    With several processes, compare models, sizes and requests of all processes, which must be equal.

    Raises:
      UsageError: a prompt is refused, the --prefix-cache file is invalid, the cache does not fit the device, or no
        implementation supports a step.
      ProcessError: another process has failed, or its model, sizes or requests differ.
    """
    with as_usage_error(ValueError, NotImplementedError, MemoryError, jax.errors.JaxRuntimeError):
        engine = Engine(model, sizes, capture_logits=options.dump_logits is not None, processes=processes)
    if options.prefix_cache is not None and os.path.lexists(options.prefix_cache):
        _find_prefixes(engine, options.prefix_cache)
    for i, prompt in enumerate(prompts):
        with as_usage_error(ValueError, prefix=f"prompt {i}: "):
            engine.add_request(prompt, options.params, request_id=i)
        if refusal := engine.output(i).refusal:
            raise UsageError(f"prompt {i}: {refusal}")
    with (
        display.doing("compiling"),
        as_usage_error(NotImplementedError, ExceptionGroup, jax.errors.JaxRuntimeError),
    ):
        engine.warmup()
    if processes is not None:
        # Settings are compared as text (`repr`). The text of a proposer does not describe it, so options.speculate is
        # compared instead.
        engine_sizes = dataclasses.replace(sizes, speculate=None)
        settings = (model.config, model.settings, dtype_of(options, model.config), engine_sizes, options.speculate)
        shared = (
            repr((settings, options.dump_logits is None)),
            repr((prompts, options.params, options.verify)),
            json.dumps(versions()),
        )
        processes.agree("the model, the sizes of the engine or the requests", *(part.encode() for part in shared))
    return engine


def _find_prefixes(engine: Engine, path: Path) -> None:
    """Load the pages of a --prefix-cache file into the engine's prefix cache. Raise UsageError if this is not
    possible."""
    with (
        as_usage_error(OSError, prefix=f"--prefix-cache: cannot read {path}: "),
        as_usage_error(ValueError, MemoryError, jax.errors.JaxRuntimeError, prefix=f"--prefix-cache: {path}: "),
    ):
        if not path.is_file():
            raise ValueError("not a regular file")
        engine.import_pages(CachedPages.from_bytes(path.read_bytes()))


def _drive(
    options: argparse.Namespace, engine: Engine, num_requests: int, display: Display
) -> tuple[float, BaseException | None]:
    """Run steps until all requests have ended.

    If an exception interrupts the run (such as Ctrl-C or a device failure), unfinished requests are aborted. Their
    outputs keep the tokens decoded until then.

    Returns:
      Duration in seconds, and the exception that interrupted the run; None for a complete run.
    """
    began = time.perf_counter()
    stopped: BaseException | None = None
    try:
        profile = contextlib.nullcontext() if options.profile is None else jax.profiler.trace(str(options.profile))
        with profile, display.tokens(num_requests * options.max_tokens) as advance:
            began = time.perf_counter()
            with as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="decoding: "), as_failure(ProcessError):
                while engine.has_unfinished:
                    advance(len(engine.step()))
            return time.perf_counter() - began, None
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001  raised again after the results have been written
        stopped = error
    run_s = time.perf_counter() - began
    for i in range(num_requests):
        engine.abort(i)
    return run_s, stopped


def _verify(
    options: argparse.Namespace,
    model: Decoder,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[RequestOutput],
) -> Verification:
    """Compare the tokens of all requests with an independent computation (see `pallas_attn.models.engine.verify`).

    Raises:
      Failure: not enough memory, or the device fails.
    """
    decoded = [
        Decoded(prompt, output.output_ids, options.params) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    with as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="--verify: "):
        return verify(
            model,
            decoded,
            max_len=engine.max_sequence_len,
            cache_dtype=engine.config.cache_dtype,
            kv_scales=engine.config.kv_scales,
        )


def _write_files(options: argparse.Namespace, report: Report, engine: Engine, failures: Failures) -> None:
    """Write the files of --dump-logits, --prefix-cache and --plot, which do not depend on verification."""
    if options.dump_logits is not None:
        logits = {f"logits_{i}": engine.prompt_logits(i) for i in range(len(report.outputs))}
        with failures.recording(), writing("--dump-logits", options.dump_logits) as file:
            np.savez(file, allow_pickle=False, **logits)
    if options.prefix_cache is not None:
        with failures.recording(), as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="--prefix-cache: "):
            pages = engine.export_prefix_cache().to_bytes()
            with writing("--prefix-cache", options.prefix_cache, private=True) as file:  # has tokens and salts
                file.write(pages)
    if options.plot is not None:
        with failures.recording(), writing("--plot", options.plot) as file:
            plot_run(file, report)


def _print_errors(prog: str, report: Report) -> None:
    """Print non-finite logits and differences that --verify found to stderr."""
    for sentence in nonfinite(report.outputs):
        print(f"{prog}: error: {sentence}", file=sys.stderr)
    for sentence in () if report.verification is None else differences(report.verification):
        print(f"{prog}: not verified: {sentence}", file=sys.stderr)


def _status(report: Report) -> int:
    """Return the exit status of a complete run."""
    if report.verification is not None and not report.verification.passed:
        return DIFFERENT
    return FAILED if nonfinite(report.outputs) else 0
