"""The command line through its runner, and as a process where it matters: exit code, both streams, message."""

import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from rich.console import Console

import llmforge.compile
from llmforge import __version__, artifact, passes, targets
from llmforge import serving as runtime
from llmforge.artifact import admission
from llmforge.base import errors
from llmforge.cache import Cache, Key
from llmforge.cli import building, cli, console, describe
from llmforge.gates import confirmed
from llmforge.gates.decision import Verdict
from llmforge.recipe import Recipe
from llmforge.runtime.sampling.constraints import Constraint
from llmforge.serving import Chunk, Sampling, TokenLogprob, Usage

from ..samples import stored
from ..samples.reports import make
from ..samples.sample_passes import Squeeze

ROOT = Path(__file__).parents[2]
FP32 = ROOT / "recipes" / "fp32.yaml"


def invoke(*args: str, stdin: bytes | None = None) -> Result:
    result = CliRunner().invoke(cli, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def process(*args: str, code: str = "from llmforge.cli import main; main()") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)


# build


@dataclass
class BuildResult:
    path: Path
    report: Any
    previous: None = None


class FakePipeline:
    """Stands for llmforge.compile.pipeline: the command line owns arguments, streams and exit codes, not the build."""

    def __init__(self, verdict: Verdict = Verdict.PASS, error: BaseException | None = None) -> None:
        self.verdict = verdict
        self.error = error
        self.called_with: tuple[Recipe, Path] | None = None
        self.cache: Callable[[], Cache] | None = None

    def build(
        self,
        recipe: Recipe,
        out: Path,
        progress: Any,
        cache: Callable[[], Cache] | None,
        *,
        pythons: Any,
        checked: Any,
        overlap: Any,
    ) -> BuildResult:
        assert pythons == {}
        assert not checked.publish_failed
        self.called_with = (recipe, out)
        self.cache = cache
        progress.stage("Trace the checkpoint")
        progress.advance(1, 2)
        progress.stage("Measure quality")
        if self.error is not None:
            raise self.error
        return BuildResult(out / recipe.name / "0123456789ab", make(verdict=self.verdict))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setattr(llmforge.compile, "pipeline", fake, raising=False)
    return fake


def test_build_uses_the_cache_that_is_asked_for(
    fake: FakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "cache"))
    assert invoke("build", str(FP32)).exit_code == 0
    assert fake.cache is not None
    assert (fake.cache().folder, fake.cache().limit_bytes) == (tmp_path / "cache", 20 * 10**9)
    assert invoke("build", str(FP32), "--cache-size", "1000").exit_code == 0
    assert fake.cache().limit_bytes == 1000
    assert invoke("build", str(FP32), "--no-cache").exit_code == 0
    assert fake.cache is None
    refused = invoke("build", str(FP32), "--no-cache", "--cache-size", "1000")
    assert (refused.exit_code, "cannot be used with --no-cache" in refused.stderr) == (2, True)


def test_build_uses_the_remote_cache_that_is_asked_for(
    fake: FakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "cache"))
    private = ed25519.Ed25519PrivateKey.generate()
    public, secret, url = tmp_path / "pub.pem", tmp_path / "key.pem", f"file://{tmp_path}/remote"
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    secret.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with Cache(tmp_path / "cache") as cache:
        cache.put(Key("proof", {}), lambda folder: None)
    assert invoke("cache", "push", "--remote-cache", url, "--sign", str(secret)).stdout == "pushed 1 entries\n"
    monkeypatch.setenv("LLMFORGE_CACHE", str(tmp_path / "other"))
    assert invoke("build", str(FP32), "--remote-cache", url, "--cache-key", str(public)).exit_code == 0
    assert fake.cache is not None
    with fake.cache() as cache:
        assert cache.find(Key("proof", {})) is not None
    for given, says in ((["--remote-cache", url], "requires the key"), (["--cache-key", str(public)], "no --remote")):
        refused = invoke("build", str(FP32), *given)
        assert (refused.exit_code, says in refused.stderr) == (2, True)


