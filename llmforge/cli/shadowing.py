"""The command `shadow`. Like all commands it imports what it needs when it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmforge.base.errors import UsageError
from llmforge.base.http_server import KEY_VARIABLE, HttpServer, ServerOptions
from llmforge.cli import output, verdicts
from llmforge.cli.parameters import PATH, POSITIVE, keep_quiet, options_record, require_given

if TYPE_CHECKING:
    from llmforge.gates.shadow import ShadowJudge, ShadowRecord
    from llmforge.measure.shadow import Mirror

_OF_SHADOW = ServerOptions("--shadow-key", "LLMFORGE_SHADOW_KEY", "--shadow-model")

_EXAMPLES = """\b
Examples:
  llmforge shadow http://a:8000 http://b:8000 --trace trace.jsonl --gates gates.yaml -o shadowed
  llmforge shadow http://a:8000 http://b:8000 --listen 9000 --gates gates.yaml
  llmforge shadow --verify shadowed
"""


@dataclass(frozen=True)
class ShadowOptions:
    """What the command `shadow` is given."""

    a: str | None
    b: str | None
    trace: Path | None
    port: int | None
    host: str
    stay: bool
    gates: Path | None
    alpha: float
    requests: int
    seconds: float | None
    concurrency: int
    timeout_s: float
    model: str | None
    shadow_model: str | None
    api_key: str | None
    shadow_key: str | None
    text: bool
    folder: Path | None
    verified: Path | None
    as_json: bool
    quiet: bool


@click.command(epilog=_EXAMPLES)
@click.argument("a", metavar="A", required=False)
@click.argument("b", metavar="B", required=False)
@click.option(
    "--trace", type=PATH, metavar="FILE.jsonl",
    help="Requests to send: lines with prompt, as `serve --record DIR --record-text` writes them, or messages.",
)  # fmt: skip
@click.option(
    "--listen", "port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Listen on PORT, pass requests on to A, and send copies to B; 0 picks a free one.",
)  # fmt: skip
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", help="With --listen: address to listen on.")
@click.option("--stay", is_flag=True, help="With --listen: pass requests on after the decision, until a signal.")
@click.option("--gates", type=PATH, metavar="FILE.yaml", help="Limits that decide the verdict.")
@click.option(
    "--alpha", type=click.FloatRange(0, 0.5, min_open=True), metavar="SHARE", default=0.05,
    help="How often a limit is ever passed or failed wrongly, at most.",
)  # fmt: skip
@click.option(
    "--requests",
    type=click.IntRange(1, 20_000),
    metavar="N",
    default=20_000,
    help="End after N requests at the latest.",
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), metavar="S", help="End after S seconds at the latest."
)
@click.option("--concurrency", type=POSITIVE, metavar="N", default=4, help="Copies at once, and requests of a trace.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), metavar="S", default=60.0,
              help="How long a server may say nothing.")  # fmt: skip
@click.option("--model", metavar="NAME", help="With --trace: A's model. Default: the first that it serves.")
@click.option(
    "--shadow-model", metavar="NAME",
    help="B's model. Default: with --trace the first that it serves, with --listen that of the request.",
)  # fmt: skip
@click.option(
    "--api-key", metavar="KEY", envvar=KEY_VARIABLE, show_envvar=True,
    help="Key of A, sent as `Authorization: Bearer KEY`; with --listen in place of the clients'. Other users of this "
    "machine may see the options of a command, but not its environment.",
)  # fmt: skip
@click.option("--shadow-key", metavar="KEY", envvar=_OF_SHADOW.variable, show_envvar=True, help="Key of B.")
@click.option("--text", is_flag=True, help="Show some answers that differ in the record and its page.")
@click.option(
    "-o", "--output", "folder", type=PATH, metavar="DIR",
    help="Folder for the sealed record (behind those that it has), report.html and junit.xml.",
)  # fmt: skip
@click.option(
    "--verify", "verified", type=PATH, metavar="DIR",
    help="Make the bounds and verdicts in DIR again from what was measured, and end as the newest did.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write the record as JSON.")
@click.option("-q", "--quiet", is_flag=True, callback=keep_quiet, help="Hide progress and notes.")
@options_record(ShadowOptions)
def shadow(options: ShadowOptions) -> None:
    """Send requests to server A and copies of them to server B, and decide whether B may take A's place.

    Both answers to a request are compared: errors, agreement, behaviour, length, latency. Bounds hold at every moment,
    so it stops as soon as the gates are decided. The exit code tells the verdict. A never waits for B.
    """
    from llmforge.gates import shadow as gates
    from llmforge.report import shadow_text

    made = gates.read(options.verified)[-1] if options.verified is not None else _shadowed(options)
    if options.verified is None and options.folder is not None:
        with output.writing(options.folder):
            _, made = gates.seal(options.folder, made)
            (options.folder / "report.html").write_text(shadow_text.page(made), encoding="utf-8")
            (options.folder / "junit.xml").write_text(shadow_text.junit(made), encoding="utf-8")
    if options.as_json:
        output.write_data(made.to_json())
    else:
        output.write_lines(*shadow_text.text(made))
    verdicts.end(
        made.verdict, [gates.headline(made)], artifact=options.folder or Path(), pending=False,
        failed="keep A; look at the answers that differ: --text -o DIR", undecided="send more requests",
    )  # fmt: skip


def _shadowed(options: ShadowOptions) -> ShadowRecord:
    from llmforge.cli import console
    from llmforge.gates import shadow as gates
    from llmforge.measure.shadow import Mirror, ReplyPair
    from llmforge.recipe import PairedGatesFile

    if options.a is None or options.b is None or (options.trace is None) == (options.port is None):
        raise UsageError("shadow requires A, B and either --trace or --listen", hint="llmforge help shadow")
    if options.port is None:
        require_given("--listen", "host", "stay")
    else:
        require_given("--trace", "model")
    first, second = HttpServer(options.a, options.api_key), HttpServer(options.b, options.shadow_key, _OF_SHADOW)
    limits = {} if options.gates is None else dict(PairedGatesFile.load(options.gates).gates)
    gates.check(limits, str(options.gates))
    judge = gates.ShadowJudge(limits, alpha=options.alpha, most=options.requests, text=options.text)
    with console.traced("shadow", quiet=options.quiet, trace=None) as progress:
        progress.stage("Compare answers")

        def observe(pair: ReplyPair) -> None:
            if judge.observe(pair):
                mirror.ended.set()
            progress.advance(judge.requests, options.requests)

        shadow_model = options.shadow_model
        if options.trace is not None and shadow_model is None:
            from llmforge.measure.completions import Completions

            shadow_model = Completions(second).model
        mirror = Mirror(second, observe, model=shadow_model, workers=options.concurrency, timeout_s=options.timeout_s)
        if options.trace is not None:
            _replay(options, options.trace, first, mirror)
        else:
            _listen(options, first, mirror, judge)
    source = f"the trace {options.trace.name}" if options.trace is not None else "clients"
    return judge.record(first.url, second.url, source, mirror.dropped)


def _replay(options: ShadowOptions, trace: Path, first: HttpServer, mirror: Mirror) -> None:
    from threading import Timer

    from llmforge.measure import shadow as measure
    from llmforge.measure.completions import Completions

    requests = measure.read_requests(trace, options.model or Completions(first).model)
    timer = Timer(options.seconds or 0, mirror.ended.set)
    timer.daemon = True
    if options.seconds is not None:
        timer.start()
    measure.replay(
        requests[: options.requests], first, mirror, workers=options.concurrency, timeout_s=options.timeout_s
    )
    timer.cancel()


def _listen(options: ShadowOptions, first: HttpServer, mirror: Mirror, judge: ShadowJudge) -> None:
    """Pass requests on until it is decided, the time is over, or a signal comes."""
    from llmforge.base.signals import Interrupted
    from llmforge.cli import console
    from llmforge.measure import shadow_proxy

    end = None if options.seconds is None else time.monotonic() + options.seconds
    with shadow_proxy.listening((options.host, options.port or 0), first, mirror, timeout_s=options.timeout_s) as proxy:
        host, port = proxy.server_address[:2]
        console.say(f"llmforge passes requests at http://{host!s}:{port} on to {first.url}. Press Ctrl-C to stop.")
        try:
            while not mirror.ended.wait(0.1) and (end is None or time.monotonic() < end):
                pass
            mirror.ended.set()
            if options.stay:
                console.say(f"decided after {judge.requests} requests; requests are still passed on")
                while True:
                    time.sleep(1)
        except Interrupted:  # asked to stop: what was found until now is told
            mirror.ended.set()
