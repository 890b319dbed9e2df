"""What servers tell of a text: each way, bounds that contain the exact figures, and estimates without bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from llmforge.base.errors import UnsupportedError
from llmforge.base.http_server import HttpServer
from llmforge.checkpoint.text import TokenWindow
from llmforge.measure import served_quality
from llmforge.measure.completions import Completions
from llmforge.measure.logprobs import ServedLogprobs, TokenNames
from llmforge.metrics.served_quality import ServedQuality
from llmforge.metrics.tokens import KLD, NLL, REFERENCE_NLL, SAME_TOP, score
from llmforge.serving.prompts import read_tokenizer

from ..servers.completions_server import Gives, completions_server

VOCABULARY, TOKENS = 48, 9


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def reference(ids: Sequence[int]) -> NDArray[np.float32]:
    rows = [np.random.default_rng([7, *ids[max(0, at - 1) : at + 1]]).normal(size=VOCABULARY) for at in range(len(ids))]
    return (2 * np.stack(rows)).astype(np.float32)


def served_logits(ids: Sequence[int]) -> NDArray[np.float32]:
    rows = [np.random.default_rng([8, *ids[max(0, at - 1) : at + 1]]).normal(size=VOCABULARY) for at in range(len(ids))]
    return reference(ids) + (0.3 * np.stack(rows)).astype(np.float32)


WINDOWS = [
    TokenWindow(f"document {number}", np.random.default_rng(number).integers(0, VOCABULARY, TOKENS))
    for number in range(8)
]


def exact() -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for window in WINDOWS:
        both = [logits(window.ids.tolist())[:-1] for logits in (reference, served_logits)]
        for name, each in score(*both, window.ids[1:], (KLD, NLL, REFERENCE_NLL, SAME_TOP)).items():
            found.setdefault(name, []).append(float(each.sum()))
    return found


def measured(gives: Gives, most: int, against: Any = None, **options: Any) -> tuple[ServedQuality, ServedLogprobs]:
    with completions_server(words(), served_logits, gives, most) as server:
        served = ServedLogprobs(Completions(HttpServer(server.url)), TokenNames(words(), VOCABULARY), **options)
        served.open(WINDOWS[0].ids.tolist())
        logits = against or (lambda ids: reference(ids.tolist()))
        return served_quality.compare(WINDOWS, served, logits, spread=40.0), served


def require_bounds(quality: ServedQuality, *, skipped: int = 0) -> None:
    """Hold bounds to exact sums; `skipped` tokens of each document are not measured, and then means alone compare."""
    assert quality.tokens == len(WINDOWS) * (TOKENS - 1 - skipped)
    assert quality.windows_skipped == 0
    if skipped:
        return
    for name, sums in exact().items():
        for document, value in zip(quality.per_document, sums, strict=True):
            assert document.low[name] - 1e-4 <= value <= document.high[name] + 1e-4, (name, document)


@pytest.mark.parametrize("gives", ["prompt_logprobs", "echo"])
def test_bounds_contain_the_exact_figures(gives: Gives) -> None:
    quality, served = measured(gives, 8)
    require_bounds(quality)
    assert (served.way, served.top, served.shift, quality.listed) == (gives, 8, 0, 8)
    figures = quality.figures
    assert figures["kld_mean"].at_most.value > 2 * figures["kld_mean"].at_least.value > 0
    assert figures["perplexity_ratio"].is_exact  # the true token is always told
    assert figures["top1_agreement"].is_exact
    assert figures["kld_mean"].estimate.low == figures["kld_mean"].at_least.low
    assert figures["kld_mean"].estimate.high == figures["kld_mean"].at_most.high


@pytest.mark.parametrize("gives", ["prompt_logprobs", "echo", "logprobs", "content"])
def test_what_gives_all_is_exact(gives: Gives) -> None:
    quality, served = measured(gives, 1000)
    require_bounds(quality)
    assert served.top == VOCABULARY
    assert quality.figures["kld_mean"].is_exact
    assert quality.figures["kld_mean"].at_least.value == pytest.approx(sum(exact()["kld"]) / quality.tokens, abs=1e-6)


def test_rows_that_lie_a_place_too_far_are_put_right() -> None:
    quality, served = measured("echo-shifted", 8)
    assert (served.way, served.shift, served.as_text) == ("echo", 1, True)
    require_bounds(quality, skipped=1)  # of the first no row is there
    assert quality.tokens_untold == len(WINDOWS)
    whole, _ = measured("echo-shifted", 1000)
    found = []
    for window in WINDOWS:
        both = [logits(window.ids.tolist())[1:-1] for logits in (reference, served_logits)]
        found.append(score(*both, window.ids[2:], (KLD,))["kld"])
    assert whole.figures["kld_mean"].at_least.value == pytest.approx(np.mean(found), abs=1e-6)
    low, high = (getattr(quality.figures["kld_mean"], side).value for side in ("at_least", "at_most"))
    assert low <= whole.figures["kld_mean"].at_least.value <= high


@pytest.mark.parametrize("gives", ["logprobs", "chosen", "content"])
def test_tokens_that_are_drawn_estimate_the_kld_without_bias(gives: Gives) -> None:
    quality, served = measured(gives, 4)
    assert served.forces
    require_bounds(quality)
    found, truth = quality.figures["kld_mean"].estimate, sum(exact()["kld"]) / quality.tokens
    assert found.low is not None
    assert found.high is not None
    assert found.low <= truth <= found.high
    assert quality.kld_truncated is not None
    assert quality.kld_truncated.at_least.value < truth < quality.kld_truncated.at_most.value
    assert found.high - found.low < 0.2 * (quality.kld_truncated.at_most.value - quality.kld_truncated.at_least.value)
    assert quality.figures["perplexity_ratio"].is_exact


def test_what_is_known_does_not_hang_on_the_token_that_is_drawn() -> None:
    """A server that lists the chosen token beside the likeliest ones gives the same estimate as one that does not."""
    one, other = measured("logprobs", 4)[0], measured("chosen", 4)[0]
    assert [each.sampled_kld for each in one.per_document] == [each.sampled_kld for each in other.per_document]


def test_a_bias_that_counts_is_not_taken_for_the_model_s_own() -> None:
    quality, served = measured("biased", 4)
    assert not served.forces
    require_bounds(quality)
    assert quality.kld_truncated is None
    assert not quality.figures["perplexity_ratio"].is_exact


def test_each_token_is_asked_for_by_itself_on_demand() -> None:
    with completions_server(words(), served_logits, "prompt_logprobs", 8) as server:
        served = ServedLogprobs(Completions(HttpServer(server.url)), TokenNames(words(), VOCABULARY), one_by_one=True)
        served.open(WINDOWS[0].ids.tolist())
        assert served.way == "logprobs"
        assert not [each for each in server.asked if "prompt_logprobs" in each]


def test_two_servers_are_held_against_each_other() -> None:
    with completions_server(words(), reference, "echo", 8) as other:
        theirs = ServedLogprobs(Completions(HttpServer(other.url)), TokenNames(words(), VOCABULARY))
        theirs.open(WINDOWS[0].ids.tolist())
        quality, _ = measured("prompt_logprobs", 8, theirs)
    require_bounds(quality)


def test_without_a_reference_there_is_perplexity() -> None:
    with completions_server(words(), served_logits, "prompt_logprobs", 8) as server:
        served = ServedLogprobs(Completions(HttpServer(server.url)), TokenNames(words(), VOCABULARY))
        served.open(WINDOWS[0].ids.tolist())
        quality = served_quality.compare(WINDOWS, served, None, spread=40.0)
    assert set(quality.figures) == {"perplexity"}
    nll = sum(exact()["nll"]) / quality.tokens
    assert np.log(quality.figures["perplexity"].at_least.value) == pytest.approx(nll, abs=1e-6)


def test_what_tells_nothing_is_refused_with_what_was_tried() -> None:
    with pytest.raises(
        UnsupportedError, match=r"prompt_logprobs: .*HTTP 400.*echo: .*HTTP 400.*logprobs: another shape"
    ):
        measured("nothing", 8)


def test_more_than_a_server_gives_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="9 log-probabilities; at most 8"):
        measured("prompt_logprobs", 8, top=9)


def test_a_server_of_another_tokenizer_is_refused() -> None:
    other = Tokenizer(models.WordLevel({f"w{VOCABULARY - 1 - number}": number for number in range(VOCABULARY)}, "w0"))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    with completions_server(other, served_logits, "echo", 8) as server:
        served = ServedLogprobs(Completions(HttpServer(server.url)), TokenNames(words(), VOCABULARY))
        with pytest.raises(UnsupportedError, match=r"reads a text as other tokens.*it calls token"):
            served.open(WINDOWS[0].ids.tolist())


def test_names_of_several_tokens_name_none(sample_checkpoint: Any) -> None:
    tokenizer = read_tokenizer(sample_checkpoint / "tokenizer.json")
    names = TokenNames(tokenizer, 8192)
    broken = [token for token in range(300) if "\ufffd" in tokenizer.decode([token])]
    assert names.find("\ufffd") is None
    assert names.may_be("\ufffd", broken[0])
    assert names.find("token_id:17") == 17
    the = tokenizer.encode(" the").ids[-1]
    assert names.find(" the") == the