def test_build_ends_with_the_path(fake: FakePipeline, tmp_path: Path) -> None:
    artifact = tmp_path / "docs-llama-fp32" / "0123456789ab"
    (artifact / "triton" / "docs-llama-fp32").mkdir(parents=True)
    result = invoke("build", str(FP32), "--out", str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == str(artifact)
    assert "kld_mean" in result.stdout
    assert re.sub(r": about \d+\.\d s$", "", result.stderr, flags=re.MULTILINE).splitlines() == [
        "Load llmforge",
        "Trace the checkpoint",
        "Measure quality",
        f"its report is {artifact}/report/report.html",
        f'next: llmforge run {artifact} "PROMPT"',
        f"      llmforge gate {artifact}",
        f"      llmforge triton {artifact} -o models",
    ]


def test_a_model_with_a_chat_template_is_talked_to_next(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(pending=False, backend="onnxruntime")
    (tmp_path / "tokenizer").mkdir()
    assert next(building._next_steps(tmp_path, engine)).endswith('"PROMPT"')
    (tmp_path / "tokenizer" / "chat_template.jinja").touch()
    assert next(building._next_steps(tmp_path, engine)) == f"next: llmforge run {tmp_path} --chat"


def test_triton_is_next_where_the_build_wrote_its_repository(tmp_path: Path) -> None:
    """It writes none of a GGUF file, nor of a reranker that classifies: `llmforge triton` refuses them."""
    for backend in ("gguf", "compressed-tensors", "onnxruntime"):
        artifact = tmp_path / backend
        engine: Any = SimpleNamespace(pending=False, backend=backend)
        assert not any("llmforge triton" in line for line in building._next_steps(artifact, engine))
        (artifact / "triton" / "name").mkdir(parents=True)
        [*_, last] = building._next_steps(artifact, engine)
        assert last == f"      llmforge triton {artifact} -o models"


@pytest.mark.parametrize(
    ("engine", "first"),
    [
        ({"pending": True}, "next, on the target: llmforge build --finish docs-llama-fp32/0123456789ab RECIPE"),
        ({"backend": "gguf"}, "next: llama-server -m artifacts/docs-llama-fp32/0123456789ab/engine/model.gguf"),
        ({}, 'next: llmforge run docs-llama-fp32/0123456789ab "PROMPT"'),
    ],
)
def test_build_says_what_comes_next(
    fake: FakePipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    first: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make(verdict=Verdict.PASS)
    made = made.model_copy(update={"engine": made.engine.model_copy(update=engine)})
    path = tmp_path / "artifacts" / "docs-llama-fp32" / "0123456789ab"
    monkeypatch.setattr(fake, "build", lambda *_, **__: BuildResult(path, made))
    said = invoke("build", str(FP32)).stderr.splitlines()
    assert [line for line in said if line.startswith("next")] == [first]


def test_build_quietly_says_nothing_on_standard_error(fake: FakePipeline, tmp_path: Path) -> None:
    assert invoke("build", str(FP32), "--out", str(tmp_path), "--quiet").stderr == ""


def test_build_json_is_one_object(fake: FakePipeline, tmp_path: Path) -> None:
    written = json.loads(invoke("build", str(FP32), "--out", str(tmp_path), "--json").stdout)
    assert written["artifact"] == str(tmp_path / "docs-llama-fp32" / "0123456789ab")
    assert written["report"]["verdict"] == "pass"
    assert written["report"]["schema"] == 3


def test_build_writes_to_artifacts_and_takes_overrides(fake: FakePipeline) -> None:
    invoke("build", str(FP32), "--set", "engine.max_context=600", "--set", "gates.kld_mean.max=0.5")
    assert fake.called_with is not None
    recipe, out = fake.called_with
    assert out == Path("artifacts")
    assert recipe.engine.max_context == 600
    assert recipe.gates["kld_mean"].max == 0.5


@pytest.mark.parametrize(
    ("verdict", "code", "says"),
    [
        (Verdict.PASS, 0, ""),
        (Verdict.NONE, 0, ""),
        (Verdict.FAIL, 3, "error: a gate failed"),
        (Verdict.INCONCLUSIVE, 4, "error: a gate is inconclusive"),
    ],
)
def test_gates_decide_the_exit_code(fake: FakePipeline, tmp_path: Path, verdict: Verdict, code: int, says: str) -> None:
    fake.verdict = verdict
    result = invoke("build", str(FP32), "--out", str(tmp_path))
    assert result.exit_code == code
    assert says in result.stderr
    assert result.stdout.splitlines()[-1].endswith("0123456789ab"), "the artifact is there, whatever its gates say"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CheckpointError("bad", hint="do this"), 5),
        (errors.DataError("bad", hint="do this"), 5),
        (errors.UnsupportedError("bad", hint="do this"), 6),
        (errors.VerificationError("bad", hint="do this"), 7),
        (errors.EnvironmentLacks("bad", hint="do this"), 8),
        (errors.VersionMismatch("bad", hint="do this"), 8),
        (errors.UsageError("bad", hint="do this"), 2),
    ],
)
def test_an_error_is_one_message_with_its_exit_code(
    fake: FakePipeline, tmp_path: Path, error: errors.ForgeError, code: int
) -> None:
    fake.error = error
    result = invoke("build", str(FP32), "--out", str(tmp_path), "--quiet")
    assert result.exit_code == code
    assert result.stderr == "error: bad\nhint: do this\n"
    assert result.stdout == ""


