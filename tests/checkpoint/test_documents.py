import json
from pathlib import Path

import pytest

from llmforge.base.errors import DataError
from llmforge.checkpoint.documents import Document, digest, digest_all, read_all, read_documents, refuse_overlap

DATA = Path(__file__).parents[1] / "data"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return path


def test_documents_are_read_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "x", "text": "one"}, {"text": "two\n", "lang": "en"})
    assert read_documents(path) == [
        Document("x", "one", f"{path}:1"),
        Document("a.jsonl:2", "two\n", f"{path}:2"),
    ]


def test_blank_lines_do_not_move_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"id": "x", "text": "one"}\n\n \n{"id": "y", "text": "two"}')
    assert [document.where for document in read_documents(path)] == [f"{path}:2", f"{path}:5"]


def test_a_line_separator_within_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "text": "one\u2028two\u0085"}\r\n', encoding="utf-8")
    assert [document.text for document in read_documents(path)] == ["one\u2028two\u0085"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "contains no documents"),
        (b" \n\n", "contains no documents"),
        (b'{"id": "a", "text": "x"}\n{"id": \n', "a.jsonl:2:8: not JSON"),
        (b'{"id": "a", "text": "x"}\n["x"]\n', "a.jsonl:2: not an object"),
        (b'{"id": "a", "txt": "x"}\n', "a.jsonl:1: neither `text` nor `messages`; its keys: id, txt"),
        (b'{"id": "a", "text": " "}\n', "a.jsonl:1: `text` is empty"),
        (b'{"id": "a", "text": 5}\n', "a.jsonl:1: `text` is empty or not a string"),
        (b'{"id": 7, "text": "x"}\n', "a.jsonl:1: `id` is not a string: 7"),
        (b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', "a.jsonl:2: id 'a' was already used at"),
        (b'{"id": "a", "text": "\xff"}\n', "byte 21 is not UTF-8"),
        (b'{"messages": []}', "a.jsonl:1: `messages` is not a list of messages, or is empty"),
        (b'{"messages": [{}], "text": "x"}', "a.jsonl:1: both `text` and `messages`"),
        (b'{"messages": ["hi"]}', "a.jsonl:1: messages[0]: not an object"),
        (
            b'{"messages": [{"role": "bot", "content": "x"}]}',
            "a.jsonl:1: messages[0]: role is 'bot'; allowed: system, developer, user, assistant, tool",
        ),
        (b'{"messages": [{"role": "user"}]}', "a.jsonl:1: messages[0]: content is missing"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0]: content is int, and no text"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "a.jsonl:1: no message says anything"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "a.jsonl:1: no message is of the user"),
        (
            b'{"messages": [{"role": "user", "content": "x", "tool_calls": []}]}',
            "a.jsonl:1: messages[0]: `tool_calls` must be calls of an assistant",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": "t"}', "a.jsonl:1: `tools` is not a list of"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_documents(path)
    assert says in caught.value.message
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(
    ("content", "says", "hint"),
    [
        ("Plain text.\n", "a.txt:1:1: not JSON", 'write `{"text": …}`'),
        (f'{{"id": {"9" * 5000}}}', "a.txt:1: not usable JSON", 'write `{"text": …}`'),
        ('\ufeff{"text": "x"}\n', "a.txt:1: begins with a byte order mark", "save it as UTF-8 without a BOM"),
    ],
)
def test_another_kind_of_file_is_told_what_is_wanted(tmp_path: Path, content: str, says: str, hint: str) -> None:
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_documents(tmp_path / "a.txt")
    assert says in caught.value.message
    assert str(caught.value.hint).startswith(hint)


@pytest.mark.parametrize("read", [read_documents, digest])
def test_a_missing_file_is_named(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read: No such file"):
        read(tmp_path / "gone.jsonl")


def test_the_sample_sets_do_not_overlap() -> None:
    calibration, evaluation = (read_documents(DATA / f"{name}.jsonl") for name in ("calibration", "evaluation"))
    refuse_overlap(calibration, evaluation)
    with pytest.raises(DataError, match="also in the calibration data"):
        refuse_overlap(calibration, [*evaluation, calibration[-1]])


def documents(*pairs: tuple[str, str], file: str) -> list[Document]:
    return [Document(id, text, f"{file}:{line}") for line, (id, text) in enumerate(pairs, 1)]


def test_the_same_file_overlaps_with_itself() -> None:
    both = read_documents(DATA / "evaluation.jsonl")
    with pytest.raises(
        DataError, match=f"{len(both)} of {len(both)} evaluation documents are also in the calibration data"
    ):
        refuse_overlap(both, both)


@pytest.mark.parametrize(
    ("evaluation", "what"),
    [
        (("a", "other text"), "has the id of"),
        (("b", "some text"), "has the text of"),
        (("b", "  some\n\ttext "), "has the text of"),
    ],
)
def test_a_shared_document_is_refused(evaluation: tuple[str, str], what: str) -> None:
    seen = documents(("z", "zzz"), ("a", "some text"), file="calibration.jsonl")
    with pytest.raises(DataError) as caught:
        refuse_overlap(seen, documents(("fresh", "new"), evaluation, file="evaluation.jsonl"))
    assert what in caught.value.message
    assert "evaluation.jsonl:2" in caught.value.message
    assert "calibration.jsonl:2" in caught.value.message
    assert "1 of 2 evaluation documents" in caught.value.message
    assert caught.value.hint == "use different text for evaluation and calibration"


ASKS = {"messages": [{"role": "user", "content": "Who?"}]}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_chats_are_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    path = write(tmp_path / "a.jsonl", {**ASKS, "tools": [CALL]}, {"id": "c", "messages": [
        {"role": "user", "content": parts}, calls, {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."}]})  # fmt: skip
    asks, answered = read_documents(path)
    assert asks.is_unanswered
    assert asks.tools == (CALL,)
    assert asks.id == "a.jsonl:1"
    assert not answered.is_unanswered
    assert [message["content"] for message in answered.messages] == ["a\nb", "", "42", "It is 42."]
    assert answered.answers == (1, 3)
    assert answered.text == "a\nb\n42\nIt is 42."


def test_chats_that_ask_the_same_overlap(tmp_path: Path) -> None:
    answered = {"messages": [*ASKS["messages"], {"role": "assistant", "content": "Me."}]}
    seen = read_documents(write(tmp_path / "seen.jsonl", answered))
    with pytest.raises(DataError, match=r"new\.jsonl:1: evaluation document .* has the text of calibration document"):
        refuse_overlap(seen, read_documents(write(tmp_path / "new.jsonl", ASKS)))
    refuse_overlap(seen, read_documents(write(tmp_path / "other.jsonl", {**ASKS, "tools": [CALL]})))


def test_ids_are_unique_over_files(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, {"id": "x", "text": name}) for name in ("a.jsonl", "b.jsonl"))
    with pytest.raises(DataError, match=r"b\.jsonl:1: id 'x' was already used at .*a\.jsonl:1"):
        read_all([one, two])
    with pytest.raises(DataError, match=r"a\.jsonl: is named twice") as twice:
        read_all([one, one])
    assert twice.value.hint == "name each file once"
    assert len({digest_all([one]), digest_all([one, two]), digest_all([two, one])}) == 3
    assert digest_all([one]) == digest(one)
