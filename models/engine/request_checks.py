"""Checks of a new request: types of arguments, token ids, and sampling parameters that the engine supports."""

from __future__ import annotations

from collections.abc import Sequence

from pallas_attn.models.engine.config import EngineConfig
from pallas_attn.models.engine.kv_transfer.incoming_pages import IncomingPages
from pallas_attn.models.engine.request import MAX_EDITED_TOKENS, SamplingParams, as_integers
from pallas_attn.models.engine.token_filter import TokenFilter


def checked_ids(name: str, given: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return token ids as a tuple; raise ValueError if an id is not an integer or not in the vocabulary."""
    ids = as_integers(name, given)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {outside[0]}")
    return ids


def check_types(on_token: object, incoming: object, token_filter: object) -> None:
    """Raise ValueError if one of these arguments of `Engine.add_request` has another type."""
    if on_token is not None and not callable(on_token):
        raise ValueError(f"on_token: expected a function or None, got {on_token!r}")
    if incoming is not None and not isinstance(incoming, IncomingPages):
        raise ValueError(f"incoming: expected the result of receive_pages or None, got {incoming!r}")
    if token_filter is not None and not isinstance(token_filter, TokenFilter):
        raise ValueError(f"token_filter: expected an object with a method allowed, or None, got {token_filter!r}")


def check_params(params: SamplingParams, config: EngineConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raise ValueError if an engine does not support the sampling parameters.

    Args:
      params: the sampling parameters.
      config: configuration of the engine.
      vocab_size, eos_token_ids: vocabulary size and end-of-sequence tokens of the model.
    """
    if names := params.text_level():
        raise ValueError(f"{', '.join(names)}: needs a tokenizer, which an engine does not have; use LLM")
    checked_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    checked_ids("logit_bias", tuple(params.logit_bias), vocab_size)
    checked_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    if (number := len(params.edited_tokens(eos_token_ids))) > MAX_EDITED_TOKENS:
        names = "logit_bias, stop_token_ids and the model's end-of-sequence tokens"
        raise ValueError(f"{names}: expected at most {MAX_EDITED_TOKENS} different tokens, got {number}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > min(config.max_logprobs, vocab_size):
            limit = f"at most EngineConfig.max_logprobs={config.max_logprobs} and the vocabulary size"
            raise ValueError(f"{name}: expected {limit}, got {getattr(params, name)}")
    known = () if config.logits_processor is None else config.logits_processor.defaults
    if unknown := [name for name in params.extra_args if name not in known]:
        wanted = "names in the defaults of EngineConfig.logits_processor"
        raise ValueError(f"extra_args: expected {wanted}, {list(known)}, got {unknown[0]!r}")
