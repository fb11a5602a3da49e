"""The inference engine: requests in, tokens out. This room imports `models.config` and `models.decoder`.

In reading order: `engine` (the loop), `config` (sizes and policies), `request` and `outputs` (the callers' side),
`scheduler` (which tokens next, in which pages; no jax) and its `step_plan`, `runner` (the device) with `packed_step`,
`plain_step`, `layered_step` (the same as several programs) and `sampler`, `group_sizes` (how cache groups share the
memory), `verify` (tokens checked by decoding again), `cached_pages` (pages for another engine) and `split_rows` (those
of a mesh), `written_pages` and `incoming_pages` (the same layer by layer), `handover` and `transport` (between two
processes), `processes` (several that run one engine). Drafts: `proposer` (the interface), `speculative_step` (a step
that verifies them), `draft_control` (how many), `ngram`, `draft_model` and `mtp` (proposers).
"""

from models.engine.config import EngineConfig as EngineConfig
from models.engine.distributed.processes import ProcessError as ProcessError
from models.engine.distributed.processes import Processes as Processes
from models.engine.engine import Engine as Engine
from models.engine.kv_transfer.cached_pages import CachedPages as CachedPages
from models.engine.kv_transfer.incoming_pages import IncomingPages as IncomingPages
from models.engine.kv_transfer.remote_prefill import HandOverError as HandOverError
from models.engine.kv_transfer.remote_prefill import RemotePrefill as RemotePrefill
from models.engine.kv_transfer.remote_prefill import serve_prefill as serve_prefill
from models.engine.kv_transfer.transport import SocketTransport as SocketTransport
from models.engine.kv_transfer.transport import Transport as Transport
from models.engine.kv_transfer.transport import TransportError as TransportError
from models.engine.kv_transfer.written_pages import ConsumerError as ConsumerError
from models.engine.kv_transfer.written_pages import WrittenChunk as WrittenChunk
from models.engine.kv_transfer.written_pages import WrittenFeed as WrittenFeed
from models.engine.kv_transfer.written_pages import WrittenLayer as WrittenLayer
from models.engine.outputs import EngineStats as EngineStats
from models.engine.outputs import RequestOutput as RequestOutput
from models.engine.outputs import StepRecord as StepRecord
from models.engine.request import SamplingParams as SamplingParams
from models.engine.speculation.draft_model import DraftModelProposer as DraftModelProposer
from models.engine.speculation.mtp import MTPProposer as MTPProposer
from models.engine.speculation.ngram import NGramProposer as NGramProposer
from models.engine.speculation.proposer import DraftRows as DraftRows
from models.engine.speculation.proposer import DraftTree as DraftTree
from models.engine.speculation.proposer import ObservedStep as ObservedStep
from models.engine.speculation.proposer import Proposer as Proposer
from models.engine.speculation.proposer import ProposerSizes as ProposerSizes
from models.engine.speculation.proposer import Speculation as Speculation
from models.engine.verify import Decoded as Decoded
from models.engine.verify import Difference as Difference
from models.engine.verify import PlainRun as PlainRun
from models.engine.verify import RequestCheck as RequestCheck
from models.engine.verify import Verification as Verification
