"""The adapter for lm-evaluation-harness: its tasks and metrics, our engines. It is imported where tasks are run alone.

https://github.com/EleutherAI/lm-evaluation-harness/tree/v0.4.13, whose conventions hold: how a context and what follows
are tokenized, that texts are cut on the left to what a model can read, how windows roll over long texts, the seeds of
few-shot examples. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
from jinja2.sandbox import SandboxedEnvironment

from llmforge.base import located_yaml
from llmforge.base.errors import DataError, UnsupportedError, UsageError
from llmforge.measure import task_files
from llmforge.measure.scoring import Keep, Likelihood, Pair, TaskRequest, TaskSide, blocks
from llmforge.metrics.tasks import Form, Score, TaskResult
from llmforge.recipe import TASK_FILES

# Read by the libraries as they are imported: a data set is a file here, or one that was downloaded before.
for _variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
    os.environ[_variable] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of others' modules
    import datasets
    import lm_eval.api.task
    import lm_eval.evaluator
    import lm_eval.utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import METRIC_REGISTRY
    from lm_eval.tasks import TaskManager

BLOCK = 64  # requests that are kept together: so many are lost at most where a run is killed
ANSWER_TOKENS = 256  # of a task that does not say how many; the harness's default
SEED, OTHER_SEED = 0, 1234  # the harness's own
_NAMES = {"acc": "accuracy", "acc_norm": "accuracy_norm"}
_FORMS: Mapping[str, Form] = {"weighted_perplexity": "perplexity", "perplexity": "perplexity", "bits_per_byte": "bits"}
_PROBLEMS = (jinja2.TemplateError, LookupError, ValueError, TypeError, AssertionError)  # of a task, in the harness
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")

Encode = Callable[[str, bool], list[int]]  # text, and whether the tokenizer adds its special tokens
Render = Callable[[Sequence[Mapping[str, str]]], str]  # messages, up to where the assistant speaks
Found = TypeVar("Found", Likelihood, str)


@dataclass(frozen=True)
class TaskTokens:
    """How text becomes tokens, on both sides."""

    encode: Encode
    prefix: int  # stands before a text without a context
    render: Render | None = None  # what is asked, by a chat template; None: there is none, and it is asked as text


def measure(
    asked: TaskRequest,
    tokens: TaskTokens,
    artifact: tuple[TaskSide, Keep],
    baseline: tuple[TaskSide, Keep] | None,
    *,
    stage: Callable[[str], None] = lambda title: None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[TaskResult, ...], tuple[str, ...]]:
    """Run tasks on both sides; give the results, and which scores were left out and why.

    Raises:
        UsageError: there is no such task.
        DataError: a task, or its data, cannot be used.
        UnsupportedError: a task asks for something else than likelihoods and greedy text.
    """
    stage("Run tasks on the artifact")
    ours = _run(asked, _Model(artifact[0], artifact[1], tokens, advance))
    theirs: dict[str, _Ran] = {}
    if baseline is not None:
        stage("Run tasks on the checkpoint")
        theirs = _run(asked, _Model(baseline[0], baseline[1], tokens, advance))
    results, skipped = [], list[str]()
    for name, ran in ours.items():
        other = theirs.get(name)
        if other is not None and other.digest != ran.digest:
            raise DataError(f"task {name}: asks something else each time it is loaded, so that nothing can be paired")
        scores = dict(_scores(name, ran, other, skipped))
        if not scores:
            raise UnsupportedError(f"task {name}: none of its scores can be paired: {'; '.join(skipped)}")
        results.append(
            TaskResult(
                name=name,
                version=ran.version,
                digest=ran.digest,
                few_shot=ran.few_shot,
                documents=ran.documents,
                scores=scores,
                created=datetime.now(UTC).replace(microsecond=0).isoformat(),
                engine=artifact[0].description,
                baseline=None if baseline is None else baseline[0].description,
            )
        )
    return tuple(results), tuple(skipped)


@dataclass(frozen=True)
class _Ran:
    """A task that was run on one side."""

    version: str
    digest: str
    few_shot: int
    documents: tuple[int, ...]
    values: dict[str, tuple[Any, ...]]  # by score, item by item
    forms: dict[str, Form | str]  # a text that is no form says why the score is left out


def _run(asked: TaskRequest, model: _Model) -> dict[str, _Ran]:
    with _quiet(), _seeded(), _sandboxed():
        tasks = _load(asked)
        try:
            found = lm_eval.evaluator.evaluate(
                model,
                {"tasks": tasks},
                limit=asked.limit,
                bootstrap_iters=0,
                apply_chat_template=model.tokenizer_name != "",
                fewshot_as_multiturn=True,
            )
        except _PROBLEMS as error:
            raise DataError(f"{', '.join(tasks)}: cannot be run: {_said(error)}") from error
    return {_UNFIT.sub("_", name): _ran(task, found["samples"][name]) for name, task in tasks.items()}


def _load(asked: TaskRequest) -> dict[str, Any]:
    """Load the tasks; a name that is a group or a tag gives several."""
    specs = [_read(Path(task)) if task.endswith(TASK_FILES) else task for task in asked.tasks]
    manager = TaskManager(include_defaults=any(isinstance(spec, str) for spec in specs))
    if unknown := [spec for spec in specs if isinstance(spec, str) and spec not in manager.all_tasks]:
        near = located_yaml.nearest(unknown[0], manager.all_tasks)
        raise UsageError(
            f"no such task: {unknown[0]!r}",
            hint=f"did you mean {near!r}?"
            if near
            else "give the name of a task of lm-evaluation-harness, or a YAML file",
        )
    try:
        tasks: dict[str, Any] = manager.load(specs)["tasks"]
    except (OSError, *_PROBLEMS, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{', '.join(asked.tasks)}: cannot be loaded: {_said(error)}",
            hint="nothing is downloaded: its data must be local files, or in the cache of `datasets`",
        ) from error
    for task in tasks.values():
        if task.OUTPUT_TYPE not in ("loglikelihood", "multiple_choice", "loglikelihood_rolling", "generate_until"):
            raise UnsupportedError(f"task {task.config.task}: {task.OUTPUT_TYPE} is not supported")
        default = task.get_config("num_fewshot")
        if default is None or (asked.few_shot is not None and default != 0):  # 0 in a task means that it has none
            task.set_config(key="num_fewshot", value=asked.few_shot or 0)
        task.set_fewshot_seed(seed=OTHER_SEED)
    return tasks


def _read(path: Path) -> dict[str, Any]:
    """Read the file of a task, whose metrics must be the harness's own.

    Raises:
        DataError, RecipeError: as `task_files.read`; or there is no such metric.
    """
    config = task_files.read(path)
    for entry in config.get("metric_list") or []:
        metric = entry.get("metric") if isinstance(entry, Mapping) else entry
        if metric not in METRIC_REGISTRY:  # the harness would look for a script of that name
            raise DataError(
                f"{path}: metric_list: no such metric: {metric!r}", hint=f"known: {', '.join(METRIC_REGISTRY)}"
            )
    return config


def _ran(task: Any, samples: Sequence[Mapping[str, Any]]) -> _Ran:
    """Read the scores of the items, and the requests that they are of."""
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    by_filter = {
        name: sorted((s for s in samples if s["filter"] == name), key=lambda s: s["doc_id"]) for name in filters
    }
    items = by_filter[filters[0]]
    asked = [(item["arguments"], item["target"]) for item in items]
    plain = json.dumps(asked, sort_keys=True, default=str)
    better, aggregation = task.higher_is_better(), task.aggregation()
    values, forms = dict[str, tuple[Any, ...]](), dict[str, Form | str]()
    for filter_, rows in by_filter.items():
        for metric in rows[0]["metrics"]:
            name = _NAMES.get(metric, metric) + ("" if filter_ == "none" else f".{_UNFIT.sub('_', filter_)}")
            values[name] = tuple(row[metric] for row in rows)
            forms[name] = _form(aggregation.get(metric), better.get(metric, True), values[name])
    metadata = task.config.metadata or {}
    return _Ran(
        version=str(metadata.get("version", task.VERSION)),
        digest=hashlib.sha256(plain.encode()).hexdigest(),
        few_shot=int(task.config.num_fewshot or 0),
        documents=_documents(metadata.get("document"), items),
        values=values,
        forms=forms,
    )


def _documents(field: str | None, items: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Number the documents of the items: by the field that the task names in `metadata.document`, else one each."""
    if field is None:
        return tuple(range(len(items)))
    if any(field not in item["doc"] for item in items):
        raise DataError(f"metadata.document is {field!r}, which an item does not have")
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(str(item["doc"][field]), len(numbers)) for item in items)


