"""Token filters: objects that limit the next token of a request, for example to the tokens that a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

type MaskResult = np.ndarray | Exception | None
"""Result of a call of a token filter: a mask, the exception that the call raised, or None if all tokens are allowed."""


@runtime_checkable
class TokenFilter(Protocol):
    """Limits the next token of a request, for example to the tokens that a grammar allows.

    A class may also have the class method `allowed_batch`, see `BatchTokenFilter`.
    """

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray | None:
        """Return the tokens that may follow the output tokens `output_ids`, which do not include the prompt.

        The engine calls this method once per sampled token, and with drafts also for the tokens after drafts, on the
        thread that calls `Engine.step`, while the device computes the logits. The result must depend on `output_ids`
        only. Earlier calls allowed each of `output_ids`. If the method raises an exception or returns an
        invalid mask, the request ends with the finish reason "filter_error".

        Returns:
          Bit mask uint32 [ceil(V / 32)] with bit `token % 32` of entry `token // 32` set for each allowed token; None
          to allow all tokens.
        """


class FilterCall(NamedTuple):
    """Arguments of a call of `TokenFilter.allowed`."""

    token_filter: Any
    output_ids: Sequence[int]


class BatchTokenFilter(TokenFilter, Protocol):
    """Token filter whose class computes the masks of many requests in one call, for example on several CPU cores."""

    @classmethod
    def allowed_batch(cls, calls: Sequence[FilterCall]) -> Sequence[MaskResult]:
        """Return the result of `call.token_filter.allowed(call.output_ids)` for each call.

        The engine calls this method instead of `allowed`, with all filters of this class that a step needs. If it
        returns an exception for a call, only the request of this call ends with the finish reason "filter_error". If it
        raises an exception, the requests of all calls end. A subclass that changes `allowed` must change this method,
        too.

        Args:
          calls: the calls, at least one. All filters are of class `cls`. Several calls may have the same filter.
        """


def compute_masks(calls: Sequence[FilterCall]) -> list[MaskResult]:
    """Call token filters: those of a class with `allowed_batch` together, the others one after the other.

    Returns:
      The result of each call. An exception of a filter is returned, not raised.
    """
    results: list[MaskResult] = [None] * len(calls)
    batches: dict[Any, list[int]] = {}
    for i, (token_filter, output_ids) in enumerate(calls):
        if hasattr(type(token_filter), "allowed_batch"):
            batches.setdefault(type(token_filter), []).append(i)
            continue
        try:
            results[i] = token_filter.allowed(output_ids)
        except Exception as error:  # noqa: BLE001  an error of the user's filter ends its request, and nothing else
            results[i] = error
    for of_class, indices in batches.items():
        for i, result in zip(indices, _of_batch(of_class, [calls[i] for i in indices]), strict=True):
            results[i] = result
    return results


def _of_batch(of_class: type[BatchTokenFilter], calls: Sequence[FilterCall]) -> Sequence[MaskResult]:
    """Call `allowed_batch`. If it raises an exception, return the exception for each call."""
    try:
        results = of_class.allowed_batch(calls)
        if len(results) != len(calls):
            wanted = f"expected {len(calls)} results of {of_class.__name__}.allowed_batch"
            raise ValueError(f"token_filter: {wanted}, got {len(results)}")
    except Exception as error:  # noqa: BLE001  an error of the user's filters ends their requests, and nothing else
        return [error] * len(calls)
    return results
