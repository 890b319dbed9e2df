"""What reports say of other runtimes: one that agrees, and one that failed."""

from __future__ import annotations

import io
import re

from rich.console import Console

from llmforge.gates.records import Report
from llmforge.metrics import agreement
from llmforge.metrics.agreement import ComparedPrompt, RuntimeRun
from llmforge.report import render

from ..samples.reports import make


def run() -> RuntimeRun:
    ours = tuple(range(10))
    prompts = [
        ComparedPrompt(
            document=f"<b>{i}</b>",
            prompt_tokens=4,
            ours=ours,
            theirs=(0, 1, 7) if i == 3 else ours,
            our_top=ours,
            their_top=(5, *ours[1:]) if i == 3 else ours,
            kld=(0.001,) * 10,
            difference_mean=(0.01,) * 10,
            difference_max=(0.25,) * 10,
            margin=0.2 if i == 3 else None,
        )
        for i in range(8)
    ]
    versions = {"onnxruntime-genai": "0.18.0", "onnxruntime": "1.31.1"}
    made = RuntimeRun(runtime="onnxruntime-genai", versions=versions, asked=8, seconds=4.25, prompts=tuple(prompts))
    return made.model_copy(update={"figures": agreement.made_of(made)})


def report() -> Report:
    failed = RuntimeRun(
        runtime="optimum", versions={}, asked=8, seconds=1.0, failure="ended by SIGSEGV, after 0 of 8 prompts"
    )
    return make(runtimes=(run(), failed))


SAID = (
    "98.8 % of 80 tokens agree (64.0 % – 100.0 %); 7 of 8 answers are equal (near ties, of the others: 1); "
    "KLD 0.00100; largest |Δlogit| 0.250",
    "failed: ended by SIGSEGV, after 0 of 8 prompts",
)


def test_the_summary_says_it_in_a_line_each() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(render.summary(report()))
    lines = out.getvalue().splitlines()
    for name, said in zip(("onnxruntime-genai 0.18.0", "optimum-onnx"), SAID, strict=True):
        assert any(name in line and said in line for line in lines)


def test_markdown_has_a_section() -> None:
    text = render.to_markdown(report()).replace("\\", "")
    assert "## Other runtimes" in text
    for said in SAID:
        assert said in text
    assert "Other runtimes" not in render.to_markdown(make())


def test_html_has_a_section_with_each_prompt() -> None:
    text = render.to_html(report())
    assert text.count('aria-labelledby="runtimes"') == 1
    for said in SAID:
        assert said in text
    assert "onnxruntime 1.31.1" in text
    assert "&lt;b&gt;3&lt;/b&gt;" in text
    assert "<b>3</b>" not in text
    assert re.findall(r'<th scope="row">&lt;b&gt;(\d)&lt;/b&gt;</th>', text) == [*"01234567"]
    assert "after 2, by 0.200" in text  # where the fourth answer differs
    assert 'id="runtimes"' not in render.to_html(make())


def test_json_reads_back() -> None:
    assert Report.model_validate_json(report().to_json()) == report()