def test_brackets_of_a_message_are_no_markup(fake: FakePipeline, tmp_path: Path) -> None:
    fake.error = errors.DataError("shape [B, S] of [red]x[/red]")
    result = invoke("build", str(FP32), "--out", str(tmp_path), "--quiet")
    assert result.stderr == "error: shape [B, S] of [red]x[/red]\n"


def test_interrupting_is_no_bug(fake: FakePipeline, tmp_path: Path) -> None:
    fake.error = KeyboardInterrupt()
    result = invoke("build", str(FP32), "--out", str(tmp_path), "--quiet")
    assert result.exit_code == 130
    assert result.stderr == (
        "interrupted by SIGINT: nothing was published; run the same command to go on from what the cache kept\n"
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["gone.yaml"], "gone.yaml: cannot be read"),
        ([str(FP32), "--set", "engine.max_contxt=1"], "did you mean 'max_context'?"),
        ([str(FP32), "--set", "engine.max_batch=0"], "--set engine.max_batch=0: engine.max_batch: must be"),
        ([str(FP32), "--set", "passes.fuse-norms.speed=1"], "passes.fuse-norms.speed: unknown key"),
        ([str(FP32), "--fast"], "No such option"),
        ([], "no recipe given"),
    ],
)
def test_a_wrong_recipe_or_usage_is_2(fake: FakePipeline, args: list[str], says: str) -> None:
    result = invoke("build", *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert fake.called_with is None


# run


class FakeRunner:
    def __init__(self) -> None:
        self.asked: list[tuple[object, Sampling]] = []

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return [len(messages[0]["content"]), 7]

    def generate(self, prompt: object, sampling: Sampling, adapter: str = "") -> Iterator[Chunk]:
        self.asked.append((prompt, sampling))
        logprob = None if sampling.logprobs is None else TokenLogprob(5, -0.5, ((5, -0.5),))
        yield Chunk("Grüße", 5, logprob=logprob)
        yield Chunk("", 6)
        yield Chunk("!", None, "length", Usage(3, 2, 1.5, 0.5))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    fake = FakeRunner()
    monkeypatch.setattr(runtime, "load", lambda path, template: fake)
    monkeypatch.setattr(artifact.Artifact, "open", lambda path: SimpleNamespace(path=path))
    admitted = admission.AdmittedArtifact(None, "pass", ())  # type: ignore[arg-type]
    monkeypatch.setattr(admission, "admit", lambda path, **options: admitted)
    monkeypatch.setattr(confirmed, "confirm", lambda opened: None)
    return fake


def test_run_streams_text(runner: FakeRunner) -> None:
    result = invoke("run", "art", "Hello")
    assert result.exit_code == 0
    assert result.stdout == "Grüße!\n"
    assert result.stderr == ""
    assert runner.asked == [("Hello", Sampling(max_tokens=256))]


def test_run_passes_its_options_on(runner: FakeRunner) -> None:
    invoke(
        "run", "art", "Hello", "--max-tokens", "5", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "40",
        "--seed", "3", "--stop", "\n", "--stop", "END", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--regex", "a+", "--logprobs", "2", "--json",
    )  # fmt: skip
    assert runner.asked[0][1] == Sampling(
        temperature=0.7, top_p=0.9, top_k=40, seed=3, max_tokens=5, stop=("\n", "END"), min_p=0.1,
        repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, constraint=Constraint("regex", "a+"),
        logprobs=2,
    )  # fmt: skip


def test_run_reads_standard_input_less_its_last_newline(runner: FakeRunner) -> None:
    invoke("run", "art", "-", stdin="zwei\nZeilen ü\n\n".encode())
    assert runner.asked[0][0] == "zwei\nZeilen ü\n"


def test_run_refuses_standard_input_that_is_no_text(runner: FakeRunner) -> None:
    result = invoke("run", "art", "-", stdin=b"ab\xff")
    assert result.exit_code == 2
    assert "byte 2 is not UTF-8" in result.stderr


def test_run_chat_goes_through_the_template(runner: FakeRunner) -> None:
    invoke("run", "art", "Hello", "--chat")
    assert runner.asked[0][0] == [5, 7]


def test_run_json_is_one_object(runner: FakeRunner) -> None:
    assert json.loads(invoke("run", "art", "Hello", "--json").stdout) == {
        "text": "Grüße!",
        "token_ids": [5, 6],
        "finish_reason": "length",
        "usage": vars(Usage(3, 2, 1.5, 0.5)),
    }


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--top-p", "0"], ["--max-tokens", "0"], ["--stop", ""]])
def test_run_refuses_options_out_of_range(runner: FakeRunner, options: list[str]) -> None:
    assert invoke("run", "art", "Hello", *options).exit_code == 2
    assert runner.asked == []


def test_run_reads_a_json_schema(runner: FakeRunner, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert invoke("run", "art", "Hello", "--json-schema", str(schema)).exit_code == 0
    assert runner.asked[0][1].constraint == Constraint.json_schema({"type": "object"})


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("{", "not valid JSON"), ("[]", "list; expected a JSON schema, an object")],
)
def test_run_refuses_a_file_that_is_no_json_schema(
    runner: FakeRunner, tmp_path: Path, text: str | None, message: str
) -> None:
    schema = tmp_path / "schema.json"
    if text is not None:
        schema.write_text(text)
    result = invoke("run", "art", "Hello", "--json-schema", str(schema))
    assert result.exit_code == 2
    assert message in result.stderr
    assert runner.asked == []


