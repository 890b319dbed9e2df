"""Constrained answers: whatever the logits and the seed, the text has the form that was asked for."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from llmforge.base.errors import EnvironmentLacks, InputError, UnsupportedError, UsageError
from llmforge.runtime.sampling.constraints import Constraint, ConstraintCompiler
from llmforge.runtime.sampling.sampler import Samplers, TokenSampler
from llmforge.serving import Sampling

pytest.importorskip("llguidance", reason="constraints need llguidance")

SAMPLE = Path(__file__).parents[1] / "data" / "docs-llama-7m" / "tokenizer.json"
EOS = 0  # <|end_of_text|>
PADDED = 8200  # a model's vocabulary is often larger than its tokenizer's: multiples of 128 are faster
LIMIT = 400


class Person(pydantic.BaseModel):
    """What the schema of the tests describes; pydantic checks the answers, with none of the constraint's code."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, pydantic.StringConstraints(min_length=1, max_length=12)]
    mood: Literal["fine", "so-so", "très bien 🙂"]
    age: Annotated[int, pydantic.Field(ge=0, le=120)]
    tags: Annotated[list[Annotated[str, pydantic.StringConstraints(max_length=4)]], pydantic.Field(max_length=3)]
    boss: bool | None


PERSON = Constraint.json_schema(Person.model_json_schema())


@functools.cache
def sample() -> Tokenizer:
    return Tokenizer.from_file(str(SAMPLE))


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with hardly any merges: each character of an emoji is four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ('"', ":"), ("{", '"')]
    pieces = ["<|end|>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: a space is U+2581, and what has no piece is bytes."""
    pieces = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,!é你"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    pieces += [a + b for a, b in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    return tokenizer


@functools.cache
def samplers(tokenizer) -> Samplers:
    vocabulary = PADDED if tokenizer is sample else tokenizer().get_vocab_size()
    return Samplers(tokenizer(), vocabulary, (EOS,))


def start(sampling: Sampling, tokenizer=sample) -> TokenSampler:
    return samplers(tokenizer).start(sampling, [1, 2, 3])


def logits(seed: int, answer: list[int], vocabulary: int = PADDED) -> np.ndarray:
    """Logits of a model that knows nothing: they depend on the whole answer."""
    random = np.random.default_rng((seed, *answer[-3:], len(answer)))
    return (random.standard_normal(vocabulary) * 3).astype(np.float32)


def answer(sampler: TokenSampler, tokenizer, seed: int) -> str:
    """Generate to the end and return the text."""
    tokens: list[int] = []
    vocabulary = PADDED if tokenizer is sample else tokenizer().get_vocab_size()
    while not (tokens and sampler.is_stop(tokens[-1])):
        assert len(tokens) < LIMIT, tokenizer().decode(tokens)
        tokens.append(sampler.sample(logits(seed, tokens, vocabulary)).token)
    assert max(tokens) < tokenizer().get_vocab_size()
    return tokenizer().decode(tokens[:-1])


@pytest.mark.parametrize("tokenizer", [sample, byte_level, sentencepiece])
def test_json_follows_its_schema_under_any_seed(tokenizer):
    texts = {
        answer(start(Sampling(temperature=1.5, seed=seed, constraint=PERSON), tokenizer), tokenizer, seed)
        for seed in range(50)
    }
    assert len(texts) == 50
    for text in texts:
        Person.model_validate_json(text)


@pytest.mark.parametrize("tokenizer", [sample, byte_level, sentencepiece])
def test_text_matches_its_regular_expression_under_any_seed(tokenizer):
    pattern = r"(yes|no), [a-z]{1,8} (\d{1,3}/\d{2}|é🙂{1,2}你\.)!?"
    constraint = Constraint("regex", pattern)
    texts = {
        answer(start(Sampling(temperature=1.5, seed=seed, constraint=constraint), tokenizer), tokenizer, seed)
        for seed in range(50)
    }
    assert len(texts) > 40
    assert all(re.fullmatch(pattern, text, re.ASCII) for text in texts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 2},
        {"temperature": 1.0, "top_p": 0.1},
        {"temperature": 1.0, "min_p": 0.9},
        {"repetition_penalty": 1.5, "presence_penalty": 2.0},
        {"min_tokens": 300},
        {"logit_bias": ((EOS, 100.0),)},
    ],
)
def test_a_constraint_holds_beside_every_other_option(options):
    text = answer(start(Sampling(**options, constraint=PERSON)), sample, 3)
    Person.model_validate_json(text)


def test_any_json_object():
    """Its size has no bound; a bias towards the end closes what the grammar lets close."""
    closing = tuple((token, 30.0) for text, token in sample().get_vocab().items() if text in ('"', "}", '"}', "]"))
    sampling = Sampling(temperature=1.0, constraint=Constraint.json_object(), logit_bias=(*closing, (EOS, 60.0)))
    for seed in range(10):
        assert isinstance(json.loads(answer(start(sampling), sample, seed)), dict)


