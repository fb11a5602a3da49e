"""The engine with text: generation from texts, token ids and chat messages.

>>> llm = LLM("Qwen/Qwen3-8B")
>>> for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
...     print(result.text)
>>> for delta in llm.stream([{"role": "user", "content": "Hello"}]):
...     print(delta.text, end="")

The package imports all other packages of `models` except `cli` and `server`. Modules in reading order: `hub` (finds the
folder of a model), `text_output` (text of a request while its tokens arrive, stop texts), `token_filters` (bad words
and grammars), `results`, `outputs` (outputs of prompts, streams), `llm`.
"""

from pallas_attn.models.engine import SamplingParams as SamplingParams
from pallas_attn.models.engine import StructuredOutputs as StructuredOutputs
from pallas_attn.models.llm.hub import model_folder as model_folder
from pallas_attn.models.llm.llm import LLM as LLM
from pallas_attn.models.llm.outputs import PreparedPrompt as PreparedPrompt
from pallas_attn.models.llm.outputs import Stream as Stream
from pallas_attn.models.llm.results import Completion as Completion
from pallas_attn.models.llm.results import Delta as Delta
from pallas_attn.models.llm.results import Generation as Generation
from pallas_attn.models.llm.results import Logprob as Logprob
from pallas_attn.models.llm.results import OutputTimes as OutputTimes
