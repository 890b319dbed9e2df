"""The runtime: loads an artifact and generates text. It needs neither torch nor transformers."""

from llmforge.runtime.runner import Chunk, Runner, Step, Usage, load
from llmforge.runtime.sampling import Sampling

__all__ = ["Chunk", "Runner", "Sampling", "Step", "Usage", "load"]
