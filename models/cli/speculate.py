"""The option --speculate: the proposer of drafts (guesses of later tokens that a step verifies)."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from pallas_attn.models.checkpoints import load_model, load_mtp, random_mtp
from pallas_attn.models.cli.command_line import UsageError, as_usage_error, decimal
from pallas_attn.models.cli.model import dtype_of
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, ModelConfig
from pallas_attn.models.config.json_files import shown
from pallas_attn.models.decoder import AttentionSettings, Decoder
from pallas_attn.models.engine import DraftModelProposer, MTPProposer, NGramProposer, Proposer, Speculation

NUM_DRAFTS = 4
"""Default number of drafts per request and step."""

SHORT_RUN = 4096
"""Maximum number of output tokens of a run in which compiling one program for each number of drafts would take longer
than the better choices save."""


@dataclasses.dataclass(frozen=True)
class SpeculateOption:
    """Parsed value of --speculate.

    Attributes:
      kind: kind of proposer, a key of `KINDS`.
      source: folder of the draft model; empty for other kinds.
      num_drafts: maximum number of drafts per request and step.
      alternatives: number of drafts per position; above 1 only for the kind "mtp".
    """

    kind: str
    source: str
    num_drafts: int
    alternatives: int = 1

    def __str__(self) -> str:
        alternatives = [str(self.alternatives)] if self.alternatives > 1 else []
        return ":".join([self.kind, *([self.source] if self.source else []), str(self.num_drafts), *alternatives])


type _Maker = Callable[[SpeculateOption, argparse.Namespace, Decoder], Proposer]


def _ngram(option: SpeculateOption, options: argparse.Namespace, model: Decoder) -> Proposer:
    return NGramProposer()


def _mtp(option: SpeculateOption, options: argparse.Namespace, model: Decoder) -> Proposer:
    mtp = random_mtp(model) if options.model is None else load_mtp(options.model, model)
    return MTPProposer(mtp, option.alternatives)


def _draft_model(option: SpeculateOption, options: argparse.Namespace, model: Decoder) -> Proposer:
    own = AttentionSettings(implementation=model.settings.implementation)
    return DraftModelProposer(load_model(Path(option.source), dtype_of(options, model.config), own, mesh=model.mesh))


KINDS: dict[str, tuple[bool, _Maker]] = {"ngram": (False, _ngram), "mtp": (False, _mtp), "draft": (True, _draft_model)}
"""For each kind of proposer: whether the value of the option names a folder (KIND:DIR), and the function that makes the
proposer."""


def add_speculate(group: argparse._ActionsContainer) -> None:
    """Add the option."""
    group.add_argument(
        "--speculate",
        default="none",
        metavar="KIND[:DIR][:N]",
        help="verify up to N drafts (guesses of the next tokens) per request and step, which changes no token. ngram:N"
        " proposes the tokens after an earlier occurrence of the newest tokens; mtp:N uses the multi-token prediction"
        " module of DeepSeek-V3 or V4, mtp:N:M with M alternatives per position; draft:DIR:N uses a smaller model with"
        " the same vocabulary"
        f" (default: none; N: {NUM_DRAFTS})",
    )


def parse_speculate(given: str) -> SpeculateOption | None:
    """Parse the value of --speculate; None for "none".

    Raises:
      UsageError: an unknown kind, an invalid number of drafts or alternatives, or a missing or unexpected folder.
    """
    if given == "none":
        return None
    kind, _, rest = given.partition(":")
    if kind not in KINDS:
        raise UsageError(f"--speculate: expected none, {', '.join(KINDS)}, got {shown(given)}")
    has_source, _ = KINDS[kind]
    alternatives = 1
    if kind == "mtp" and ":" in rest:
        rest, _, last = rest.partition(":")
        alternatives = decimal(last) or 0
        if not 1 <= alternatives <= 8:
            raise UsageError(f"--speculate: expected mtp:N:M with 1 to 8 alternatives, got {shown(given)}")
    source, _, number = rest.rpartition(":")
    if has_source and not number.isdecimal():  # a folder name may contain colons, and the number is optional
        source, number = rest, ""
    if has_source != bool(source):
        wanted = f"{kind}:DIR or {kind}:DIR:N" if has_source else f"{kind} or {kind}:N"
        raise UsageError(f"--speculate: expected {wanted}, got {shown(given)}")
    num_drafts = decimal(number) or 0 if number else NUM_DRAFTS
    if not 1 <= num_drafts <= 64:
        raise UsageError(f"--speculate: expected 1 to 64 drafts, got {shown(number)}")
    return SpeculateOption(kind, source, num_drafts, alternatives)


def announce_module(options: argparse.Namespace, config: ModelConfig) -> ModelConfig:
    """Return the configuration of the model. If --speculate is mtp, a random model gets one prediction module, provided
    that its family has prediction modules."""
    option: SpeculateOption | None = options.speculate
    has_modules = isinstance(config, DeepSeekConfig | DeepseekV4Config)
    if option is None or option.kind != "mtp" or options.model is not None or not has_modules:
        return config
    return dataclasses.replace(config, num_nextn_predict_layers=1)


def make_speculation(options: argparse.Namespace, model: Decoder, num_prompts: int) -> Speculation | None:
    """Return the `Speculation` of the options for a loaded model; None for "none".

    Only numbers of drafts that the run can use are compiled: at most max_tokens - 2, since no draft follows the last
    token and the first token has none. Short runs choose between no drafts and all drafts.

    Args:
      options: the options.
      model: the model that verifies the drafts.
      num_prompts: number of requests of the run.

    Raises:
      UsageError: the proposer cannot be made, for example because the folder has no model.
    """
    option: SpeculateOption | None = options.speculate
    if option is None:
        return None
    _, make = KINDS[option.kind]
    num_drafts = option.num_drafts
    if option.alternatives == 1:
        num_drafts = min(num_drafts, max(options.max_tokens - 2, 1))
    with as_usage_error(ValueError, NotImplementedError, OSError, prefix="--speculate: "):
        is_short = num_prompts * options.max_tokens <= SHORT_RUN
        return Speculation(make(option, options, model), num_drafts, few_programs=is_short)
