"""`llmforge bench` of embedders and rerankers: the engine in this process, and servers."""

from __future__ import annotations

import numpy as np
import pytest

from llmforge.base.errors import UsageError
from llmforge.base.http_server import HttpServer
from llmforge.measure.load import LoadSpec, SweepPlan
from llmforge.measure.load.encoders import EncoderEndpoint, EncodesInProcess
from llmforge.measure.load.sweep import measure
from llmforge.measure.load.workload import RandomPrompts, make_load
from llmforge.report import bench_table
from llmforge.serving.encoder_engine import EncoderEngine
from tests.fakes.fake_encoder import FakeEncoder, fake_embedder, fake_reranker, word_tokenizer
from tests.serving.http.test_encoders import serving

SPEC = LoadSpec(concurrency=(1,), prompt_tokens=(4, 8), texts=(1, 3))
PLAN = SweepPlan(requests=6, warmup=1)


@pytest.mark.parametrize("runner", [fake_embedder(), fake_reranker()], ids=["embedder", "reranker"])
def test_every_number_of_texts_at_every_length_is_sent(runner) -> None:  # type: ignore[no-untyped-def]
    with EncoderEngine(runner) as engine:
        responder = EncodesInProcess(engine, "small")
        points = measure(responder, SPEC.settings(), RandomPrompts(20), PLAN, lambda done, total: None)
    assert [(each.prompt_tokens, each.texts) for each in points] == [(4, 1), (4, 3), (8, 1), (8, 3)]
    assert [each.figures.prompt_tokens for each in points] == [24, 72, 48, 144]
    assert all(each.figures.ttft_ms is None and each.figures.latency_ms is not None for each in points)
    assert runner.session.batches == [[length] * texts for length in (4, 8) for texts in (1, 3) for _ in range(7)]
    cells = bench_table._encoded(points[1], 3)
    assert cells[:3] == ["1 in flight", "3", "4"]


@pytest.mark.parametrize("make", [fake_embedder, fake_reranker], ids=["embedder", "reranker"])
def test_a_server_is_asked(make) -> None:  # type: ignore[no-untyped-def]
    runner = make()
    with EncoderEngine(runner) as engine, serving(engine) as address:
        endpoint = EncoderEndpoint(HttpServer(f"http://{address}"), word_tokenizer(), runner.config)
        assert endpoint.description == f"small at http://{address}"
        (load,) = make_load(RandomPrompts(20), 1, prompt_tokens=8, output_tokens=0, texts=3)
        found = endpoint.answer(load, 0.0)
        assert (found.error, found.prompt_tokens, found.output_tokens) == (None, 24, 0)
        assert [len(each) for each in runner.session.batches] == [3]
        (wide,) = make_load(RandomPrompts(20), 1, prompt_tokens=60, output_tokens=0, texts=1)
        error = endpoint.answer(wide, 0.0).error
        assert (error is None) == (runner.config.kind == "reranker")  # whose server cuts texts


def test_what_fails_is_counted() -> None:
    session = FakeEncoder()
    session.error = UsageError("no such luck")
    runner = fake_embedder()
    runner.session = session
    with EncoderEngine(runner) as engine:
        (load,) = make_load(RandomPrompts(20), 1, prompt_tokens=2, output_tokens=0, texts=1)
        assert EncodesInProcess(engine, "small").answer(load, 0.0).error == "no such luck"


def test_texts_of_a_load_are_drawn() -> None:
    (load,) = make_load(RandomPrompts(20), 1, prompt_tokens=5, output_tokens=0, texts=2)
    assert (len(load.prompt), load.texts, load.output_tokens) == (10, 2, 0)
    assert np.array(load.prompt).max() < 20
    with pytest.raises(UsageError, match="1 or more"):
        LoadSpec(concurrency=(1,), texts=(0,))
