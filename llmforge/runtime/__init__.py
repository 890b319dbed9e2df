"""The runtime: loads an artifact and generates text. It needs neither torch nor transformers."""

from llmforge.runtime.sampling.constraints import Constraint
from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.serving.engine import Engine, EngineOptions
from llmforge.runtime.serving.request import Chunk, Receiver, Request, TokenLogprob, Usage
from llmforge.runtime.serving.runner import Runner, Step, load
from llmforge.runtime.serving.sequence import Ticket
from llmforge.runtime.serving.stats import EngineStats

__all__ = [
    "Chunk",
    "Constraint",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "Receiver",
    "Request",
    "Runner",
    "Sampling",
    "Step",
    "Ticket",
    "TokenLogprob",
    "Usage",
    "load",
]