def test_a_choice_and_a_grammar():
    texts = ["yes", "no", 'a "quoted" one', "zwölf"]
    choice = Constraint.choice(texts)
    got = {answer(start(Sampling(temperature=2.0, seed=i, constraint=choice)), sample, i) for i in range(40)}
    assert got <= set(texts)
    assert len(got) > 1
    grammar = Constraint("grammar", 'start: "(" start ")" | "x"')
    assert re.fullmatch(r"\(*x\)*", answer(start(Sampling(constraint=grammar)), sample, 0))


def test_white_space_in_json_is_bounded():
    """A model that would write spaces for ever gets to the end all the same."""
    spaces = tuple((token, 50.0) for text, token in sample().get_vocab().items() if set(text) <= {"Ġ", "Ċ"})
    assert len(spaces) > 5
    schema = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    text = answer(start(Sampling(constraint=schema, logit_bias=spaces)), sample, 1)
    assert set(json.loads(text)) >= {"a"}
    assert "\n" in text
    assert not re.search(r"\s{34}|\n\s*\n", text)


def test_answers_with_one_constraint_do_not_share_their_state():
    constraint = Constraint("regex", "ab|cd")
    first, second = (start(Sampling(constraint=constraint), byte_level) for _ in range(2))
    a, c = (byte_level().token_to_id(text) for text in "ac")
    for sampler, token in ((first, a), (second, c)):
        row = np.zeros(byte_level().get_vocab_size(), np.float32)
        row[token] = 5
        assert sampler.sample(row).token == token
    row = np.zeros(byte_level().get_vocab_size(), np.float32)
    assert byte_level().id_to_token(first.sample(row).token) == "b"
    assert byte_level().id_to_token(second.sample(row).token) == "d"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_leave_nothing_to_a_constraint_are_an_error(temperature):
    row = np.full(PADDED, -np.inf, np.float32)
    row[sample().token_to_id("a")] = 1
    with pytest.raises(InputError, match="-inf for every allowed token"):
        start(Sampling(temperature=temperature, constraint=Constraint("regex", "[0-9]"))).sample(row)


def test_any_thread_may_start_a_constrained_answer():
    shared = Samplers(sample(), PADDED, (EOS,))
    texts: dict[int, str] = {}

    def client(i: int) -> None:
        constraint = Constraint("regex", f"{i % 3}[a-z]{{3}}")
        texts[i] = answer(shared.start(Sampling(temperature=1.0, seed=i, constraint=constraint), [1]), sample, i)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 12
    assert all(re.fullmatch(f"{i % 3}[a-z]{{3}}", text) for i, text in texts.items())


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint.json_schema({"type": "strin"}), "json_schema: Invalid type: strin"),
        (Constraint.json_schema({"not": {}}), "json_schema: Unimplemented keys"),
        (Constraint.json_schema({"enum": []}), "json_schema: Unsatisfiable schema"),
        (Constraint("json_schema", "{"), "json_schema: "),
        (Constraint("regex", "("), "regex: .*unclosed group"),
        (Constraint("regex", "a(?=b)"), "regex: .*look-around"),
        (Constraint("grammar", "start: foo"), 'grammar: .*unknown name: "foo"'),
        (Constraint("grammar", 'start: start "a"'), "grammar: no answer can match it"),
        (Constraint("regex", r"[^\s\S]"), "regex: no answer can match it"),
        (Constraint("regex", "a\ud800"), "regex: .*surrogates not allowed"),
        (Constraint("grammar", "start: " + "(" * 60_000), "grammar: .*too deeply nested"),
        (Constraint.json_schema({"$ref": "https://example.org/x.json"}), "json_schema: .*retrieving it failed"),
    ],
)
def test_a_constraint_that_does_not_compile_is_refused(constraint, message):
    with pytest.raises(UsageError, match=re.compile(message, re.DOTALL)):
        start(Sampling(constraint=constraint))


def test_few_large_constraints_are_kept_compiled():
    compiler = ConstraintCompiler(sample(), 8192, [EOS])
    for i in range(12):
        compiler.start(Constraint("regex", f"{i}" + "a" * 60_000 if i % 2 else f"{i}"))
    kept = [int(constraint.text.rstrip("a")) for constraint in compiler._compiled]
    assert kept == [4, 5, 6, 7, 8, 9, 10, 11]  # the latest, whose large ones take 240,000 characters


def test_a_refusal_does_not_repeat_all_of_the_constraint():
    with pytest.raises(UsageError) as raised:
        start(Sampling(constraint=Constraint("regex", "(" * 10_000)))
    assert len(str(raised.value)) < 400


def test_an_empty_choice_is_refused():
    with pytest.raises(UsageError, match="a choice needs at least one string"):
        Constraint.choice([])
    with pytest.raises(UsageError, match="a choice needs at least one string"):
        Constraint.choice(["a", ""])


def test_a_model_without_an_end_cannot_be_constrained():
    with pytest.raises(UnsupportedError, match="no end-of-sequence token"):
        Samplers(sample(), 8192, ()).start(Sampling(constraint=PERSON), [1])


