"""The runtime: loads an artifact and generates text. It needs neither torch nor transformers."""

from llmforge.runtime.answer import Ticket
from llmforge.runtime.constraints import Constraint
from llmforge.runtime.engine import Engine, EngineOptions
from llmforge.runtime.request import Chunk, Receiver, Request, TokenLogprob, Usage
from llmforge.runtime.runner import Runner, Step, load
from llmforge.runtime.sampling import Sampling
from llmforge.runtime.stats import EngineStats

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
