"""What is asked of an artifact before it is used: `verify`, and the commands that load one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result

import llmforge
from llmforge.artifact import Artifact, archive, modelpack
from llmforge.artifact.oci import OciReference
from llmforge.artifact.sealed import walk
from llmforge.base import hashed_files
from llmforge.base.errors import ForgedVerdict
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint
from llmforge.cli import cli
from llmforge.gates import confirmed, verdict
from llmforge.metrics.workload import MeasuredWorkload, RequestTimes
from llmforge.recipe import ServingSpec

from ..samples import published, stored
from ..samples.stored import FAILS, UNDECIDED, put
from ..servers import oci_registry


def call(*words: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def flip(file: Path, index: int) -> None:
    """Change one bit, and leave the modification time as it is."""
    status = file.stat()
    file.chmod(0o644)
    raw = bytearray(file.read_bytes())
    raw[index] ^= 1 << index % 8
    file.write_bytes(raw)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def rewrite_record(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the record, and call it by its new digest, as whoever knows the format would."""
    (file,) = (folder / "evidence").glob("*.json")
    record = json.loads(file.read_text())
    change(record)
    raw = json.dumps(record, indent=1).encode()
    file.unlink()
    (folder / "evidence" / f"{hashlib.sha256(raw).hexdigest()}.json").write_bytes(raw)


