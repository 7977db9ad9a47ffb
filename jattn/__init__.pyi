from jattn.serving.config import EngineConfig as EngineConfig
from jattn.serving.frontend.llm import LLM as LLM
from jattn.serving.frontend.llm import RunStats as RunStats
from jattn.serving.frontend.outputs import Completion as Completion
from jattn.serving.frontend.outputs import Delta as Delta
from jattn.serving.frontend.outputs import RequestOutput as RequestOutput
from jattn.serving.frontend.prompts import TextPrompt as TextPrompt
from jattn.serving.frontend.prompts import TokensPrompt as TokensPrompt
from jattn.serving.sampling_params import SamplingParams as SamplingParams
from jattn.serving.steps.draft_model import DraftModel as DraftModel
from jattn.serving.steps.drafting import NgramDrafting as NgramDrafting
from jattn.serving.steps.logprobs import Logprob as Logprob
from jattn.serving.structured.params import StructuredOutputsParams as StructuredOutputsParams

__version__: str
