"""An HTTP endpoint that speaks OpenAI's protocol, over the engine that validation and Triton use. For trying things."""

from llmforge.serve.app import create_app
from llmforge.serve.server import Address, run

__all__ = ["Address", "create_app", "run"]
