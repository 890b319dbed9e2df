"""The texts of a build: the same ids as serving gives, chats that are answered, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from llmforge.backends.onnxruntime.builder import write_tokenizer as copy_tokenizer
from llmforge.base.errors import CheckpointError, DataError
from llmforge.base.progress import Silent
from llmforge.checkpoint import Checkpoint, documents, text
from llmforge.compile import texts
from llmforge.compile.texts import BuildTexts
from llmforge.quantization.statistics import Demand
from llmforge.recipe import Recipe
from llmforge.serving.chat import ChatTemplate
from llmforge.serving.prompts import TextEncoder, read_tokenizer

from ..models.checkpoints import write_checkpoint

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
BOS, BEGIN, END = 0, 1, 2  # of the tokenizer of the tests
CHAT = {"id": "chat", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}
ASKED = {"id": "asked", "messages": [{"role": "user", "content": "Who?"}]}
PLAIN = {"id": "plain", "text": "graph engine pass weight " * 8}


def write(path: Path, *records: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def checkpoint(folder: Path, *, adds_bos: bool = False, template: str | None = CHATML, **config: Any) -> Checkpoint:
    write_checkpoint(folder, eos_token_id=END, **config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if adds_bos:
        bos = tokenizer.id_to_token(BOS)
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
        tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return Checkpoint.open(folder)


def says(*ids: int) -> texts.Answering:
    return lambda checkpoint, prompts, progress: dict.fromkeys(prompts, ids)


def recipe(
    folder: Path, calibration: Sequence[Any], evaluation: Sequence[Any], gates: Any = None, **quality: Any
) -> Recipe:
    """Write a recipe whose texts have a file for each of the lists."""
    names = []
    for role, files in (("calibration", calibration), ("evaluation", evaluation)):
        names.append([write(folder / f"{role}-{n}.jsonl", *records).name for n, records in enumerate(files)])
    plain = {
        "schema": 1, "name": "n", "checkpoint": ".", "target": "local",
        "engine": {"backend": "onnxruntime", "max_context": 128},
        "calibration": {"data": names[0], "samples": 2, "length": 32},
        "passes": [], "validation": {"quality": {"data": names[1], "context": 64, **quality}},
        "gates": gates or {},
    }  # fmt: skip
    (folder / "r.yaml").write_text(json.dumps(plain))
    return Recipe.load(folder / "r.yaml")


def read(made: Recipe, of: Checkpoint, answering: texts.Answering | None = None) -> BuildTexts:
    demanded: Any = [None]
    found: Sequence[Demand] = demanded
    return BuildTexts(made, of, found, answering or says(9, END), Silent())


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, WITH_BOS])
def test_calibration_evaluation_tasks_and_serving_read_the_same_ids(
    tmp_path: Path, adds_bos: bool, template: str
) -> None:
    opened = checkpoint(tmp_path, adds_bos=adds_bos, template=template)
    made = recipe(
        tmp_path, [[{**PLAIN, "text": "one"}, ASKED]], [[{"text": "two"}, {**ASKED, "id": "b", "tools": [{}]}]]
    )
    copy_tokenizer(opened, tmp_path / "artifact")
    served = TextEncoder(
        read_tokenizer(tmp_path / "artifact" / "tokenizer.json"), ChatTemplate.read(tmp_path / "artifact")
    )
    found = read(made, opened)
    asked = [*ASKED["messages"]]
    for windows, plain in ((found.calibration, "one"), (found.evaluation, "two")):
        by_kind = {window.answers is None: window for window in windows}
        assert by_kind[True].ids.tolist() == served.encode(plain)
        assert (by_kind[True].ids[0] == BOS) == adds_bos
        said = by_kind[False]
        assert said.ids.tolist() == [*served.encode_chat(asked), 9, END]
        assert (said.ids == BOS).sum() == (template == WITH_BOS)
        assert said.answers is not None
        assert said.answers.tolist() == [False] * (len(said.ids) - 2) + [True, True]


def test_each_window_of_a_long_text_begins_as_a_text_does(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, adds_bos=True)
    windows = texts.windows_of(opened, [documents.Document("d", "x" * 70, "f:1")], 32)
    assert [window.ids[0] for window in windows] == [BOS] * 3
    assert [len(window.ids) for window in windows] == [32, 32, 9]
    assert not any(window.ids[1:].tolist().count(BOS) for window in windows)


def test_files_share_the_tokens_and_what_one_lacks_another_gives(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path)
    long, chats = [{"text": "y" * 900}], [{**ASKED, "id": f"c{n}"} for n in range(3)]
    found = read(recipe(tmp_path, [chats, [PLAIN]], [[{**c, "id": c["id"] + "e", "tools": [{}]} for c in chats], long],
                        max_tokens=300), opened)  # fmt: skip
    tokens = {True: 0, False: 0}
    for window in found.evaluation:
        tokens[window.answers is None] += len(window.ids)
    (one,) = {len(w.ids) for w in found.evaluation if w.answers is not None}
    assert tokens[False] == 3 * one < 150, "chats are whole, and few"
    assert 300 - tokens[False] - 64 < tokens[True] <= 300 - tokens[False]
    assert {window.document for window in found.calibration} >= {"plain"}
    assert any(window.answers is not None for window in found.calibration)
    assert {window.document for window in found.budget_windows()} >= {"c0e", "c1e", "c2e"}


def test_chats_that_do_not_fit_the_model_are_left_out_and_said(tmp_path: Path) -> None:
    opened, asked = checkpoint(tmp_path), []

    def answer(_: object, prompts: Mapping[str, Sequence[int]], *__: object) -> dict[str, list[int]]:
        asked.extend(prompts)
        return {name: [5, 6] for name in prompts}

    long = {"id": "long", "messages": [{"role": "user", "content": "y" * (opened.geometry.context or 0)}]}
    found = read(recipe(tmp_path, [[PLAIN]], [[ASKED, long]]), opened, answer)
    assert {window.document for window in found.evaluation} == set(asked) == {ASKED["id"]}
    assert found.notes == [
        "1 chats that the checkpoint was to answer are left out: with an answer they take more than the model's "
        f"{opened.geometry.context} tokens"
    ]


def test_chats_that_nobody_answers_are_left_out_and_said(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path)
    found = read(recipe(tmp_path, [[PLAIN]], [[ASKED], [CHAT]]), opened, lambda *_: "it is too large")
    assert [window.document for window in found.evaluation] == ["chat"]
    assert found.notes == ["1 chats that the checkpoint was to answer are left out: it is too large"]


def test_chats_need_a_template(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, template=None)
    made = recipe(tmp_path, [[PLAIN]], [[CHAT]])
    with pytest.raises(
        DataError, match=r"evaluation-0\.jsonl:1: a chat, and the checkpoint has no chat template"
    ) as no:
        _ = read(made, opened).evaluation
    assert "`chat_template: FILE`" in str(no.value.hint)
    with pytest.raises(DataError, match="has no chat template"):
        texts.check_template(made, None)
    texts.check_template(made, CHATML)


def test_what_the_template_refuses_names_the_line(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, template="{{ raise_exception('no systems') }}")
    with pytest.raises(DataError, match=r"evaluation-0\.jsonl:1: .*no systems"):
        _ = read(recipe(tmp_path, [[PLAIN]], [[CHAT]]), opened).evaluation


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    right = checkpoint(tmp_path / "right")
    made = recipe(tmp_path, [[PLAIN]], [[{"text": "z"}]])
    highest = max(int(window.ids.max()) for window in read(made, right).calibration)
    wrong = checkpoint(tmp_path / "wrong", vocab_size=highest)
    with pytest.raises(CheckpointError, match=rf"gives token {highest}, and vocab_size of the model is {highest}"):
        _ = read(made, wrong).calibration


def marked(opened: Checkpoint, *messages: tuple[str, str]) -> list[str]:
    """Give the text of each stretch of answer tokens."""
    chat = documents.Document("d", "t", "f:1", tuple({"role": role, "content": said} for role, said in messages))
    (found,) = text.ids_of([chat], texts.encoder_of(opened), opened.eos_token_ids)
    assert found.answers is not None
    edges = np.flatnonzero(np.diff(np.r_[False, found.answers, False].astype(int)))
    return [
        opened.tokenizer.decode(found.ids[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in edges.reshape(-1, 2)
    ]


THINKS = (  # leaves thoughts out of all turns but the last, and its generation prompt opens one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TURNS = (("user", "A?"), ("assistant", "B."), ("user", "C?"), ("assistant", "D."))


SPEAKERS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
BOTH = ["B.<|im_end|>", "D.<|im_end|>"]
CASES = {
    "chatml": (CHATML, BOTH),
    "bos": (WITH_BOS, BOTH),
    "thinks": (THINKS, ["\n</think>\nD.<|im_end|>"]),  # of B., what stands there is not what was said
    "speakers": (SPEAKERS, [" B.", " D."]),
    "generation": (GENERATION, BOTH),
}


@pytest.mark.parametrize(("template", "found"), CASES.values(), ids=CASES)
def test_answers_are_what_the_model_would_have_said(tmp_path: Path, template: str, found: list[str]) -> None:
    assert marked(checkpoint(tmp_path, template=template), *TURNS) == found


def test_an_answer_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="f:1: the answers are not found"):
        marked(opened, *TURNS)


def test_a_gate_on_answers_needs_chats(tmp_path: Path) -> None:
    gates = {"answer_kld_mean": {"max": 0.05}}
    with_chats = recipe(tmp_path, [[PLAIN]], [[CHAT]], gates)
    texts.check(with_chats)
    without = recipe(tmp_path, [[PLAIN]], [[{"text": "z"}]], gates)
    with pytest.raises(DataError, match=r"gates\.answer_kld_mean: the evaluation text has no chats"):
        texts.check(without)
