"""The choice of decode steps that call `cascade_decode`, which reads pages once if all sequences share them.

Sequences share the pages of their common prefix: samples of one prompt share the prompt, and requests of one
application share its system prompt. The host counts the shared pages of each decode step from the block tables. If
enough bytes are saved, the step runs a separate program, whose layers without windows call `cascade_decode`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallas_attn import CacheSpec, PagedKV, count_shared_pages
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, cache_groups
from pallas_attn.models.decoder import Decoder
from pallas_attn.models.engine.config import Bucket, RunnerConfig
from pallas_attn.models.engine.step.plan import StepPlan


def cascade_steps(model: Decoder, config: RunnerConfig, specs: Sequence[CacheSpec]) -> CascadeSteps | None:
    """Return the decode steps that may call `cascade_decode`; None if `config.cascade_attention` is False, or if it is
    None and the model does not support it.

    Args:
      model: the model.
      config: sizes for which the runner compiles.
      specs: cache of each layer on one device.

    Raises:
      NotImplementedError: `config.cascade_attention` is True, and the model does not support it.
    """
    if config.cascade_attention is False:
        return None
    reason = _unsupported(model)
    if reason is None:
        return CascadeSteps(model, config, specs)
    if config.cascade_attention is None:
        return None
    raise NotImplementedError(f"cascade_attention: {reason}")


def _unsupported(model: Decoder) -> str | None:
    """Return why steps of the model cannot call `cascade_decode`; None if they can."""
    if isinstance(model.part, DeepSeekConfig | DeepseekV4Config):
        return f"cascade_decode attends to keys and values, a {model.config.model_type} model caches latents"
    if model.contexts > 1:
        return "the tokens of each page are split over the mesh axis context"
    if model.settings.batch_invariant:
        return "changes the rounding, which batch_invariant excludes"
    if all(group.window is not None for group in cache_groups(model.part)):
        return "all layers of the model have attention windows"
    return None


class CascadeSteps:
    """The decode steps of an engine that may call `cascade_decode`.

    Attributes:
      buckets: padded shapes of these steps: the numbers of decode rows with which a step could save enough page reads.
        Empty if block tables, page pool or page size are too small.
    """

    def __init__(self, model: Decoder, config: RunnerConfig, specs: Sequence[CacheSpec]):
        """Choose the buckets. The arguments are those of `cascade_steps`, for a model that supports cascades."""
        groups = enumerate(cache_groups(model.part))
        self._group, layer = next((i, group.layers[0]) for i, group in groups if group.window is None)
        self._kv = PagedKV(**specs[layer].arrays)  # pyrefly: ignore[bad-argument-type]
        self._least = model.settings.cascade_saved_bytes
        # The newest token of each row is in a page of its own.
        most = {rows: min(config.table_pages - 1, specs[layer].num_pages - rows) for rows in config.decode_buckets}
        self.buckets = tuple(Bucket(rows, 0, cascade=True) for rows, pages in most.items() if self._pays(rows, pages))

    def _pays(self, rows: int, pages: int) -> bool:
        """Return whether a step of `rows` sequences that share `pages` pages saves enough page reads."""
        if pages < 1:
            return False
        tables, lens = np.zeros((rows, pages), np.int32), np.full(rows, pages * self._kv.page_size + 1)
        return count_shared_pages(self._kv, tables, lens, min_saved_bytes=self._least) > 0

    def choose(self, bucket: Bucket, plans: Sequence[StepPlan | None]) -> tuple[Bucket, list[int]]:
        """Choose the form of attention of a step.

        With several data ranks, the step calls `cascade_decode` only if each rank with rows saves enough page reads,
        because the step takes as long as its slowest rank.

        Args:
          bucket: smallest bucket that holds the step, without `cascade`.
          plans: plan of each data rank; None for a rank without rows.

        Returns:
          The bucket of the step, and for each data rank the number of pages that all its sequences share. The list is
          empty without `Bucket.cascade`.
        """
        cascade = dataclasses.replace(bucket, cascade=True)
        if cascade in self.buckets:
            shared = [None if plan is None else self._shared_pages(plan) for plan in plans]
            if 0 not in shared:
                return cascade, [pages or 0 for pages in shared]
        return bucket, []

    def _shared_pages(self, plan: StepPlan) -> int:
        """Return the number of leading pages that all decode rows share; 0 if `paged_decode` would be faster."""
        tables, lens = plan.tables[self._group][:, 0], np.array([row.start + 1 for row in plan.decode])
        return count_shared_pages(self._kv, tables, lens, min_saved_bytes=self._least)
