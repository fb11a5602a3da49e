"""Answer prompts with the engine and report results and statistics, or chat: `python scripts/run_decode.py --help`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from pallas_attn.models.checkpoints import Tokenizer, TokenizerError, load_tokenizer
from pallas_attn.models.cli.command_line import (
    FAILED,
    Failure,
    Failures,
    StandardError,
    UsageError,
    as_failure,
    as_usage_error,
    exit_status,
    write_report,
    writing,
)
from pallas_attn.models.cli.decode.answers import Output, Streamed, print_answers
from pallas_attn.models.cli.decode.chat import Chat
from pallas_attn.models.cli.decode.options import PROG, attention_settings, parse_options
from pallas_attn.models.cli.decode.plot import plot_run
from pallas_attn.models.cli.decode.progress import Display
from pallas_attn.models.cli.decode.report import (
    Loading,
    Report,
    device_name,
    differences,
    nonfinite,
    peak_host_bytes,
    prompt_tokens,
    verdict,
    versions,
)
from pallas_attn.models.cli.decode.sizes import CHAT_TOKENS, engine_config
from pallas_attn.models.cli.mesh import mesh_of
from pallas_attn.models.cli.model import choose_page_size, dtype_of, implementations, load, name_of, read_config
from pallas_attn.models.cli.model_options import enable_compilation_cache
from pallas_attn.models.cli.output_files import is_replaced
from pallas_attn.models.cli.prefix_cache import load_prefixes, save_prefixes
from pallas_attn.models.cli.processes import Joined, writes
from pallas_attn.models.cli.prompts import demo_ids, demo_texts, encode_texts, read_prompts
from pallas_attn.models.cli.speculate import announce_module, make_speculation
from pallas_attn.models.config import ModelConfig
from pallas_attn.models.decoder import Decoder, StepSizes, device_part
from pallas_attn.models.engine import (
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
    """Decode the prompts, verify the tokens if requested, and report; or chat. Return the exit status.

    With several processes, all processes decode and verify, and process 0 reports.

    Raises:
      UsageError: wrong options, or a wrong input file.
      Failure: decoding fails, results cannot be written or printed, or verification cannot be completed. All other
        results, and the tokens decoded before the failure, are written and printed.
    """
    display = Display(options.prog, shown=not (options.no_progress or options.quiet) and writes(processes))
    enable_compilation_cache(options.prog, options)
    with as_usage_error(RuntimeError, AssertionError, prefix="jax finds no device; check JAX_PLATFORMS. "):
        device_name()
    with as_usage_error(ValueError, NotImplementedError, OSError):
        config = announce_module(options, read_config(options))
        choose_page_size(options, config)
        if options.index_topk is not None and not config.is_sparse:
            raise UsageError(f"--index-topk: a {config.model_type} attends to all keys")
        tokenizer = None if options.model is None else load_tokenizer(options.model)
        prompts = [] if options.chat else _prompts(options, config, tokenizer)
        if options.chat:
            _prepare_chat(options, tokenizer, config)
        mesh = mesh_of(options.mesh)
        lengths = [max(options.max_model_len - 1, 1)] if options.chat else [*map(len, prompts)]
        sizes = dataclasses.replace(engine_config(options, config, lengths), mesh=mesh)
        implementation = implementations(
            device_part(config, mesh),
            attention_settings(options),
            _largest_step(options, sizes, config),
            dtype_of(options, config),
        )
        with display.doing("loading the model"):
            began = time.perf_counter()
            model = load(options, config, attention_settings(options), mesh)
            loading = Loading(time.perf_counter() - began, peak_host_bytes())
            sizes = dataclasses.replace(sizes, speculate=make_speculation(options, model, len(lengths)))
    engine = _engine(options, model, sizes, prompts, display, processes)
    if options.chat and tokenizer is not None:
        Chat(options.prog, engine, tokenizer, options.params, system=options.system, stats=options.stats).run()
        return 0
    failures = Failures()
    answers = _Answers(options, tokenizer, prompts) if writes(processes) else None
    run_s, stopped = _drive(options, engine, len(prompts), display, answers, failures)
    outputs = [engine.output(i) for i in range(len(prompts))]
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
    if answers is not None:
        return _finish(options, engine, report, stopped, failures, answers, check, display)
    if stopped is not None:
        raise stopped
    return _status(dataclasses.replace(report, verification=check()) if options.verify else report)


class _Answers:
    """Prints the answers: a single one while it is generated, several ones at the end."""

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer | None, prompts: Sequence[Sequence[int]]):
        if options.prompt is None and (tokenizer is None or options.prompt_ids is not None):
            self._headings = [f"{prompt_tokens(len(ids))}: {_ids(ids[:40])}" for ids in prompts]
        else:
            self._headings = options.prompt or demo_texts()
        self._output = Output()
        self.streamed = Streamed(self._output, tokenizer) if len(prompts) == 1 else None

    def finish(self, report: Report) -> None:
        """Print what is not printed yet. Raise Failure if this is not possible."""
        if self.streamed is not None:
            self.streamed.finish(report.outputs[0].output_ids)
            return
        texts = report.texts if report.texts is not None else [_ids(output.output_ids) for output in report.outputs]
        print_answers(self._output, self._headings, texts)


def _ids(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def _finish(
    options: argparse.Namespace,
    engine: Engine,
    report: Report,
    stopped: BaseException | None,
    failures: Failures,
    answers: _Answers,
    check: Callable[[], Verification],
    display: Display,
) -> int:
    """Print the answers, write the results, verify and print statistics. Return the exit status.

    Args:
      options: the options.
      engine: the engine, after the run.
      report: the report without verification.
      stopped: exception that interrupted the run; None for a complete run.
      failures: failures of earlier parts of the report; failures of this function are added.
      answers: prints the answers.
      check: function that compares the tokens with an independent computation (`_verify`).
      display: shows progress.

    Raises:
      Failure: `stopped` is a Failure, or a part of the report failed.
      BaseException: `stopped`, after the results have been written.
    """
    # Every part of the report is written even if other parts fail.
    try:
        try:
            try:
                _write_files(options, report, engine, failures)
                if options.json is not None and is_replaced(options.json):  # a pipe would get two reports
                    # Printing and verification may take long or be killed. Afterwards the report is written again.
                    with contextlib.suppress(Failure):
                        write_report("--json", options.json, report.to_json())
            finally:
                with failures.recording():
                    answers.finish(report)
            if options.verify and stopped is None:
                with failures.recording(), display.doing("verifying"):
                    report = dataclasses.replace(report, verification=check())
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
        finally:
            with failures.recording():
                if options.json is not None:
                    write_report("--json", options.json, report.to_json())
    finally:
        _print_statistics(options, report)
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


def _prepare_chat(options: argparse.Namespace, tokenizer: Tokenizer | None, config: ModelConfig) -> None:
    """Set --max-model-len and --max-num-seqs for --chat if they are not given.

    Raises:
      UsageError: the model has no chat template.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise UsageError(f"--chat: {options.model} has no tokenizer.json with a chat template")
    options.max_model_len = options.max_model_len or min(config.max_position_embeddings, CHAT_TOKENS)
    if options.max_num_seqs is None and options.decode_buckets is None:
        options.max_num_seqs = 1