def test_run_refuses_what_does_not_go_together(runner: FakeRunner) -> None:
    result = invoke("run", "art", "Hello", "--json-schema", "x.json", "--regex", "a")
    assert (result.exit_code, "--json-schema cannot be used with --regex" in result.stderr) == (2, True)
    result = invoke("run", "art", "Hello", "--logprobs", "2")
    assert (result.exit_code, "--logprobs requires --json" in result.stderr) == (2, True)
    assert runner.asked == []


def test_run_json_shows_log_probabilities_that_were_asked_for(runner: FakeRunner) -> None:
    shown = json.loads(invoke("run", "art", "Hello", "--json", "--logprobs", "1").stdout)
    assert shown["logprobs"] == [{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5]]}]


def test_run_of_a_folder_of_versions_names_them(published: artifact.Artifact) -> None:
    result = invoke("run", str(published.path.parent), "Hello")
    assert result.exit_code == 5
    assert published.manifest.version in result.stderr


def test_run_of_no_artifact_is_an_error(tmp_path: Path) -> None:
    result = invoke("run", str(tmp_path), "Hello")
    assert result.exit_code == 5
    assert result.stderr.startswith("error: ")


# inspect


@pytest.fixture
def published(tmp_path: Path) -> artifact.Artifact:
    with artifact.staging(tmp_path / "artifacts", "sample") as folder:
        (folder / "engine").mkdir()
        (folder / "engine" / "model.onnx").write_bytes(b"graph")
        recipe = {"name": "sample", "gates": {"kld_mean": {"max": 0.03}}}
        return stored.publish(folder, recipe=recipe, requires={"onnxruntime": "1.31.1"})


def test_inspect_shows_what_the_artifact_is(published: artifact.Artifact) -> None:
    shown = invoke("inspect", str(published.path)).stdout
    for part in (
        "sample",
        published.manifest.version,
        "cpu-avx2",
        "onnxruntime 1.31.1",
        "engine/model.onnx",
        "kld_mean",
    ):
        assert part in shown


def test_inspect_json_is_the_manifest(published: artifact.Artifact) -> None:
    shown = json.loads(invoke("inspect", str(published.path), "--json").stdout)
    assert shown.pop("verdict") == "pass"
    assert shown.pop("content_digest") == published.manifest.content_digest
    (record,) = shown.pop("evidence")
    assert (published.path / record["record"]).is_file()
    assert shown == json.loads((published.path / "manifest.json").read_text())


