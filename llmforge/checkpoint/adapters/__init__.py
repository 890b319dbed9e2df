"""Low-rank adapters as peft saves them: a folder (`folder`), and what a checkpoint becomes with some (`merging`)."""

from llmforge.checkpoint.adapters.folder import Adapter, LowRankUpdate
from llmforge.checkpoint.adapters.merging import Merge
from llmforge.checkpoint.adapters.source import AdapterSource

__all__ = ["Adapter", "AdapterSource", "LowRankUpdate", "Merge"]
