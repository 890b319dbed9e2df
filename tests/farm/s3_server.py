"""moto's S3 server as a program, with what S3 has and moto lacks: If-Match where an upload in parts is completed.

A request that writes a key is answered before the next one is looked at, as if a condition and its write were one step.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto import server
from moto.s3 import responses
from moto.s3.exceptions import PreconditionFailed

_S3 = responses.S3Response
_post, _put = _S3._key_response_post, _S3.put_object
_turn = threading.RLock()


def _conditional_post(self: Any, *arguments: Any, **named: Any) -> Any:
    with _turn:
        expected = self.headers.get("If-Match")
        if expected:
            there = self.backend.get_object(self.bucket_name, self.parse_key_name())
            if there is None or there.etag.strip('"') != expected.strip('"'):
                raise PreconditionFailed("If-Match")
        return _post(self, *arguments, **named)


def _conditional_put(self: Any) -> Any:
    with _turn:
        return _put(self)


if __name__ == "__main__":
    _S3._key_response_post = _conditional_post
    _S3.put_object = _conditional_put
    server.main(sys.argv[1:])