def test_a_tokenizer_of_another_kind_cannot_be_constrained():
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(UnsupportedError, match="this tokenizer does not support constrained answers: "):
        Samplers(words, 2, (1,)).start(Sampling(constraint=PERSON), [1])


def test_without_the_library_a_constraint_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EnvironmentLacks, match=r"need llguidance.*\nhint: pip install") as raised:
        Samplers(sample(), 8192, (EOS,)).start(Sampling(constraint=PERSON), [1])
    assert raised.value.exit_code == 8
    Samplers(sample(), 8192, (EOS,)).start(Sampling(), [1])


def after_trigger(
    tokenizer: Tokenizer, constraint: Constraint, said: list[int], seed: int, tokens: int = 40, eos: int = EOS
) -> str:
    """Say `said`, then what random logits give under the constraint, up to a number of tokens or the end."""
    vocabulary = tokenizer.get_vocab_size()
    sampler = Samplers(tokenizer, vocabulary, [eos]).start(
        Sampling(temperature=1, seed=seed, constraint=constraint), [1]
    )
    rng, ids = np.random.default_rng(seed), []
    for i in range(len(said) + tokens):
        logits = rng.normal(size=vocabulary).astype(np.float32)
        if i < len(said):
            logits[:], logits[said[i]] = -100, 100
        ids.append(sampler.sample(logits).token)
        if sampler.is_stop(ids[-1]):
            break
    assert ids[: len(said)] == said
    return tokenizer.decode(ids, skip_special_tokens=False)


DAY = {
    "type": "object",
    "properties": {"day": {"enum": ["Mon", "Tue"]}},
    "required": ["day"],
    "additionalProperties": False,
}
FOUND = re.compile(r'\{\s*"day"\s*:\s*"(Mon|Tue)"\s*\}')


@pytest.mark.parametrize("name", ["sample", "byte_level", "sentencepiece"])
def test_text_is_free_up_to_what_a_constraint_stands_behind_and_after_it(name: str) -> None:
    tokenizer = {"sample": sample, "byte_level": byte_level, "sentencepiece": sentencepiece}[name]()
    constraint = Constraint("grammar", 'start: "mon" | "tue"', trigger=r"at\s{0,3}the")
    for seed in range(5):
        said = tokenizer.encode("é, at  the", add_special_tokens=False).ids
        text = after_trigger(tokenizer, constraint, said, seed, tokens=30)
        tail = text.partition("at  the")[2]
        assert tail.startswith(("mon", "tue")), text
        assert len(tail) > 10, "text ends with what was wanted"  # random tokens, few of which are the end


def test_a_token_that_completes_the_beginning_may_go_on_behind_it() -> None:
    tokenizer = sample()
    constraint = Constraint("json_schema", json.dumps(DAY), trigger="call ")
    call = tokenizer.encode("call", add_special_tokens=False).ids
    brace, other = (tokenizer.token_to_id(token) for token in ('Ġ{"', 'Ġ["'))
    for seed in range(5):
        text = after_trigger(tokenizer, constraint, [*call, brace], seed)
        assert FOUND.match(text.removeprefix("call ")), text
        assert not FOUND.search(
            after_trigger(tokenizer, constraint, [*call, other], seed)
        )  # which begins no such object
        twice = [*call, other, *call, brace]
        assert FOUND.search(after_trigger(tokenizer, constraint, twice, seed))


def test_what_stands_behind_the_beginning_of_an_answer_holds_there_alone() -> None:
    tokenizer = sample()
    constraint = Constraint("grammar", 'start: "mon" | "tue"', trigger=r"\A\s{0,9}call:")
    call = tokenizer.encode("call:", add_special_tokens=False).ids
    word = tokenizer.encode("so " * 300, add_special_tokens=False).ids
    assert after_trigger(tokenizer, constraint, call, 1).startswith(("call:mon", "call:tue"))
    for before in (word[:1], word):
        text = after_trigger(tokenizer, constraint, [*before, *call], 1)
        assert "call:mon" not in text
        assert "call:tue" not in text


def test_a_constraint_holds_each_time_and_an_answer_may_end_between() -> None:
    tokenizer = sample()
    constraint = Constraint("grammar", 'start: "mon" | "tue"', trigger="call:")
    call = tokenizer.encode("call:", add_special_tokens=False).ids
    vocabulary = tokenizer.get_vocab_size()
    sampler = Samplers(tokenizer, vocabulary, [EOS]).start(Sampling(constraint=constraint), [1])
    for _ in range(3):
        ids: list[int] = []
        for token in call:
            logits = np.zeros(vocabulary, np.float32)
            logits[token] = 9
            ids.append(sampler.sample(logits).token)
        wants_end = np.zeros(vocabulary, np.float32)
        wants_end[EOS] = 9
        while (token := sampler.sample(wants_end).token) != EOS:
            ids.append(token)
        assert re.fullmatch("call:(mon|tue)", tokenizer.decode(ids))