def _form(aggregation: Any, higher: bool, values: Sequence[Any]) -> Form | str:
    """Say how the figure is made of items, or why it is not one that can be paired."""
    name = getattr(aggregation, "__name__", str(aggregation))
    if name in _FORMS:
        return _FORMS[name]
    if name != "mean" or not all(isinstance(value, bool | int | float | np.number) for value in values):
        return f"it is made by {name}, not by a mean over items"
    return "mean" if higher else "less of it is better"


def _scores(name: str, ours: _Ran, theirs: _Ran | None, skipped: list[str]) -> Iterator[tuple[str, Score]]:
    for score, form in ours.forms.items():
        if form not in ("mean", "perplexity", "bits"):
            skipped.append(f"task {name}: {score} is left out: {form}")
            continue
        values, weights = _columns(ours.values[score])
        other = None if theirs is None else _columns(theirs.values[score])[0]
        yield score, Score.of(form, values, other, ours.documents, weights)


def _columns(values: Sequence[Any]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Split likelihoods of texts from their words or bytes."""
    if isinstance(values[0], tuple | list):
        return tuple(float(value) for value, _ in values), tuple(float(weight) for _, weight in values)
    return tuple(float(value) for value in values), None


class _Model(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """One side, as the harness asks it."""

    def __init__(self, side: TaskSide, keep: Keep, tokens: TaskTokens, advance: Callable[[int, int], None]) -> None:
        super().__init__()
        self._side, self._keep, self._tokens, self._advance = side, keep, tokens, advance

    @property
    def eot_token_id(self) -> int:
        return self._tokens.prefix

    @property
    def tokenizer_name(self) -> str:
        return "" if self._tokens.render is None else "chat template"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write messages; without a generation prompt, the last one is how the assistant's answer begins."""
        assert self._tokens.render is not None
        if add_generation_prompt:
            return self._tokens.render(chat_history)
        return self._tokens.render(chat_history[:-1]) + chat_history[-1]["content"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        # A chat template writes special tokens itself.
        return self._tokens.encode(string, add_special_tokens is not False and self._tokens.render is None)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[Likelihood]:
        found: list[Likelihood] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Likelihood]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        pairs, counts = list[Pair](), list[int]()
        for request in requests:
            windows = lm_eval.utils.get_rolling_token_windows(
                self._tokens.encode(request.args[0], False), self._tokens.prefix, self._side.longest, 1
            )
            rolled = [lm_eval.utils.make_disjoint_window(window) for window in windows]
            pairs += rolled
            counts.append(len(rolled))
        found = iter(self._score(pairs))
        return [sum(next(found)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        prompts = []
        for request in requests:
            context, options = request.args
            if options.get("do_sample") and float(options.get("temperature", 1.0)) > 0:
                raise UnsupportedError("a task samples its answers; artifact and checkpoint are compared greedily")
            count = int(options.get("max_gen_toks", ANSWER_TOKENS))
            until = options.get("until") or []
            room = self._side.longest - count
            if room < 1:
                raise DataError(f"a task asks for answers of {count} tokens; the engine has {self._side.longest}")
            ids = self.tok_encode(context)[-room:]
            prompts.append((ids, count, [until] if isinstance(until, str) else list(until)))
        return self._kept("answer", prompts, lambda block: [self._side.answer(*each) for each in block])

    def _score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        cut = [self._cut(context, continuation) for context, continuation in pairs]
        kept: list[Any] = self._kept("score", cut, self._side.score)
        return [(value, bool(greedy)) for value, greedy in kept]

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        """Cut a context on the left to what can be read; its last token, and what follows, must stay."""
        if len(continuation) > self._side.longest:
            raise DataError(
                f"a task asks for the likelihood of {len(continuation)} tokens; the engine has {self._side.longest}"
            )
        room = self._side.longest + 1 - len(continuation)  # the last token is not read
        return context[-room:], continuation

    def _kept(self, kind: str, requests: Sequence[Any], compute: Callable[[Sequence[Any]], list[Found]]) -> list[Found]:
        found: list[Found] = []
        for part in blocks(len(requests), BLOCK):
            self._advance(part.start, len(requests))
            block = requests[part]
            found += self._keep.block(kind, block, partial(compute, block))
        self._advance(len(requests), len(requests))
        return found


def _said(error: Exception) -> str:
    """Write an error of the harness in one bounded line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness and `datasets` from writing to the terminal."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    bars, lm_eval.api.task.tqdm = lm_eval.api.task.tqdm, _no_bar
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        lm_eval.api.task.tqdm = bars
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()


def _no_bar(items: Iterable[Found], **_: Any) -> Iterable[Found]:
    """Stand in for tqdm."""
    return items


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed what tasks draw from, as the harness does, and give it back as it was."""
    before, arrays = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(arrays)


@contextmanager
def _sandboxed() -> Iterator[None]:
    """Render the templates of task files in jinja's sandbox: the harness's own environment lets them run anything."""
    before = lm_eval.utils.env
    made = SandboxedEnvironment(
        loader=jinja2.BaseLoader(), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    made.filters.update(before.filters)
    lm_eval.utils.env = made
    try:
        yield
    finally:
        lm_eval.utils.env = before
