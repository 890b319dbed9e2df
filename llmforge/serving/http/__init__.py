"""An HTTP endpoint that speaks OpenAI's protocol, over the engine that validation and Triton use. For trying things."""

from llmforge.serving.http.access import AccessPolicy, AccessRecord, AuthMiddleware, ServerState, is_loopback
from llmforge.serving.http.app import create_app
from llmforge.serving.http.encoder_app import create_encoder_app
from llmforge.serving.http.limits import LIMITS, ApiKey, read_keys
from llmforge.serving.http.recording import Recorder, RecordOptions, read_key, read_patterns
from llmforge.serving.http.server import Address, run
from llmforge.serving.http.telemetry import Telemetry

__all__ = [
    "LIMITS",
    "AccessPolicy",
    "AccessRecord",
    "Address",
    "ApiKey",
    "AuthMiddleware",
    "RecordOptions",
    "Recorder",
    "ServerState",
    "Telemetry",
    "create_app",
    "create_encoder_app",
    "is_loopback",
    "read_key",
    "read_keys",
    "read_patterns",
    "run",
]