class TestVerify:
    def test_says_what_holds(self, tmp_path: Path) -> None:
        made = put(tmp_path).path
        done = call("verify", made)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines() == [
            "verified: 3 files of content, 4 of evidence; gates: pass",
            "unsigned: digests show damage, not who built it",
        ]
        assert all(line in call("inspect", made, "--verify").stdout for line in done.stdout.splitlines())

    def test_any_flipped_bit_of_any_file(self, tmp_path: Path) -> None:
        """One of each file, of the manifest and of both records, through the command; all bytes: tests/artifact."""
        put(tmp_path)
        made = put(tmp_path, days=1).path
        for path in sorted(walk(made)):
            copy = Path(shutil.copytree(made, tmp_path / "copy" / made.name))
            flip(copy / path, (copy / path).stat().st_size // 2)
            done = call("verify", copy)
            assert done.exit_code == 5, path
            assert done.stderr.startswith("error: ")
            shutil.rmtree(copy)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda r: r.update(verdict="fail"), "verdict: it says fail, its figures give pass"),
            (lambda r: r["quality"]["kld_mean"].update(value=0.01), "kld_mean"),
            (lambda r: r["quality"]["kld_mean"].update(high=0.0209), "kld_mean"),
            (lambda r: r["quality"]["per_document"][0].update(kld=1.0), "kld_mean"),
            (lambda r: r["quality"]["per_document"].pop(), "kld_mean"),
            (lambda r: r["quality"].update(tokens=80_000), "documents or tokens"),
            (lambda r: r["latency"]["points"][0]["artifact"]["tpot_ms"]["p50"].update(value=0.1), "tpot_ms"),
            (lambda r: r["latency"]["points"][0]["artifact"].update(tokens_per_second=9000.0), "tokens_per_second"),
            (lambda r: r["latency"]["points"][0]["artifact"]["generations_ms"].pop(), "latency point 0"),
            (lambda r: r["latency"]["points"][0]["artifact"].update(generations_ms=[]), "raw values"),
            (lambda r: r["latency"]["points"][0]["artifact"]["generations_ms"][0].clear(), "raw values"),
            (lambda r: r["quality"]["per_document"][0].pop("kld"), "raw values"),
            (lambda r: r["quality"]["per_document"][0].update(tokens=0, delta_p_squared=-1e9), "raw values"),
            (lambda r: r["quality"].update(per_document=[]), "no documents"),
            (lambda r: r["quality"]["kld_p99"].update(value=0.01), "kld_p99"),
            (lambda r: r["quality"]["kld_p99"].update(high=0.02), "kld_p99"),
            (lambda r: r["quality"].update(kld_max=0.01), "kld_max"),
            (lambda r: r["quality"]["kld_histogram"].reverse(), "kld_histogram"),
            (lambda r: r["quality"]["kld_by_position"][-1]["figure"].update(value=0.01), "kld_by_position"),
            (lambda r: r["quality"]["kld_by_position"].pop(), "kld_by_position"),
            (lambda r: r["quality"]["kld_decode"].update(value=0.01), "kld_decode"),
            (lambda r: r["quality"]["greedy_same_32"].update(low=0.9), "greedy_same_32"),
            (lambda r: r["quality"]["answers"][0].update(first_difference=99), "greedy_same_32"),
            (lambda r: r["quality"].update(answers=[]), "greedy_same_32"),
            (lambda r: r["quality"].update(per_token=[]), "kld_p99"),
            (lambda r: r["quality"]["per_token"].pop(), "kld_median"),
            (lambda r: r["quality"]["per_token"].append(r["quality"]["per_token"][0]), "tokens of some documents"),
            (lambda r: r["quality"]["per_token"].pop(), "tokens of some documents"),
            (lambda r: r["quality"]["per_token"][0].update(kld="AAAA"), "raw values"),
            (lambda r: r["quality"]["per_token"][0].update(kld=r["quality"]["per_token"][1]["kld"]), "kld of guide-0"),
            (lambda r: r["quality"]["per_token"][0].update(kld="?"), "raw values"),
            (lambda r: r["quality"]["per_token"][0].update(windows=[[1, 10**9]]), "raw values"),
            (lambda r: r["quality"]["per_token"][0].update(windows=[[10**9, 50]]), "kld_by_position"),
            (lambda r: r["quality"]["per_token"][0].update(document="other"), "tokens of other"),
            (lambda r: r["quality"].update(per_ending=[{"document": "other", "tokens": 1}]), "ends of other"),
            (lambda r: r["quality"].update(per_ending=[{"document": "guide-0", "tokens": 10**9}]), "ends of guide-0"),
            (lambda r: r["latency"]["points"][0]["tpot_speedup"].update(value=99.0), "tpot_speedup"),
            (lambda r: r["gates"].pop(), "gates"),
            (lambda r: r["gates"][0].update(limit=9.0), "gates"),
            (lambda r: r.update(name="other"), "name"),
            (lambda r: r["recipe"].update(gates={}), "recipe"),
            (lambda r: r["checkpoint"].update(digest="0" * 64), "checkpoint"),
            (lambda r: r["engine"]["files"].append({"name": "more", "size_bytes": 1}), "engine"),
            (lambda r: r["engine"]["files"][0].update(size_bytes=1), "engine"),
        ],
    )
    def test_figures_are_made_again_of_raw_values(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
    ) -> None:
        made = put(tmp_path).path
        rewrite_record(made, change)
        done = call("verify", made)
        assert done.exit_code == 5, done.output
        text = " ".join(done.stderr.split())
        assert "does not follow from what was measured" in text
        assert said in text

    @pytest.mark.parametrize("windows", [[[1, 10**12]], [[10**18, 50]], [[-60, 50]], [[1, 0]]])
    def test_places_of_tokens_that_no_text_has(self, tmp_path: Path, windows: list[list[int]]) -> None:
        made = put(tmp_path).path
        rewrite_record(made, lambda r: r["quality"]["per_token"][0].update(windows=windows))
        done = call("verify", made)
        assert done.exit_code == 5
        assert "not a report of this version: quality.per_token.0.windows" in " ".join(done.stderr.split())

    def test_workloads_are_made_again_of_the_times_of_their_requests(self, tmp_path: Path) -> None:
        times = RequestTimes(sent_ms=0.0, token_ms=(5.0, 7.0), ended_ms=7.0, prompt_tokens=4, output_tokens=2)
        chat = MeasuredWorkload.of("chat", "one request", ((times,),), None)
        made = put(tmp_path, latency=stored.latency().model_copy(update={"workloads": (chat,)})).path
        assert call("verify", made).exit_code == 0
        rewrite_record(made, lambda r: r["latency"]["workloads"][0]["runs"][0][0].update(ended_ms=6.0))
        done = call("verify", made)
        assert done.exit_code == 5, done.output
        assert "workload chat" in done.stderr
        rewrite_record(made, lambda r: r["latency"]["workloads"][0].update(runs=[[]]))
        assert "raw values: a load without requests" in " ".join(call("verify", made).stderr.split())

    @pytest.mark.parametrize("field", ["created", "versions", "machine", "target", "notes"])
    def test_edited_words_change_the_name_of_the_record(self, tmp_path: Path, field: str) -> None:
        made = put(tmp_path).path
        (file,) = (made / "evidence").glob("*.json")
        record = json.loads(file.read_text())
        edited = {**record, field: "2020-01-01T00:00:00+00:00" if field == "created" else []}
        file.chmod(0o644)
        file.write_text(json.dumps(edited, indent=1))
        assert "its name is not the SHA-256 of its bytes" in " ".join(call("verify", made).stderr.split())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, sample_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("artifacts")
    return published.random_decoder(out, sample_checkpoint, max_context=64, max_batch=2, serving=ServingSpec()).path


