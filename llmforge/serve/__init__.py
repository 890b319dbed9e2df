"""An HTTP endpoint that speaks OpenAI's protocol, over the engine that validation and Triton use. For trying things."""

from llmforge.serve.app import create_app
from llmforge.serve.doors import AccessRecord, DoorKeeper, Doors, Doorway, is_loopback, read_keys
from llmforge.serve.server import Address, run
from llmforge.serve.telemetry import Telemetry

__all__ = [
    "AccessRecord",
    "Address",
    "DoorKeeper",
    "Doors",
    "Doorway",
    "Telemetry",
    "create_app",
    "is_loopback",
    "read_keys",
    "run",
]
