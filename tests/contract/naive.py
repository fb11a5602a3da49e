"""Textbook attention in float64 numpy, one query at a time, for expected results.

A query attends to an array that has only its visible keys, so the softmax needs no mask. The module shares no code with
the library, so tests also compare the library's `reference` implementations with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    sm_scale: float,
    *,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention of one query over K visible keys.

    Args:
      q: [Hq, Dk].
        k, v: [K, Hkv, Dk] and [K, Hkv, Dv]; query head h reads KV head h // (Hq / Hkv).
      sinks: [Hq], scores of an additional key with value 0. The LSE does not include this key.

    Returns:
      Output [Hq, Dv] and LSE [Hq], float64; 0 and -inf if K is 0.
    """
    if not k.shape[0]:
        return np.zeros((q.shape[0], v.shape[-1])), np.full(q.shape[0], -np.inf)
    group = q.shape[0] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("hd,khd->hk", q.astype(np.float64), k) * sm_scale
    scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
    highest = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=1, keepdims=True)
    lse = (highest + np.log(total))[:, 0]
    kept = np.ones_like(lse) if sinks is None else np.exp(lse - np.logaddexp(lse, sinks))
    return kept[:, None] * np.einsum("hk,khd->hd", weights / total, v), lse


def attend_all(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray, sm_scale: float, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention of T queries [T, Hq, Dk] over U keys [U, Hkv, Dk] under the mask `visible`, bool [T, U].

    Args:
      **options: further arguments of `attend`.
    """
    rows = [attend(q[t], k[visible[t]], v[visible[t]], sm_scale, **options) for t in range(q.shape[0])]
    if not rows:
        return np.zeros((0, q.shape[1], v.shape[-1])), np.zeros((0, q.shape[1]))
    out, lse = zip(*rows, strict=True)
    return np.stack(out), np.stack(lse)
