"""What clients of Triton are told where a request fails."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from llmforge.base.errors import EnvironmentLacks, ForgeError, InputError, Unavailable, UnsupportedError, UsageError


def failed(error: ForgeError) -> Any:
    """Make the `pb_utils.InferenceResponse` of a request that failed; clients see the error with its hint.

    Over HTTP Triton 2.51 gives every error the status 400: what is no fault of the client's says so by its first word.
    """
    code, kind = pb_utils.TritonError.INTERNAL, "internal: "
    if isinstance(error, Unavailable):
        code, kind = pb_utils.TritonError.UNAVAILABLE, "unavailable: "
    elif isinstance(error, UsageError | InputError):
        code, kind = pb_utils.TritonError.INVALID_ARG, ""
    elif isinstance(error, UnsupportedError | EnvironmentLacks):
        code, kind = pb_utils.TritonError.UNSUPPORTED, ""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{kind}{error}", code))
