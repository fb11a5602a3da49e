"""The inference engine: takes requests with prompts and returns generated tokens.

The package imports `pallas_attn.models.config` and `pallas_attn.models.decoder`. Modules in reading order:

- `engine`: the public methods, and the recovery after exceptions. `step_loop`: the main loop. `request_table` and
  `tracked_request`: records of requests. `step_log`: statistics. `warmup`: compilation before steps. `assembly`
  constructs the parts of an engine. `request_checks`: checks of new requests.
- `config`: sizes and options. `request`: requests and sampling parameters. `outputs`: results and statistics.
- `scheduler`: plans steps and allocates cache pages, in plain Python. `group_sizes` divides the cache memory between
  layers with different attention windows.
- `runner`: owns weights and caches on the device, compiles steps and launches them. `weight_slots`: replacement of
  weights. `compile_options`: XLA options. `sampler`: sampling of tokens from logits. `logit_edits`: penalties, masks
  and other changes of logits before. `logprobs`: log probabilities of tokens.
- `step`: `plan` (the scheduler's plan of a step), `packed` (the plan as one array for the device), `plain` (the
  function that is compiled), `layered` (a step as several programs), `background` (compilation while steps run),
  `result` (tokens and logits on the device).
- `speculation`: `proposer` (interface of draft proposers), `step` (programs of a step with drafts), `acceptance`
  (comparison of drafts with sampled tokens), `draft_control` (number of drafts per step); the proposers `ngram`,
  `draft_model`, `mtp`.
- `kv_transfer`: `engine_transfers` (transfer methods of the engine), `cached_pages` (exported pages), `cache_rows` and
  `split_rows` (copies of cache pages on one device and on a mesh), `written_pages` and `incoming_pages` (layer by
  layer), `remote_prefill` and `transport` (between two processes), `fields` (validation of messages and files).
- `distributed`: `data_ranks` (data parallelism), `processes` (one engine in several processes).
- `verify`: compares generated tokens with an independent computation.
"""

from pallas_attn.models.engine.config import EngineConfig as EngineConfig
from pallas_attn.models.engine.distributed.processes import ProcessError as ProcessError
from pallas_attn.models.engine.distributed.processes import Processes as Processes
from pallas_attn.models.engine.engine import Engine as Engine
from pallas_attn.models.engine.kv_transfer.cached_pages import CachedPages as CachedPages
from pallas_attn.models.engine.kv_transfer.engine_transfers import EngineTransfers as EngineTransfers
from pallas_attn.models.engine.kv_transfer.incoming_pages import IncomingPages as IncomingPages
from pallas_attn.models.engine.kv_transfer.remote_prefill import HandOverError as HandOverError
from pallas_attn.models.engine.kv_transfer.remote_prefill import RemotePrefill as RemotePrefill
from pallas_attn.models.engine.kv_transfer.remote_prefill import TransferError as TransferError
from pallas_attn.models.engine.kv_transfer.remote_prefill import serve_prefill as serve_prefill
from pallas_attn.models.engine.kv_transfer.transport import SocketTransport as SocketTransport
from pallas_attn.models.engine.kv_transfer.transport import Transport as Transport
from pallas_attn.models.engine.kv_transfer.transport import TransportError as TransportError
from pallas_attn.models.engine.kv_transfer.written_pages import ConsumerError as ConsumerError
from pallas_attn.models.engine.kv_transfer.written_pages import WrittenChunk as WrittenChunk
from pallas_attn.models.engine.kv_transfer.written_pages import WrittenFeed as WrittenFeed
from pallas_attn.models.engine.kv_transfer.written_pages import WrittenLayer as WrittenLayer
from pallas_attn.models.engine.logit_edits import LogitsProcessor as LogitsProcessor
from pallas_attn.models.engine.logprob_list import TokenLogprobs as TokenLogprobs
from pallas_attn.models.engine.outputs import EngineStats as EngineStats
from pallas_attn.models.engine.outputs import RequestOutput as RequestOutput
from pallas_attn.models.engine.outputs import StepRecord as StepRecord
from pallas_attn.models.engine.request import SamplingParams as SamplingParams
from pallas_attn.models.engine.request import StructuredOutputs as StructuredOutputs
from pallas_attn.models.engine.speculation.draft_model import DraftModelProposer as DraftModelProposer
from pallas_attn.models.engine.speculation.mtp import MTPProposer as MTPProposer
from pallas_attn.models.engine.speculation.ngram import NGramProposer as NGramProposer
from pallas_attn.models.engine.speculation.proposer import DraftRows as DraftRows
from pallas_attn.models.engine.speculation.proposer import DraftTree as DraftTree
from pallas_attn.models.engine.speculation.proposer import ObservedStep as ObservedStep
from pallas_attn.models.engine.speculation.proposer import Proposer as Proposer
from pallas_attn.models.engine.speculation.proposer import ProposerSizes as ProposerSizes
from pallas_attn.models.engine.speculation.proposer import Speculation as Speculation
from pallas_attn.models.engine.token_filter import BatchTokenFilter as BatchTokenFilter
from pallas_attn.models.engine.token_filter import FilterCall as FilterCall
from pallas_attn.models.engine.token_filter import TokenFilter as TokenFilter
from pallas_attn.models.engine.verify import Decoded as Decoded
from pallas_attn.models.engine.verify import Difference as Difference
from pallas_attn.models.engine.verify import PlainRun as PlainRun
from pallas_attn.models.engine.verify import RequestCheck as RequestCheck
from pallas_attn.models.engine.verify import Verification as Verification
