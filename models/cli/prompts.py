"""Prompts as token ids: from the texts of --prompt, the file of --prompt-ids, or a built-in demonstration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pallas_attn.models.checkpoints import Tokenizer
from pallas_attn.models.checkpoints.tokenizer import check_unicode
from pallas_attn.models.cli.command_line import UsageError, as_usage_error
from pallas_attn.models.config.json_files import read_json

# Sizes of the demonstration: pages of the shared prefix, pages of the long prompt, and numbers of tokens after the
# prefix.
_PREFIX_PAGES = 3
_LONG_PAGES = 12
_TAILS = (7, 30, 12, 21, 3, 26)
_LARGEST_PAGE = 64  # sizes are computed as if larger pages had 64 tokens, so that the prompts fit small models

_PREFACE = (
    "You answer questions about the memory of computers for people who write software. Give the answer first, in one"
    " sentence, and the reason after it, in two or three. Use plain words, name the unit of every number, and say so"
    " when something depends on the machine."
)
_QUESTIONS = (
    "What is a page?",
    "Why does a translation lookaside buffer make a program faster, and when does it not?",
    "What happens when two processes map the same page and one of them writes to it?",
    "How large is a cache line?",
    "A server runs many copies of one program. Each copy reads the same four gigabytes of tables at its start, keeps"
    " them unchanged until it ends, and writes about two hundred megabytes of its own. The machine has sixty-four"
    " gigabytes of memory and the copies are started one after the other, a few seconds apart. An operator who adds up"
    " what each copy reports as its memory finds more than the machine has, although nothing is slow and nothing is"
    " swapped out. Explain what the operator is counting, what should be counted instead, how many copies fit, and what"
    " would change if every copy sorted its tables in place after reading them.",
    "What does a memory allocator do with a page it no longer needs?",
    "What is a page?",
)


def demo_ids(vocab_size: int, page_size: int) -> list[list[int]]:
    """Return the prompts of the demonstration for a model without tokenizer: random token ids with a fixed seed.

    Six prompts start with the same pages, one longer prompt does not, and the last prompt repeats the first one.
    """
    rng = np.random.default_rng(0)
    page_size = max(1, min(page_size, _LARGEST_PAGE))

    def draw(length: int) -> list[int]:
        return rng.integers(vocab_size, size=length).tolist()

    prefix = draw(_PREFIX_PAGES * page_size)
    prompts = [prefix + draw(tail) for tail in _TAILS]
    prompts.insert(2, draw(_LONG_PAGES * page_size + 5))
    return [*prompts, prompts[0]]


def demo_texts() -> list[str]:
    """Return the texts of the demonstration: questions that start with the same preface."""
    return [f"{_PREFACE}\n\n{question}" for question in _QUESTIONS]


def read_prompts(options: argparse.Namespace, tokenizer: Tokenizer | None) -> list[list[int]] | None:
    """Return the prompts of --prompt or --prompt-ids as token ids; None without either option.

    Args:
      options: the options.
      tokenizer: tokenizer of the model, which --prompt needs; None if there is no tokenizer.

    Raises:
      UsageError: as `encode_texts` and `read_ids`; or --prompt is given, but the model has no tokenizer.
    """
    if options.prompt_ids is not None:
        return read_ids(options.prompt_ids)
    if options.prompt is None:
        return None
    if tokenizer is None:
        raise UsageError(f"--prompt: {options.model} has no tokenizer.json; give token ids with --prompt-ids")
    return encode_texts(options.prompt, tokenizer)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Encode each text as a prompt of the model.

    Raises:
      UsageError: a text is empty, or not UTF-8.
      TokenizerError: as `Tokenizer.encode_prompt`.
    """
    for i, text in enumerate(texts):
        if not text.strip():
            raise UsageError(f"--prompt: text {i} is empty")
        with as_usage_error(ValueError, prefix=f"--prompt: text {i}: "):
            check_unicode(text)
    return [tokenizer.encode_prompt(text) for text in texts]


def read_ids(path: Path) -> list[list[int]]:
    """Read a JSON list of lists of token ids.

    Raises:
      UsageError: the file cannot be read, or has other contents.
    """
    with as_usage_error(ValueError, prefix="--prompt-ids: "):
        try:
            prompts = read_json(path)
        except OSError as error:
            raise UsageError(f"--prompt-ids: cannot read {path}: {error.strerror}") from error
    if not isinstance(prompts, list) or not prompts:
        raise UsageError(f"--prompt-ids: {path} must hold a list of lists of token ids, at least one")
    for i, ids in enumerate(prompts):
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise UsageError(f"--prompt-ids: prompt {i} of {path} is not a list of integers")
    return prompts
