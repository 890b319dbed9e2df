"""An HTTP endpoint that speaks OpenAI's protocol, over the engine that validation and Triton use. For trying things."""

from llmforge.serving.http.access import AccessRecord, DoorKeeper, Doors, Doorway, is_loopback, read_keys
from llmforge.serving.http.app import create_app
from llmforge.serving.http.server import Address, run
from llmforge.serving.http.telemetry import Telemetry

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
