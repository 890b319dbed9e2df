"""The options of `serve` that record what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmforge.cli.parameters import PATH, POSITIVE, grouped, require_given

if TYPE_CHECKING:
    from llmforge.serving.http import RecordOptions

recording_options = grouped(
    click.option(
        "--record", "record_folder", type=PATH, metavar="DIR",
        help="Record finished answers in DIR: times, lengths and hashes of prompts' blocks, in the form of Mooncake's "
        "traces, which `llmforge bench --trace` replays.",
    ),
    click.option(
        "--record-share", type=click.FloatRange(0, 1, min_open=True), metavar="SHARE", default=1.0,
        help="Share of requests to record.",
    ),
    click.option("--record-text", is_flag=True, help="Record prompts and answers, too."),
    click.option(
        "--record-redact", "pattern_file", type=PATH, metavar="FILE",
        help="Regular expressions, one a line; what they match is recorded as a keyed hash.",
    ),
    click.option(
        "--record-key", "record_key_file", type=PATH, metavar="FILE",
        help="Key of hashes, 16 to 64 bytes. Default: a random one that ends with the server.",
    ),
    click.option(
        "--record-size", "record_mib", type=POSITIVE, metavar="MIB", default=256,
        help="Largest size of DIR; the oldest files are removed.",
    ),
)  # fmt: skip


def record_options(given: Mapping[str, Any]) -> RecordOptions | None:
    """Take what is to be recorded of the options of `serve`; None: nothing.

    Raises:
        UsageError: an option says nothing without another, or a pattern or the key cannot be used.
        InputError: a file cannot be read.
    """
    from llmforge.serving import http as server

    folder: Path | None = given["record_folder"]
    if folder is None:
        require_given(
            "--record", "record_share", "record_text", "pattern_file", "record_key_file", "record_mib"
        )  # fmt: skip
        return None
    if not given["record_text"]:
        require_given("--record-text", "pattern_file")
    patterns, key = given["pattern_file"], given["record_key_file"]
    return server.RecordOptions(
        folder,
        share=given["record_share"],
        text=given["record_text"],
        patterns=() if patterns is None else server.read_patterns(patterns),
        key=None if key is None else server.read_key(key),
        size_bytes=given["record_mib"] << 20,
    )