def _largest_step(options: argparse.Namespace, sizes: EngineConfig, config: ModelConfig) -> StepSizes:
    """Return the sizes of the cache and of the largest step on one device."""
    largest = sizes.runner_config(sizes.max_model_len or config.max_position_embeddings).largest_step
    if options.speculate is not None:
        largest = dataclasses.replace(largest, decode_queries=1 + options.speculate.num_drafts)
    part = device_part(config, sizes.mesh)
    contexts = 1 if sizes.mesh is None else sizes.mesh.shape["context"]
    kv_scales = largest.kv_scales and largest.kv_scales.of_part(part)
    return dataclasses.replace(largest, kv_scales=kv_scales, page_size=max(largest.page_size // contexts, 1))


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
    if options.prefix_cache is not None:
        load_prefixes(engine, options.prefix_cache)
    for i, prompt in enumerate(prompts):
        with as_usage_error(ValueError, prefix=f"prompt {i}: "):
            engine.add_request(prompt, options.params, request_id=i)
        if refusal := engine.output(i).refusal:
            raise UsageError(f"prompt {i}: {refusal}")
    with (
        as_usage_error(NotImplementedError, ExceptionGroup, jax.errors.JaxRuntimeError),
        display.compiling() as on_compiled,
    ):
        engine.warmup(on_compiled)
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


def _drive(
    options: argparse.Namespace,
    engine: Engine,
    num_requests: int,
    display: Display,
    answers: _Answers | None,
    failures: Failures,
) -> tuple[float, BaseException | None]:
    """Run steps until all requests have ended. Print a single answer after each step.

    If an exception interrupts the run (such as Ctrl-C or a device failure), unfinished requests are aborted. Their
    outputs keep the tokens decoded until then. If an answer cannot be printed, the failure is recorded in `failures`.

    Returns:
      Duration in seconds, and the exception that interrupted the run; None for a complete run.
    """
    began = time.perf_counter()
    stopped: BaseException | None = None
    try:
        profile = contextlib.nullcontext() if options.profile is None else jax.profiler.trace(str(options.profile))
        streamed = None if answers is None else answers.streamed
        with profile, display.tokens(num_requests * options.max_tokens, shown=streamed is None) as advance:
            began = time.perf_counter()
            with as_failure(MemoryError, jax.errors.JaxRuntimeError, prefix="decoding: "), as_failure(ProcessError):
                while engine.has_unfinished:
                    advance(len(engine.step()))
                    if streamed is not None:
                        with failures.recording():
                            streamed.update(engine.output(0).output_ids)
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
        with failures.recording():
            save_prefixes(engine, options.prefix_cache)
    if options.plot is not None:
        with failures.recording(), writing("--plot", options.plot) as file:
            plot_run(file, report)


def _print_statistics(options: argparse.Namespace, report: Report) -> None:
    """Print the statistics of the run to stderr: a table with --stats, otherwise one line, and nothing with --quiet."""
    if options.quiet:
        return
    console = StandardError()
    if options.stats:
        report.print(console)
        return
    console.print(f"{options.prog}: {report.summary()}", soft_wrap=True, highlight=False, markup=False)
    if report.verification is not None and report.verification.passed:
        console.print(f"{options.prog}: verified:", verdict(report.verification), soft_wrap=True, highlight=False)


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
