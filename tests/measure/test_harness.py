"""The adapter for lm-evaluation-harness: local tasks of each kind, hostile ones, and answers that are kept."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from llmforge.base.errors import DataError, ForgeError, UnsupportedError, UsageError
from llmforge.measure.scoring import Keep, Likelihood, Pair
from llmforge.metrics.tasks import TaskResult

from ..models.checkpoints import write_tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra `eval`")

ITEMS = [
    {"document": f"d{i // 2}", "question": f"What is {i} and {i}?", "choices": ["no", f"{2 * i}"], "answer": 1}
    for i in range(20)
]
TASK: dict[str, Any] = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 3.0},
}


@pytest.fixture(autouse=True)
def _own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


class Knows:
    """A side that finds what its function says of the texts; tokens are characters."""

    description, longest = "it knows", 64

    def __init__(self, likes: Callable[[str, str], float], says: str = "") -> None:
        self._likes, self._says = likes, says
        self.read: list[tuple[str, str]] = []

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        texts = [("".join(map(chr, context)), "".join(map(chr, follows))) for context, follows in pairs]
        self.read += texts
        return [(self._likes(*text), self._likes(*text) > -1) for text in texts]

    def answer(self, ids: Sequence[int], tokens: int, until: Sequence[str]) -> str:
        self.read.append(("".join(map(chr, ids)), f"{tokens} {until}"))
        return self._says


def write(folder: Path, items: Sequence[object] = ITEMS, **changed: Any) -> str:
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    config = {name: value for name, value in {**TASK, **changed}.items() if value is not None}
    (folder / "task.yaml").write_text(json.dumps(config))
    return str(folder / "task.yaml")


def measure(
    task: str, ours: Knows, theirs: Knows | None = None, keep: Keep | None = None, **asked: Any
) -> tuple[TaskResult, ...]:
    from llmforge.measure import harness

    tokens = harness.TaskTokens(lambda text, special: [ord(letter) for letter in text], prefix=0)
    baseline = None if theirs is None else (theirs, Keep())
    return harness.measure(harness.TaskRequest((task,), **asked), tokens, (ours, keep or Keep()), baseline)[0]


def right(context: str, follows: str) -> float:
    return -0.5 if follows.strip() != "no" else -5.0


def test_choices_are_paired_item_by_item_and_clustered_by_document(tmp_path: Path) -> None:
    task = write(tmp_path, metadata={"version": 3.0, "document": "document"})
    worse = Knows(
        lambda context, follows: -5.0 if "7 and 7" in context and "no" not in follows else right(context, follows)
    )
    (found,) = measure(task, worse, Knows(right))
    assert (found.name, found.version, found.few_shot) == ("sums", "3.0", 0)
    assert found.documents == tuple(i // 2 for i in range(20))
    score = found.scores["accuracy"]
    assert score.baseline == (1.0,) * 20
    assert [i for i, value in enumerate(score.artifact) if not value] == [7]
    difference = score.figures.difference
    assert difference is not None
    assert (difference.value, difference.samples, difference.of) == (pytest.approx(-0.05), 10, "documents")
    assert worse.read[0] == ("What is 0 and 0?", " no")


def test_a_chat_template_asks_in_turns_and_adds_its_own_special_tokens(tmp_path: Path) -> None:
    from llmforge.measure import harness

    asked: list[bool] = []

    def encode(text: str, special: bool) -> list[int]:
        asked.append(special)
        return [ord(letter) for letter in text]

    def render(messages: Sequence[Any]) -> str:
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in messages) + "<a>"

    side = Knows(right)
    tokens = harness.TaskTokens(encode, 0, render)
    harness.measure(harness.TaskRequest((write(tmp_path),), limit=3, few_shot=1), tokens, (side, Keep()), None)
    context, follows = side.read[0]
    assert context.endswith("<u>What is 0 and 0?<a>")
    assert context.count("<u>") == 2, "the example is an earlier turn"
    assert context.count("<a>") == 2
    assert follows == "no"
    assert asked
    assert not any(asked)
    begun = Knows(right)
    task = write(tmp_path, gen_prefix="Answer:")
    harness.measure(harness.TaskRequest((task,), limit=1), tokens, (begun, Keep()), None)
    assert begun.read[0][0] == "<u>What is 0 and 0?<a>Answer:"


def test_a_task_reads_the_ids_that_serving_reads(tmp_path: Path) -> None:
    from llmforge.measure import harness
    from llmforge.serving.chat import ChatTemplate
    from llmforge.serving.prompts import TextEncoder

    write_tokenizer(tmp_path)
    template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    served = TextEncoder(tokenizer, ChatTemplate(template, {"bos_token": "<|endoftext|>"}, "here"))
    read: list[Pair] = []

    class Side(Knows):
        def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
            read.extend(pairs)
            return [(-1.0, True) for _ in pairs]

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    tokens = harness.TaskTokens(encode, 0, served.render)
    side = Side(right)
    side.longest = 512  # type: ignore[misc]
    harness.measure(harness.TaskRequest((write(tmp_path),), limit=1), tokens, (side, Keep()), None)
    assert list(read[0][0]) == served.encode_chat([{"role": "user", "content": "What is 0 and 0?"}])


def test_a_limit_and_examples_before_an_item(tmp_path: Path) -> None:
    side = Knows(right)
    (found,) = measure(write(tmp_path), side, limit=3, few_shot=2)
    assert (len(found.documents), found.few_shot) == (3, 2)
    assert found.scores["accuracy"].baseline is None
    assert len(side.read) == 6
    assert all(context.endswith("?") and len(context) <= 64 for context, _ in side.read)  # cut on the left


def test_texts_roll_over_windows_and_give_perplexities(tmp_path: Path) -> None:
    items = [{"page": "word " * count} for count in range(10, 30)]
    metrics = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    task = write(
        tmp_path, items, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{page}}",
        doc_to_choice=None, metric_list=metrics,
    )  # fmt: skip
    side = Knows(lambda context, follows: -1.0 * len(follows))  # a nat each letter
    (found,) = measure(task, side, Knows(lambda context, follows: -1.1 * len(follows)))
    bits = found.scores["bits_per_byte"]
    assert bits.figures.artifact.value == pytest.approx(1 / math.log(2))
    assert bits.figures.difference is not None
    assert bits.figures.difference.value == pytest.approx(-0.1 / math.log(2))
    assert bits.better == found.scores["word_perplexity"].better == "lower"
    assert max(len(context) + len(follows) for context, follows in side.read) == 65  # the last token is not read
    assert sum(len(follows) for _, follows in side.read) == sum(len(item["page"]) for item in items)


def test_answers_are_greedy_text_up_to_a_stop(tmp_path: Path) -> None:
    options = {"until": ["\n"], "max_gen_toks": 9}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    changed: dict[str, Any] = {
        "output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "{{choices[1]}}",
        "metric_list": metrics,
    }  # fmt: skip
    side = Knows(right, says="8")
    (found,) = measure(write(tmp_path, generation_kwargs=options, **changed), side, Knows(right, says="nothing"))
    assert [i for i, value in enumerate(found.scores["exact_match"].artifact) if value] == [4]
    assert side.read[0] == ("What is 0 and 0?", "9 ['\\n']")
    sampled = write(tmp_path, generation_kwargs={**options, "do_sample": True, "temperature": 0.7}, **changed)
    with pytest.raises(UnsupportedError, match="samples its answers"):
        measure(sampled, side)


class Killed(Exception):
    """In place of a kill."""


class Remembers(Keep):
    """Keeps answers in a dictionary, and is killed when so many blocks were computed."""

    def __init__(self, blocks: float) -> None:
        self.kept: dict[str, list[Any]] = {}
        self._left = blocks

    def block(self, kind: str, requests: Sequence[Any], compute: Callable[[], list[Any]]) -> list[Any]:
        key = json.dumps([kind, requests])
        if key not in self.kept:
            if not self._left:
                raise Killed
            self._left -= 1
            self.kept[key] = json.loads(json.dumps(compute()))
        return self.kept[key]


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    many = [{**ITEMS[0], "question": f"Question {i}?"} for i in range(100)]
    task, keep, side = write(tmp_path, many), Remembers(2), Knows(right)
    with pytest.raises(Killed):
        measure(task, side, keep=keep)
    first, again = len(side.read), Remembers(math.inf)
    again.kept = keep.kept
    (resumed,) = measure(task, side, keep=again)
    assert (first, len(side.read)) == (128, 200)
    (whole,) = measure(task, Knows(right))
    assert whole.scores == resumed.scores
    assert whole.digest == resumed.digest


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"doc_to_text": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}"}, DataError, "cannot be loaded"),
        ({"doc_to_text": "{{ nothing }}"}, DataError, "'nothing' is undefined"),
        ({"include": "other.yaml"}, DataError, "include: not supported"),
        ({"class": "evil.Task"}, DataError, "class: not supported"),
        ({"dataset_path": "./evil.py"}, DataError, "has its data in files"),
        ({"dataset_path": "squad"}, DataError, "has its data in files"),
        ({"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, DataError, "there is no such file"),
        ({"metric_list": [{"metric": "./evil"}]}, DataError, "no such metric"),
        ({"task": None}, DataError, "`task`, the name of the task, is missing"),
        ({"metadata": {"document": "chapter"}}, DataError, "'chapter', which an item does not have"),
        ({"test_split": "validation"}, DataError, "cannot be loaded"),
    ],
)
def test_a_task_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], kind: type[ForgeError], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=said):
        measure(write(tmp_path, **changed), Knows(right))
    assert not (tmp_path / "pwned").exists()


def test_a_task_file_runs_no_code_of_its_own(tmp_path: Path) -> None:
    task = Path(write(tmp_path))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\ndef f(doc): return ''\n")
    task.write_text(task.read_text().replace('"{{question}}"', "!function evil.f"))
    with pytest.raises(ForgeError):
        measure(str(task), Knows(right))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow  # the harness reads all of its tasks
def test_a_name_that_is_no_task_is_told_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no such task: 'arc_eazy'") as error:
        measure("arc_eazy", Knows(right))
    assert "arc_easy" in str(error.value.hint)


def test_what_tasks_draw_from_is_given_back_as_it_was(tmp_path: Path) -> None:
    import random

    import numpy as np

    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    measure(write(tmp_path), Knows(right), few_shot=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
