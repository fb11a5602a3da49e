"""Functions with which `Engine` checks its arguments and constructs its parts.

A cache group is a set of layers with equal attention windows, which share a page pool. A data rank is a group of
devices with its own requests; an engine without data parallelism has one data rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jax.sharding import Mesh

from pallas_attn.cache import GroupPools, PrefixCache
from pallas_attn.models.config import DeepSeekConfig, DeepseekV4Config, Gemma4Config
from pallas_attn.models.decoder import Decoder, normal_mesh, split_model
from pallas_attn.models.decoder.mesh import DATA, ExpertSplit, bytes_on_device, spans_processes
from pallas_attn.models.engine.config import EngineConfig, RunnerConfig
from pallas_attn.models.engine.distributed.processes import Processes
from pallas_attn.models.engine.group_sizes import GroupSizes, group_sizes, make_pools
from pallas_attn.models.engine.scheduler import Scheduler
from pallas_attn.models.engine.speculation.draft_control import DraftControl, step_cost


def check_devices(model: Decoder, config: EngineConfig, processes: Processes | None) -> None:
    """Check that an engine can use the mesh of the model, and the processes.

    Raises:
      ValueError: the model was loaded for another mesh than `config.mesh`, or the mesh spans several processes and
        `processes` is None.
      NotImplementedError: `config.background_compilation` with several processes.
    """
    if model.mesh != (config.mesh and normal_mesh(config.mesh)):
        raise ValueError(
            f"mesh: expected the mesh that the model was loaded for, {_devices(model.mesh)}; got"
            f" {_devices(config.mesh)}. load_model and random_model take a mesh"
        )
    if spans_processes(model.mesh) and processes is None:
        raise ValueError("processes: expected Processes, because the mesh spans several processes; got None")
    if config.background_compilation and processes is not None:
        raise NotImplementedError(
            "background_compilation: not supported with several processes, which must all run the same programs,"
            " but compile them at different times"
        )


def checked_model_len(model: Decoder, config: EngineConfig) -> int:
    """Return `config.max_model_len`, or the model's limit if it is None.

    Raises:
      ValueError: `config.max_model_len` is less than 2 or above the model's limit.
    """
    limit = model.config.max_position_embeddings
    max_model_len = limit if config.max_model_len is None else config.max_model_len
    if not 2 <= max_model_len <= limit:
        raise ValueError(f"max_model_len: expected 2 to the model's {limit}, got {max_model_len}")
    return max_model_len


def make_groups(model: Decoder, config: EngineConfig, max_model_len: int) -> tuple[GroupSizes, ...]:
    """Choose the number of pages of each cache group."""
    return group_sizes(
        model.part,
        num_pages=config.num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        step_tokens=config.max_batched_tokens,
        recycling=config.recycling,
    )


def make_rank_pools(
    model: Decoder, config: EngineConfig, groups: Sequence[GroupSizes], max_model_len: int
) -> tuple[GroupPools, ...]:
    """Make the page pools of each data rank."""
    return tuple(
        make_pools(
            groups,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            whole_tables=config.batch_invariant,
        )
        for _ in range(1 if model.mesh is None else model.mesh.shape[DATA])
    )


def make_schedulers(
    model: Decoder,
    config: EngineConfig,
    runner_config: RunnerConfig,
    pools: Sequence[GroupPools],
    prefix_caches: Sequence[PrefixCache],
    max_model_len: int,
) -> list[Scheduler]:
    """Make one scheduler per data rank; `prefix_caches` is empty without prefix caching."""
    return [
        Scheduler(
            of_rank,
            prefix_cache,
            max_batched_tokens=config.max_batched_tokens,
            max_prefill_seqs=config.prefill_seqs,
            max_model_len=max_model_len,
            chunked_prefill=config.chunked_prefill,
            # With several data ranks, a step is padded to the largest number of prompt tokens of any rank. The
            # scheduler of one rank does not know this number, so it does not optimise the padding.
            padded_sizes=runner_config.prefill_buckets if len(pools) == 1 else (),
            eos_token_ids=model.config.eos_token_ids,
            draft_control=_draft_control(model, config),
        )
        for of_rank, prefix_cache in itertools.zip_longest(pools, prefix_caches)
    ]


def _devices(mesh: Mesh | None) -> str:
    if mesh is None:
        return "one device"
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"{sizes} of devices {[device.id for device in mesh.devices.flat]}"


def _draft_control(model: Decoder, config: EngineConfig) -> DraftControl | None:
    """Make the control of the number of drafts (guessed tokens that a step verifies) per step; None without
    speculation. The control estimates step times from the bytes of weights that a device reads per step."""
    if config.speculate is None:
        return None
    sizes, (_, weights) = model.part, split_model(model)
    itemsize = model.embed_tokens[...].dtype.itemsize
    if isinstance(sizes, DeepSeekConfig):
        layers, experts, width = sizes.num_moe_layers, sizes.n_routed_experts, sizes.moe_intermediate_size
        chosen = sizes.num_experts_per_tok
    elif isinstance(sizes, DeepseekV4Config):
        layers, experts, width = sizes.num_hidden_layers, sizes.n_routed_experts, sizes.moe_intermediate_size
        chosen = sizes.num_experts_per_tok
    elif isinstance(sizes, Gemma4Config):
        layers, experts, width = sizes.num_hidden_layers, sizes.num_experts, sizes.moe_intermediate_size
        chosen = sizes.top_k_experts
    else:
        layers, experts, width = sizes.num_hidden_layers, sizes.num_local_experts, sizes.intermediate_size
        chosen = sizes.num_experts_per_tok
    own_experts = ExpertSplit.over(model.mesh).num_own(experts)
    routed = layers * own_experts * 3 * sizes.hidden_size * width * itemsize
    embedding = 0 if sizes.tie_word_embeddings else bytes_on_device(model.embed_tokens[...])
    if model.per_layer_inputs is not None:  # a step reads one row per token
        embedding += bytes_on_device(model.per_layer_inputs.embed_tokens[...])
    dense = sum(map(bytes_on_device, weights)) - embedding - routed
    share = chosen / experts if experts else 0.0
    cost = step_cost(dense, routed, share, itemsize)
    proposer = config.speculate.proposer
    return DraftControl(config.speculate.draft_buckets, cost, proposer.draft_bytes, proposer.depth)