def test_inspect_verifies(published: artifact.Artifact) -> None:
    good = invoke("inspect", str(published.path), "--verify")
    assert good.exit_code == 0
    assert "verified: 1 files of content, 1 of evidence; gates: pass" in good.stdout
    model = published.path / "engine" / "model.onnx"
    model.chmod(0o644)
    model.write_bytes(b"grapf")
    assert invoke("inspect", str(published.path)).exit_code == 0
    bad = invoke("inspect", str(published.path), "--verify")
    assert bad.exit_code == 5
    assert "engine/model.onnx" in bad.stderr


def test_inspect_of_a_report_of_another_version_is_refused(published: artifact.Artifact) -> None:
    old = published.path / published.evidence[0].path
    raw = old.read_bytes().replace(b'"passes":', b'"steps":')
    old.unlink()
    (published.path / "evidence" / f"{hashlib.sha256(raw).hexdigest()}.json").write_bytes(raw)
    result = invoke("inspect", str(published.path))
    assert result.exit_code == 5
    assert "not a report of this version" in result.stderr


# passes, targets, schema


def test_passes_are_listed_with_their_numerics() -> None:
    lines = invoke("passes").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[cls.name, cls.numerics.value] for cls in passes.ALL]
    assert [entry["name"] for entry in json.loads(invoke("passes", "--json").stdout)] == [
        cls.name for cls in passes.ALL
    ]


@pytest.mark.parametrize("cls", passes.ALL, ids=lambda cls: cls.name)
def test_every_pass_describes_itself(cls: Any) -> None:
    text = invoke("passes", cls.name).stdout
    assert text.startswith(f"{cls.name} ({cls.numerics.value})")
    facts = json.loads(invoke("passes", cls.name, "--json").stdout)
    assert facts["summary"].endswith(".")
    for option in facts["options"].get("properties", {}):
        assert f"  {option}: " in text


def test_options_show_type_bounds_and_default() -> None:
    head, options = describe.pass_text(Squeeze).split("Options\n")
    assert "squeeze-weights (lossy)" in head
    assert "Requires: ground" in head
    assert options.splitlines() == [
        "  budget: mapping; required",
        "      what it may cost",
        "      kld_mean: number, above 0; required",
        "          maximum mean KL divergence from the graph before the pass, in nats per token; of embedders and "
        "rerankers, per text",
        "  bits: 4 or 8; default 4",
        "      bits of a weight",
        "  block_size: integer, at least 16, at most 256; default 32",
        "      neighbours that share a scale",
        "  damping: number, above 0; default 0.01",
        "      share of the mean diagonal",
        "  method: plain or calibrated; default plain",
        "  layers: list; default []",
    ]


def test_targets_are_listed_and_shown_with_sources() -> None:
    assert [line.split()[0] for line in invoke("targets").stdout.splitlines()] == targets.names()
    shown = invoke("targets", "l4").stdout
    assert "compute capability  8.9" in shown
    assert "bandwidth  300 GB/s\n    NVIDIA AIConfigurator" in shown
    assert "int4, dense  485 TOP/s (not verified)\n    NVIDIA L4 datasheet" in shown
    assert "pcie, 8 devices, one direction  32 GB/s" in shown
    assert "price, 2026-03  0.44 USD per hour (not verified)" in shown
    assert "tensorrt-rtx  computes in bf16, fp16; weights bf16, fp16, fp8, int4, int8; cache bf16, fp16" in shown
    assert json.loads(invoke("targets", "l4", "--json").stdout)["rates"]["int8"]["value"] == 242
    assert invoke("targets", "local").stdout.startswith(targets.local().name)
    assert len(json.loads(invoke("targets", "--json").stdout)) == len(targets.names())


