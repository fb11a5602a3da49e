"""The inference engine: requests in, tokens out. The package imports `models.config` and `models.decoder`.

Modules in reading order:

- `engine`: the main loop and the public methods. `assembly` makes its parts, `tracked_request` and `step_log` are its
  records.
- `config`: sizes and policies. `request`, `outputs`: arguments and results.
- `scheduler`: plans steps and allocates pages, without jax. `group_sizes`: division of memory between cache groups.
- `runner`: weights, caches and compiled steps on the device. `compile_options`: XLA options. `sampler`: sampling.
- `step`: `plan` (made by the scheduler), `packed` (metadata as one array), `plain` (the step's function), `layered`
  (a step as several programs), `result`.
- `speculation`: `proposer` (interface), `step` (verifies drafts), `draft_control` (number of drafts); proposers
  `ngram`, `draft_model`, `mtp`.
- `kv_transfer`: `engine_transfers` (methods of the engine), `cached_pages` (exported pages), `cache_rows` and
  `split_rows` (page rows on one device and on a mesh), `written_pages` and `incoming_pages` (layer by layer),
  `remote_prefill` and `transport` (between two processes).
- `distributed`: `data_ranks` (data parallelism), `processes` (one engine in several processes).
- `verify`: checks tokens against an independent computation.
"""

from models.engine.config import EngineConfig as EngineConfig
from models.engine.distributed.processes import ProcessError as ProcessError
from models.engine.distributed.processes import Processes as Processes
from models.engine.engine import Engine as Engine
from models.engine.kv_transfer.cached_pages import CachedPages as CachedPages
from models.engine.kv_transfer.incoming_pages import IncomingPages as IncomingPages
from models.engine.kv_transfer.remote_prefill import HandOverError as HandOverError
from models.engine.kv_transfer.remote_prefill import RemotePrefill as RemotePrefill
from models.engine.kv_transfer.remote_prefill import TransferError as TransferError
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
