"""The runtime: loads an artifact and generates text. It needs neither torch nor transformers."""

from llmforge.runtime.request import Chunk, Receiver, Request, TokenLogprob, Usage
from llmforge.runtime.runner import Runner, Step, load
from llmforge.runtime.sampling import Sampling

__all__ = ["Chunk", "Receiver", "Request", "Runner", "Sampling", "Step", "TokenLogprob", "Usage", "load"]
