"""Figures of quality: made from values of each predicted token, with intervals over documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from llmforge.metrics import document_quantiles
from llmforge.metrics.intervals import Estimate, quantile_interval, share_interval
from llmforge.metrics.record import FiguresRecord, ReportRecord
from llmforge.metrics.studentized import bounds, means, studentized
from llmforge.metrics.token_records import DocumentTokens, WindowScores, keep
from llmforge.metrics.tokens import Floats, TokenValue

MOST_DOCUMENTS = 10_000  # of an evaluation; as many bound their figures in 3 s, when `verify` makes them again
PROMPT_TOKENS, ANSWER_TOKENS = 32, 128  # of answers that are compared: of a document, and after it at most

# What is measured: each token of the text; those of them that chats answer; the places where a text or an answer ends;
# some tokens again, read one by one, as a decode step does; greedy answers. The latter two as a recipe asks for them.
Source = Literal["text", "answer_tokens", "ends", "decode_tokens", "samples"]


@dataclass(frozen=True)
class Summed:
    """A value of each token that is no comparison of two logits; a report keeps its sum under `name`."""

    name: str


@dataclass(frozen=True)
class OfSums:
    """A figure that sums over tokens are enough for, of all documents, of some, or of one."""

    values: tuple[TokenValue | Summed, ...]
    figure: Callable[..., Floats]  # makes figures [r] of the number of tokens [r] and the sum of each value [r]
    finish: Callable[[float], float] = float  # monotone; applied to a figure and to its bounds
    bounded: bool = True  # with an interval, so that a gate can decide on it
    source: Source = "text"
    limits: tuple[float, float] = (-math.inf, math.inf)  # that the figure cannot be beyond

    @property
    def decides(self) -> bool:
        """Whether a gate can decide on it."""
        return self.bounded

    def of(self, sums: DocumentSums) -> float:
        """Make the figure of one document."""
        totals = (sums.tokens, *(sums.figures[value.name] for value in self.values))
        return self.finish(float(self.figure(*(np.float64(total) for total in totals))))


@dataclass(frozen=True)
class OfTokens:
    """A figure of a value of all tokens [N], with no interval."""

    decides: ClassVar[bool] = False
    source: ClassVar[Source] = "text"

    value: TokenValue
    figure: Callable[[Floats], float]

    def of(self, values: Floats) -> float:
        """Make the figure."""
        return float(self.figure(values))


@dataclass(frozen=True)
class Quantile:
    """The value that so large a share of all tokens does not exceed; between two tokens linearly, as numpy has it."""

    decides: ClassVar[bool] = True
    source: ClassVar[Source] = "text"

    value: TokenValue
    share: float


@dataclass(frozen=True)
class ByPosition:
    """The mean of a value over tokens with about as much context before them: a curve."""

    decides: ClassVar[bool] = False
    source: ClassVar[Source] = "text"

    value: TokenValue


@dataclass(frozen=True)
class OfAnswers:
    """A figure of greedy answers, each of another document."""

    decides: ClassVar[bool] = True
    source: ClassVar[Source] = "samples"

    figure: Callable[[Sequence[GreedyAnswer]], Estimate | None]  # None: the answers do not tell


@dataclass(frozen=True)
class Histogram:
    """Tokens by the logarithm of a value. What lies beyond the ends, and rounding below 0, goes to the end bins."""

    decides: ClassVar[bool] = False
    source: ClassVar[Source] = "text"

    value: TokenValue
    decades: tuple[int, int]  # log10 of both ends
    bins_per_decade: int = 4
    marks: Mapping[str, str] = field(default_factory=dict)  # figures marked on it: label, and name of the metric

    def of(self, values: Floats) -> tuple[int, ...]:
        """Count the tokens in each bin."""
        low, high = self.decades
        bins = (high - low) * self.bins_per_decade
        decades = np.log10(np.maximum(values, 10.0**low))
        at = np.clip(np.floor((decades - low) * self.bins_per_decade).astype(int), 0, bins - 1)
        return tuple(int(tokens) for tokens in np.bincount(at, minlength=bins))


Form = OfSums | OfTokens | Quantile | ByPosition | OfAnswers | Histogram


class DocumentSums(FiguresRecord):
    """Sums over the predicted tokens of one document, by the names of the values."""

    __pydantic_extra__: dict[str, int | float]

    document: str
    tokens: int


class Segment(ReportRecord):
    """A stretch of a curve."""

    first: int  # tokens of context, the fewest and the most
    last: int
    tokens: int  # predicted there
    figure: Estimate


class GreedyAnswer(ReportRecord):
    """The greedy continuation of the beginning of one document, by the artifact, against the baseline's."""

    document: str
    prompt_tokens: int
    tokens: int  # of the artifact's answer, the end of the text included
    first_difference: int | None  # equal tokens before it; None: the answers are the same
    ended: bool | None = None  # whether the text ends there; None: it was not written down
    baseline_tokens: int | None = None  # None: the baseline did not write its answer to the end
    baseline_ended: bool | None = None

    @model_serializer(mode="wrap")
    def _known(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out how answers end where that is not known."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name == "first_difference" or value is not None}

    def same(self, tokens: int) -> bool:
        """Say if the first so many tokens are the same, as far as the answers go."""
        return self.first_difference is None or self.first_difference >= tokens


class Sample(ReportRecord):
    """Both answers to one prompt, as text."""

    document: str
    prompt: str
    shared: str  # how both begin
    baseline: str  # how each goes on; "" for both: they are the same
    artifact: str


class Quality(FiguresRecord):
    """How far the artifact is from the baseline, over all predicted tokens; intervals are over documents."""

    __pydantic_extra__: dict[str, Estimate | float | tuple[Segment, ...] | tuple[int, ...]]

    context: int  # tokens of the longest window, BOS included
    scored: Literal["all", "second-half"] = "all"  # of the tokens of each window; see `QualitySpec`
    documents: int
    windows: int
    tokens: int  # predicted ones
    samples: tuple[Sample, ...] = ()
    per_document: tuple[DocumentSums, ...] = Field(max_length=MOST_DOCUMENTS)
    per_token: tuple[DocumentTokens, ...] = Field(default=(), max_length=MOST_DOCUMENTS)  # of as many as are kept
    per_document_decoded: tuple[DocumentSums, ...] = Field(default=(), max_length=MOST_DOCUMENTS)  # read one by one too
    answers: tuple[GreedyAnswer, ...] = Field(default=(), max_length=MOST_DOCUMENTS)
    per_chat: tuple[DocumentSums, ...] = Field(default=(), max_length=MOST_DOCUMENTS)  # of answer tokens alone
    per_ending: tuple[DocumentSums, ...] = Field(default=(), max_length=MOST_DOCUMENTS)  # where texts and answers end

    @model_serializer(mode="wrap")
    def _long_ones_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write what is long after the figures."""
        fields: dict[str, Any] = write(self)
        for name in ("per_chat", "per_ending"):
            if not fields[name]:
                del fields[name]
        long = ("samples", "answers", "per_document", "per_chat", "per_ending", "per_document_decoded", "per_token")
        for name in long:
            if name in fields:
                fields[name] = fields.pop(name)
        return fields

    def sums(self, source: Source) -> tuple[DocumentSums, ...]:
        """Give the sums over each document that figures of a source are made of."""
        of_others = {
            "answer_tokens": self.per_chat,
            "ends": self.per_ending,
            "decode_tokens": self.per_document_decoded,
        }
        return of_others.get(source, self.per_document)

    @property
    def kept_tokens(self) -> int:
        """Of how many tokens quantiles and curves are made."""
        return sum(document.tokens for document in self.per_token)

    def make(self, forms: Mapping[str, Form]) -> dict[str, Any]:
        """Make the figures of `forms`, by name, of the raw values; what was not asked for is not there.

        Raises:
            ValueError, LookupError, ArithmeticError: the raw values are none that a measurement gives.
        """
        made: dict[str, Any] = {}
        sources: tuple[Source, ...] = ("text", "answer_tokens", "ends", "decode_tokens")
        for source in sources:
            sums = self.sums(source)
            of_sums = {n: form for n, form in forms.items() if isinstance(form, OfSums) and form.source == source}
            if of_sums and sums:
                made |= estimates(of_sums, sums)
        made |= _of_tokens(forms, self.per_token)
        if self.answers:
            of_answers = {
                name: form.figure(self.answers) for name, form in forms.items() if isinstance(form, OfAnswers)
            }
            made |= {name: figure for name, figure in of_answers.items() if figure is not None}
        return {name: made[name] for name in forms if name in made}


def values(forms: Sequence[Form]) -> tuple[TokenValue, ...]:
    """List what has to be known of each token of the text, every value once."""
    return tuple({value.name: value for form in forms for value in _values(form)}.values())


def _values(form: Form) -> Iterator[TokenValue]:
    if isinstance(form, OfSums):
        yield from (value for value in form.values if isinstance(value, TokenValue))
    elif not isinstance(form, OfAnswers):
        yield form.value


def summarize(
    forms: Mapping[str, Form],
    scores: Mapping[str, Sequence[WindowScores]],
    *,
    context: int,
    scored: Literal["all", "second-half"] = "all",
    chats: Mapping[str, Sequence[WindowScores]] | None = None,
    endings: Mapping[str, Sequence[WindowScores]] | None = None,
    decoded: Mapping[str, Sequence[WindowScores]] | None = None,
    answers: Sequence[GreedyAnswer] = (),
    samples: Sequence[Sample] = (),
) -> Quality:
    """Make the figures of `forms`, by name, with their bounds, from the scores of each document's windows.

    `chats` has those of answer tokens alone, `endings` those where a text or an answer ends, `decoded` those that were
    read one by one as well. Quantiles and curves are of values as a record keeps them, fp32, so that they can be made
    again of it.
    """
    summed = [form for form in forms.values() if isinstance(form, OfSums)]

    def sums(source: Source, parts: Mapping[str, Sequence[WindowScores]] | None) -> tuple[DocumentSums, ...]:
        names = _summed([form for form in summed if form.source == source])
        if not names and source != "text":  # nothing is made of it
            return ()
        return tuple(_sums(document, each, names) for document, each in (parts or {}).items())

    per_document = sums("text", scores)
    kept = [form for form in forms.values() if not isinstance(form, OfSums)]
    nothing: dict[str, Any] = {}
    raw = Quality(
        context=context,
        scored=scored,
        documents=len(per_document),
        windows=sum(len(windows) for windows in scores.values()),
        tokens=sum(sums.tokens for sums in per_document),
        per_document=per_document,
        per_token=keep(scores, [value.name for value in values(kept)]) if values(kept) else (),
        per_document_decoded=sums("decode_tokens", decoded),
        per_chat=sums("answer_tokens", chats),
        per_ending=sums("ends", endings),
        answers=tuple(answers),
        samples=tuple(samples),
        **nothing,
    )
    return Quality(**dict(raw), **raw.make(forms))


def _summed(forms: Sequence[OfSums]) -> list[str]:
    return list(dict.fromkeys(value.name for form in forms for value in form.values))


def _of_tokens(forms: Mapping[str, Form], per_token: Sequence[DocumentTokens]) -> dict[str, Any]:
    """Make the figures that need the value of every token."""
    of_tokens = {name: form for name, form in forms.items() if not isinstance(form, OfSums | OfAnswers)}
    if not of_tokens or not per_token:
        return {}
    made: dict[str, Any] = {}
    for value in values(list(of_tokens.values())):
        mine = {name: form for name, form in of_tokens.items() if form.value == value}
        read = [document.values(value.name) for document in per_token]
        of_all, owners = np.concatenate(read), np.repeat(np.arange(len(read)), [len(each) for each in read])
        shares = [form.share for form in mine.values() if isinstance(form, Quantile)]
        within = iter(document_quantiles.bounds(of_all, owners, shares) or [] if shares else [])
        for name, form in mine.items():
            if isinstance(form, Quantile):
                made[name] = _within(float(np.quantile(of_all, form.share)), next(within, None), len(per_token))
            elif isinstance(form, ByPosition):
                made[name] = _curve(of_all, per_token)
            else:
                made[name] = form.of(of_all)
    return made


def _curve(of_all: Floats, per_token: Sequence[DocumentTokens]) -> tuple[Segment, ...]:
    """Cut a value of all tokens by the context before them, finer at the beginning: 16, 24, 32, 48, 64, 96, …"""
    context = [document.context for document in per_token]
    most = max(int(each.max()) for each in context)
    edges = [1, *sorted(16 * 2**octave * half // 2 for octave in range(most.bit_length()) for half in (2, 3))]
    edges = [edge for edge in edges if edge <= most]
    ends = np.cumsum([len(each) for each in context])[:-1]
    sums, counts = np.zeros((2, len(context), len(edges)))
    for number, (places, mine) in enumerate(zip(context, np.split(of_all, ends), strict=True)):
        at = np.searchsorted(edges, places, side="right") - 1
        sums[number], counts[number] = (np.bincount(at, weights, len(edges)) for weights in (mine, None))
    within = [bounds(mean) for mean in means(sums, counts)]
    return tuple(
        Segment(
            first=edge,
            last=last - 1,
            tokens=int(counts[:, i].sum()),
            figure=_within(
                float(sums[:, i].sum() / counts[:, i].sum()), within[i], int(np.count_nonzero(counts[:, i]))
            ),
        )
        for i, (edge, last) in enumerate(zip(edges, [*edges[1:], most + 1], strict=True))
        if counts[:, i].any()
    )


def _within(value: float, found: tuple[float, float] | None, samples: int, of: str = "documents") -> Estimate:
    """Make an estimate whose bounds hold the figure."""
    if found is None:
        return Estimate(value=value, low=None, high=None, samples=samples, of=of)
    return Estimate(value=value, low=min(value, found[0]), high=max(value, found[1]), samples=samples, of=of)


def share_same(answers: Sequence[GreedyAnswer], tokens: int) -> Estimate:
    """Estimate how many of the answers have the same first `tokens` tokens."""
    same = sum(answer.same(tokens) for answer in answers)
    return _within(same / len(answers), share_interval(same, len(answers)), len(answers), "answers")


def median_difference(answers: Sequence[GreedyAnswer]) -> Estimate:
    """Estimate the median of how many tokens are the same; of answers that do not differ, all that were asked for."""
    same = [ANSWER_TOKENS if answer.first_difference is None else answer.first_difference for answer in answers]
    found = quantile_interval(np.array(same, np.float64), 0.5)
    return _within(float(median(same)), found, len(answers), "answers")


def length_ratio(answers: Sequence[GreedyAnswer]) -> Estimate | None:
    """Estimate how many tokens answers have by those that the baseline's have; None: not all of these are known."""
    lengths = [(answer.baseline_tokens, answer.tokens) for answer in answers if answer.baseline_tokens]
    if len(lengths) < len(answers):
        return None
    sums = np.array(lengths, np.float64)
    [found] = studentized(sums, lambda totals: totals[:, 1:] / totals[:, :1])
    return _within(found.value, bounds(found), len(answers), "answers")


def ends_added(answers: Sequence[GreedyAnswer]) -> Estimate | None:
    """Estimate which share of answers end within what was asked for, less that of the baseline's; None: unknown.

    Its bounds are those of both shares of which it is the difference, answers that end on one side alone.
    """
    if any(answer.ended is None or answer.baseline_ended is None for answer in answers):
        return None
    count = len(answers)
    added = sum(bool(answer.ended and not answer.baseline_ended) for answer in answers)
    lost = sum(bool(answer.baseline_ended and not answer.ended) for answer in answers)
    more, fewer = share_interval(added, count), share_interval(lost, count)
    return _within((added - lost) / count, (more[0] - fewer[1], more[1] - fewer[0]), count, "answers")


def estimates(forms: Mapping[str, OfSums], per_document: Sequence[DocumentSums]) -> dict[str, Estimate | float]:
    """Make figures of the sums of each document, and bound them."""
    names = _summed(list(forms.values()))
    sums = np.array([(d.tokens, *(d.figures[name] for name in names)) for d in per_document], np.float64)

    def make(totals: Floats) -> Floats:  # [r, M] to [r, K]
        tokens, *others = totals.T
        total = dict(zip(names, others, strict=True))
        return np.stack([form.figure(tokens, *(total[v.name] for v in form.values)) for form in forms.values()], 1)

    found: dict[str, Estimate | float] = {}
    for (name, form), figure in zip(forms.items(), studentized(sums, make), strict=True):
        value = form.finish(figure.value)
        found[name] = value
        if form.bounded:
            within = bounds(figure)
            if within is not None:
                low, high = max(within[0], form.limits[0]), min(within[1], form.limits[1])
                within = form.finish(low), form.finish(high)
            found[name] = _within(value, within, len(per_document))
    return found


def exp(nats: float) -> float:
    """Raise e to a power; beyond fp64, infinity instead of an exception."""
    return math.exp(nats) if nats < math.log(sys.float_info.max) else math.inf


def _sums(document: str, parts: Sequence[WindowScores], names: Sequence[str]) -> DocumentSums:
    """Sum the values `names` over the windows of a document: floats, or how many are true."""
    tokens = sum(part.tokens for part in parts)
    sums: dict[str, Any] = {}
    for name in names:
        totals = [part.values[name].sum().item() for part in parts]
        sums[name] = sum(totals) if isinstance(totals[0], int) else math.fsum(totals)
    return DocumentSums(document=document, tokens=tokens, **sums)