@pytest.mark.parametrize(
    ("args", "hint"), [(["passes", "fuse-norm"], "fuse-norms"), (["targets", "rtx-409"], "rtx-4090")]
)
def test_an_unknown_name_is_2_with_the_nearest(args: list[str], hint: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"hint: did you mean '{hint}'?" in result.stderr


def test_schema_is_a_json_schema() -> None:
    written = json.loads(invoke("schema").stdout)
    assert written["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "fuse-norms" in written["$defs"]


def test_version() -> None:
    assert invoke("--version").stdout == f"llmforge, version {__version__}\n"


def test_help_names_every_exit_code() -> None:
    text = invoke("--help").stdout
    for code in range(9):
        assert f"  {code}  " in text


# progress


def test_progress_on_a_terminal_finishes_its_stages() -> None:
    screen = io.StringIO()
    with console.TerminalProgress(Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.stage("Trace")
        progress.advance(1, 3)
        progress.stage("Quantize")
    last_frame = screen.getvalue().rpartition("\x1b[1A\x1b[2K")[2]  # up one line, erase it
    lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", last_frame).splitlines()
    assert [line.split()[:2] for line in lines] == [["✓", "Trace"], ["✓", "Quantize"]]
    assert "━" in screen.getvalue()
    assert "━" not in last_frame  # what is done has no bar


def test_what_is_predicted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = io.StringIO(), [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    expected = (("Trace", 2.0), ("Calibrate", 100.0), ("Write", 60.0))
    with console.PlainProgress(log, expected) as progress:
        for seconds, step in ((0.0, "Trace"), (2.0, "Calibrate"), (2.0, 0), (42.0, 2), (92.0, 9), (102.0, "Write")):
            now[0] = seconds
            if isinstance(step, str):
                progress.stage(step)
            else:
                progress.advance(step, 10)
    assert log.getvalue().splitlines() == [
        "Trace",
        "Trace: took 2.0 s",
        "Calibrate: about 1 min 40 s",
        "Calibrate: 2/10, about 1 min 36 s left, 2 min 36 s of the build",
        "Calibrate: 9/10, about 10.0 s left, 1 min 10 s of the build",
        "Calibrate: took 100.0 s",
        "Write: about 1 min 00 s",
    ]


@pytest.mark.parametrize(("width", "shown"), [(120, "~1:36 left, build ~2:36"), (80, "~1:36 left")])
def test_a_terminal_shows_the_time_left(monkeypatch: pytest.MonkeyPatch, width: int, shown: str) -> None:
    now = [0.0]
    screen = io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    terminal = Console(file=screen, force_terminal=True, width=width, get_time=lambda: now[0])
    expected = (("Trace", 2.0), ("Calibrate", 100.0), ("Write", 60.0))
    with console.TerminalProgress(terminal, expected) as progress:
        progress.stage("Trace")
        now[0] = 2.0
        progress.stage("Calibrate")
        progress.advance(0, 10)
        now[0] = 42.0
        progress.advance(2, 10)
        progress._bars.refresh()
        lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.getvalue()).splitlines()
    assert any(line.rstrip().endswith(shown) and "2/10" in line for line in lines), lines
    assert ("build" in screen.getvalue()) == (width == 120)


def test_progress_without_a_terminal_tells_long_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = io.StringIO(), [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    steps = ((0.0, "Trace"), (0.5, "Calibrate"), (4.0, 1), (11.0, 2), (12.0, 3), (12.5, "Write"), (20.0, None))

    def work() -> None:
        with console.PlainProgress(log) as progress:
            for seconds, step in steps:
                now[0] = seconds
                if isinstance(step, str):
                    progress.stage(step)
                elif step is not None:
                    progress.advance(step, 6)
            raise errors.DataError("bad")

    with pytest.raises(errors.DataError):
        work()
    assert log.getvalue().splitlines() == [
        "Trace",
        "Calibrate",
        "Calibrate: 2/6, about 28.0 s left",
        "Calibrate: took 12.0 s",
        "Write",
        "Write: failed after 7.5 s",
    ]


# as a process


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom llmforge.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = process("--help", code=code)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "llmforge.cli" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "numpy", "pydantic", "rich"})
    assert min(seconds) < 0.5


def test_a_bug_ends_with_a_traceback_and_1() -> None:
    code = (
        "from llmforge import cli, targets\n"
        "targets.names = lambda: 1 / 0\n"
        "cli.main()"
    )  # fmt: skip
    done = process("targets", code=code)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("This is a bug in llmforge. Please report it")
    done = process("targets", "--log-format", "json", code=code)
    assert done.returncode == 1
    assert json.loads(done.stderr)["kind"] == "bug"  # one line, and no more


def test_an_error_shows_no_traceback() -> None:
    done = process("targets", "nothing-like-it")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["schema", "--help"])
def test_a_reader_that_goes_away_is_no_error(words: str) -> None:
    command = [sys.executable, "-c", "from llmforge.cli import main; main()", words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.close()
        assert writer.stderr is not None
        assert writer.stderr.read() == b""
        assert writer.wait(timeout=60) == 141


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_with_one_line() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits that it is ignored
        "from llmforge import cli, targets\n"
        "def names():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "targets.names = names\n"
        "cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "targets"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "ready\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.stderr is not None
        assert waiting.stderr.read() == "interrupted by SIGINT\n"
        assert waiting.wait(timeout=60) == 130
