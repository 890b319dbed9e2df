"""The runtime: loads an artifact and generates text. It needs neither torch nor transformers."""

from llmforge.runtime.sampling.constraints import Constraint
from llmforge.runtime.sampling.options import Sampling
from llmforge.runtime.sampling.sampler import TokenLogprob
from llmforge.serving.engine import Engine
from llmforge.serving.engine_process import EngineProcess
from llmforge.serving.interface import EngineOptions, EngineStats
from llmforge.serving.request import Chunk, Receiver, Request, Usage
from llmforge.serving.runner import Runner, StepOutput, load
from llmforge.serving.sequence import Ticket

__all__ = [
    "Chunk",
    "Constraint",
    "Engine",
    "EngineOptions",
    "EngineProcess",
    "EngineStats",
    "Receiver",
    "Request",
    "Runner",
    "Sampling",
    "StepOutput",
    "Ticket",
    "TokenLogprob",
    "Usage",
    "load",
]