@pytest.fixture
def artifact(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hashed_files, "_SETTLED_NS", 0)
    return Path(shutil.copytree(served, tmp_path / "artifact"))


RUN = ("graph", "--max-tokens", "2")
BENCH = (
    "--concurrency",
    "1",
    "--requests",
    "1",
    "--warmup",
    "0",
    "--prompt-tokens",
    "4",
    "--output-tokens",
    "2",
    "--quiet",
)


class TestLoading:
    def test_a_flipped_bit_in_what_is_loaded_is_noticed_before_the_first_token(self, artifact: Path) -> None:
        assert call("run", artifact, *RUN).exit_code == 0
        files = [path for path in walk(artifact) if path.startswith(("engine/", "tokenizer/"))]
        assert len(files) >= 4
        for path in files:
            size = (artifact / path).stat().st_size
            for index in {0, size // 3, size - 1}:
                flip(artifact / path, index)
                done = call("run", artifact, *RUN)
                assert (done.exit_code, done.stdout) == (5, ""), path
                assert f"changed: {path}" in " ".join(done.stderr.split())
                flip(artifact / path, index)
        assert call("run", artifact, *RUN).exit_code == 0

    def test_files_that_are_missing_added_or_cut(self, artifact: Path) -> None:
        (artifact / "tokenizer" / "more.json").write_text("{}")
        assert "not in the manifest: tokenizer/more.json" in " ".join(call("run", artifact, *RUN).stderr.split())
        (artifact / "tokenizer" / "more.json").unlink()
        (artifact / "tokenizer" / "special_tokens_map.json").rename(artifact / "elsewhere")
        done = call("run", artifact, *RUN)
        assert (done.exit_code, "missing: tokenizer/special_tokens_map.json" in " ".join(done.stderr.split())) == (
            5,
            True,
        )

    def test_hashes_are_computed_once_unless_asked(self, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[Path] = []
        whole = hashed_files.sha256
        monkeypatch.setattr(hashed_files, "sha256", lambda file: (read.append(file), whole(file))[1])
        files = sum(path.startswith(("engine/", "tokenizer/")) for path in walk(artifact))
        for words, times in (((), 1), ((), 1), (("--verify",), 2), ((), 2)):
            assert call("run", artifact, *RUN, *words).exit_code == 0
            assert len(read) == times * files

    @pytest.mark.parametrize(
        "command", [("run", *RUN), ("serve", "--port", "0"), ("bench", *BENCH), ("triton", "-o", "repository")],
        ids=lambda words: words[0],
    )  # fmt: skip
    def test_a_failed_artifact_is_refused(self, command: tuple[str, ...], tmp_path: Path) -> None:
        made = put(tmp_path, gates=FAILS).path
        name, *words = command
        words = [str(tmp_path / word) if word == "repository" else word for word in words]
        done = call(name, made, *words)
        assert done.exit_code == 3, done.output
        text = " ".join(done.stderr.split())
        assert f"the verdict of tiny {made.name} is FAIL" in text
        assert "hint: see `llmforge inspect`; to use it all the same: --allow fail" in text
        assert call(name, made, *words, "--allow", "inconclusive").exit_code == 3
        allowed = call(name, made, *words, "--allow", "fail")
        assert allowed.exit_code == 5  # it is no engine
        assert "the gates" not in allowed.stderr

    def test_an_inconclusive_one_warns(self, tmp_path: Path) -> None:
        made = put(tmp_path, gates=UNDECIDED).path
        warning = f"warning: the gates of tiny {made.name} are inconclusive"
        assert warning in " ".join(call("run", made, *RUN).stderr.split())
        assert "warning" not in call("run", made, *RUN, "--allow", "inconclusive").stderr
        assert "warning" in call("run", made, *RUN, "--allow", "fail").stderr
        assert "warning" not in call("run", put(tmp_path, "no gates", gates={}).path, *RUN).stderr

    def test_a_later_record_refuses(self, tmp_path: Path) -> None:
        made = put(tmp_path).path
        assert call("run", made, *RUN).exit_code == 5  # it is no engine
        put(tmp_path, latency=stored.latency(tpot_ms=7.0), days=1)
        assert call("run", made, *RUN).exit_code == 3

    @pytest.mark.parametrize("name", ["../triton/kill", "../../evil", "/tmp/evil"])
    def test_a_name_that_leads_elsewhere(self, artifact: Path, tmp_path: Path, name: str) -> None:
        (record,) = (artifact / "evidence").glob("*.json")
        raw, bound = stored.forged((artifact / "manifest.json").read_bytes(), record.read_bytes(), name=name)
        (artifact / "manifest.json").chmod(0o644)
        (artifact / "manifest.json").write_bytes(raw)
        record.unlink()
        (artifact / "evidence" / f"{hashlib.sha256(bound).hexdigest()}.json").write_bytes(bound)
        before = sorted(walk(tmp_path))
        for words in (
            ("triton", artifact, "-o", tmp_path / "deep" / "repo"),
            ("verify", artifact),
            ("run", artifact, "x"),
        ):
            done = call(*words)
            assert done.exit_code == 5
            assert "cannot be that of an artifact" in " ".join(done.stderr.split())
        assert sorted(walk(tmp_path)) == before


# How each command that takes an artifact, or finds one by itself, is called on one whose verdict is forged; the last
# are Python functions. FORGED is that artifact, FOLDER where nothing is yet.
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
REFUSE: dict[str, tuple[object, ...]] = {
    "run": ("FORGED", *RUN),
    "serve": ("FORGED", "--port", "0"),
    "batch": ("FORGED", RECIPE, "-o", "FOLDER"),
    "bench": ("FORGED", *BENCH),
    "judge": ("--url", "http://127.0.0.1:9", "--reference", "FORGED", "--data", RECIPE),
    "triton": ("FORGED", "-o", "FOLDER"),
    "gate": ("FORGED",),
    "mlflow": ("FORGED",),
    "diff": ("FORGED", "FORGED"),
    "validate": ("FORGED", "--recipe", RECIPE, "--quiet"),
    "eval": ("FORGED", "--tasks", "none", "--recipe", RECIPE, "--quiet"),
    "bisect": ("FORGED", "--recipe", RECIPE, "--quiet"),
    "reproduce": ("FORGED", "--recipe", RECIPE, "--quiet"),
    "build": ("--finish", "FORGED", "--quiet"),
    "inspect": ("FORGED",),
    "verify": ("FORGED",),
    "sign": ("FORGED", "--key", "KEY"),
    "tag": ("FORGED", "prod"),
    "promote": ("tiny", "VERSION", "--to", "prod"),
    "export": ("FORGED", "-o", "FOLDER.tar"),
    "import": ("ARCHIVE", "--out", "FOLDER"),
    "push": ("FORGED", "localhost:1/models/tiny:1", "--quiet"),
    "pull": ("REFERENCE", "--out", "FOLDER", "--quiet"),
}
SHOW = {"ls": "forged", "history": "is left out"}
BELIEVE_NOTHING = {"rm", "gc"}  # they remove
NO_ARTIFACTS = {
    "cache", "completion", "diff-graph", "docs", "doctor", "help", "init", "migrate", "passes", "plan", "schema",
    "shadow", "targets", "trace", "tune", "up",
}  # fmt: skip


class TestForgedVerdicts:
    """FAIL was changed to PASS in the record, which is called by its new digest."""

    @pytest.fixture
    def forged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(Checkpoint, "open", Mock())  # which imports transformers
        monkeypatch.setenv("LLMFORGE_ARTIFACTS", str(tmp_path))
        made = put(tmp_path, gates=FAILS).path
        rewrite_record(made, lambda r: r.update(verdict="pass"))
        return made

    def test_the_tables_have_every_command(self) -> None:
        assert sorted(cli.commands) == sorted([*REFUSE, *SHOW, *BELIEVE_NOTHING, *NO_ARTIFACTS])

    @pytest.mark.parametrize("command", REFUSE)
    def test_are_refused(self, command: str, forged: Path, tmp_path: Path) -> None:
        given: dict[object, object] = {"FORGED": forged, "VERSION": forged.name, "KEY": tmp_path / "key.pem"}
        given |= {"FOLDER": tmp_path / "new", "FOLDER.tar": tmp_path / "new.tar", "ARCHIVE": tmp_path / "old.tar"}
        (tmp_path / "key.pem").write_text("no key")
        with ExitStack() as stack:
            if command == "import":
                archive.save_file(Artifact.open(forged), tmp_path / "old.tar")
            if command == "pull":
                given["REFERENCE"] = f"{stack.enter_context(oci_registry.running()).host}/models/tiny:1"
                modelpack.push(Artifact.open(forged), OciReference.parse(str(given["REFERENCE"])), Silent())
            done = call(command, *(given.get(word, word) for word in REFUSE[command]))
        assert done.exit_code == 5, done.output
        assert done.stdout == ""
        text = " ".join(done.stderr.split())
        assert "does not follow from what was measured: verdict: it says pass, its figures give fail" in text
        assert not list(tmp_path.glob("new*/*/[!.]*"))
        assert not (tmp_path / "new.tar").exists()

    @pytest.mark.parametrize("command", SHOW)
    def test_are_shown(self, command: str, forged: Path) -> None:
        done = call(command, "tiny")
        assert done.exit_code == 0
        assert SHOW[command] in done.output
        assert "pass" not in done.stdout
        if command == "ls":
            (facts,) = json.loads(call("ls", "--json").stdout)
            assert facts["verdict"] == "forged"
            assert "verdict: it says pass, its figures give fail" in facts["damage"]

    def test_none_can_be_allowed(self, forged: Path) -> None:
        for allowed in ("fail", "inconclusive"):
            assert "does not follow" in " ".join(call("run", forged, *RUN, "--allow", allowed).stderr.split())

    def test_python_refuses(self, forged: Path) -> None:
        for function in (llmforge.load, llmforge.gate):
            with pytest.raises(ForgedVerdict):
                function(forged)
        with pytest.raises(ForgedVerdict):
            llmforge.evaluate(forged, ["none"], recipe=RECIPE)

    def test_a_verdict_is_recomputed_once(self, artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recomputed: list[object] = []
        whole = verdict.recompute
        monkeypatch.setattr(verdict, "recompute", lambda *given: (recomputed.append(given), whole(*given))[1])
        monkeypatch.setenv("XDG_CACHE_HOME", str(artifact.parent))
        for _ in range(2):
            assert call("run", artifact, *RUN).exit_code == 0
        assert len(recomputed) == 1
        monkeypatch.setattr(confirmed, "_code", lambda: "other code")
        assert call("run", artifact, *RUN).exit_code == 0
        assert len(recomputed) == 2
        rewrite_record(artifact, lambda r: r.update(verdict="pass"))
        assert call("run", artifact, *RUN).exit_code == 5
