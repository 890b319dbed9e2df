"""What Python programs and notebooks call: the commands as functions, typed. `import llmforge` has these names."""

from llmforge.api.building import Built, build
from llmforge.api.judging import Judged, evaluate, gate
from llmforge.api.model import Answer, Model, load
from llmforge.api.planned import Plans, plan

__all__ = ["Answer", "Built", "Judged", "Model", "Plans", "build", "evaluate", "gate", "load", "plan"]
