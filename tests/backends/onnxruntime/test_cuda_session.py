"""What a session on a GPU is opened with, refuses and asks of ONNX Runtime, over stand-ins for both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from llmforge.backends.engines import BuildRequest
from llmforge.backends.onnxruntime.cuda import builder, captured, paged, session
from llmforge.backends.onnxruntime.cuda.session import DeviceSession
from llmforge.backends.onnxruntime.session import Session
from llmforge.backends.ranks.session import RankSession
from llmforge.base.errors import EnvironmentLacks, UnsupportedError, VerificationError
from llmforge.ir import graph, interface
from llmforge.runtime.config import FILE, Capture, GraphPlan, RuntimeConfig, SessionConfig
from llmforge.runtime.interface import StepInputs
from llmforge.runtime.prefill_shapes import SHAPES

from ...fakes.host_device import HostDevice
from ...models.decoder_graph import decoder
from .test_cuda import H100, SPEC, lower, prepared

ONE_THREAD = SessionConfig(threads=1)
GPU = SimpleNamespace(kind="cuda", index=1, stream=7, name="GPU")
PLAN = GraphPlan("require", (Capture(1, 2, 64),))


class Opened:
    """Stands for a session of ONNX Runtime."""

    def __init__(self, *providers: str, on_host: tuple[str, ...] = ()) -> None:
        self.providers, self.on_host = providers, on_host

    def get_providers(self) -> tuple[str, ...]:
        return self.providers

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in ("input_ids", "seqlens_k", "logits_rows", "total")]

    def get_input_memory_infos(self) -> list[Any]:
        return [SimpleNamespace(name="Cpu" if each.name in self.on_host else "Cuda") for each in self.get_inputs()]


@pytest.mark.parametrize(
    ("available", "loaded", "says"),
    [
        (["CPUExecutionProvider"], (), "has no CUDAExecutionProvider: it is the CPU package"),
        (["CUDAExecutionProvider"], ("CPUExecutionProvider",), "could not load its CUDAExecutionProvider on GPU: libx"),
    ],
)
def test_an_onnxruntime_without_the_provider_is_told_from_one_that_cannot_load_it(
    monkeypatch: pytest.MonkeyPatch, available: list[str], loaded: tuple[str, ...], says: str
) -> None:
    """ONNX Runtime itself would go on with the CPU."""
    monkeypatch.setattr(session, "_preload", lambda: "libx")
    monkeypatch.setattr(session.ort, "get_available_providers", lambda: available)
    monkeypatch.setattr(session, "open_graph", lambda *_: Opened(*loaded))
    with pytest.raises(EnvironmentLacks, match=says) as caught:
        session.open_on(GPU, b"", ONE_THREAD, {}, "here", graphs=True)  # type: ignore[arg-type]
    assert "llmforge[cuda]" in str(caught.value.hint)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_provider_captures_on_the_stream_of_the_device(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    given: list[Any] = []

    def open_graph(model: bytes, entries: Any, providers: Any, where: str) -> Opened:
        given.extend(providers)
        return Opened("CUDAExecutionProvider")

    monkeypatch.setattr(session, "_preload", lambda: "")
    monkeypatch.setattr(session.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(session, "open_graph", open_graph)
    session.open_on(GPU, b"", ONE_THREAD, {"use_tf32": "0"}, "here", graphs=graphs)  # type: ignore[arg-type]
    own = {"device_id": "1", "enable_cuda_graph": "1" if graphs else "0", "user_compute_stream": "7", "use_tf32": "0"}
    assert given == [("CUDAExecutionProvider", own)]


@pytest.mark.parametrize("graph_id", [captured.EAGER, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_a_run_names_its_cuda_graph_and_waits_for_the_device_only_where_it_has_no_stream(
    graph_id: int, waits: bool
) -> None:
    options = session.run_options(graph_id, waits=waits)
    assert options.get_run_config_entry("gpu_graph_id") == str(graph_id)
    if waits:
        with pytest.raises(RuntimeError):
            options.get_run_config_entry("disable_synchronize_execution_providers")
    else:
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"


def test_what_a_kernel_reads_on_the_host_stays_there_and_is_no_part_of_a_captured_step() -> None:
    """ONNX Runtime would copy it once, when it is bound, and a replay would never see another value."""
    opened = Opened(on_host=("total", "logits_rows"))
    assert captured.read_on_host(opened, GPU, "total") == {"total", "logits_rows"}  # type: ignore[arg-type]
    assert captured.read_on_host(opened, HostDevice(), "total") == {"total"}
    find = captured.CapturedSession._find_host_inputs
    own = SimpleNamespace(_session=opened, device=GPU, _captures=PLAN.captures)
    names = ("input_ids", "seqlens_k", "logits_rows", "total")
    assert find(own, names, "total", "here") == {"total", "logits_rows"}  # type: ignore[arg-type]
    assert find(own, names[:1], "total", "here") == set()  # type: ignore[arg-type]
    opened.on_host = ("total", "seqlens_k", "input_ids")
    with pytest.raises(UnsupportedError, match="here: input_ids, seqlens_k is read on the host") as caught:
        find(own, names, "total", "here")  # type: ignore[arg-type]
    assert caught.value.hint == "engine.cuda_graphs: off"
    own._captures = ()
    assert find(own, names, "total", "here") == {"total", "seqlens_k", "input_ids"}  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [session, paged])
def test_an_engine_is_opened_with_all_that_its_artifact_says(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    name = "DeviceSession" if module is session else "PagedSession"
    monkeypatch.setattr(module, name, lambda *given, **named: (given, named))
    threads = SimpleNamespace(resolve=lambda own: f"{own} threads")
    config = SimpleNamespace(session=threads, provider_options={"a": "1"}, buckets=(1, 2), graphs=PLAN, kv_blocks=9)
    given, named = module.open_engine(Path("model.onnx"), config, 3, GPU)
    assert given == (Path("model.onnx"), "3 threads", GPU)
    own = {"shapes": SHAPES} if module is session else {"blocks": 9}
    assert named == {"provider_options": {"a": "1"}, "buckets": (1, 2), "graphs": PLAN, **own}


def serialized(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def test_a_graph_that_declares_the_last_row_alone_gives_any_rows_that_are_asked_for() -> None:
    """As `genai-interface` writes it: ONNX Runtime takes no buffer of another shape than it declares."""
    model = decoder()
    logits = graph.output_named(model, interface.LOGITS)
    assert logits.shape is not None
    logits.shape = ir.Shape([logits.shape[0], 1, logits.shape[2]])
    both = Session(serialized(model), ONE_THREAD), DeviceSession(serialized(model), ONE_THREAD, HostDevice())
    caches = [each.allocate(1, 64) for each in both]
    ids, past = np.random.default_rng(0).integers(0, 97, (1, 7)), np.zeros(1, np.int32)
    for rows in (np.array([0, 3]), np.arange(7), np.array([6]), None):
        inputs = StepInputs(ids, past, rows)
        wanted, got = (each.step(inputs, cache.rows(0, 1)) for each, cache in zip(both, caches, strict=True))
        assert got.shape == (1, 1 if rows is None else len(rows), 97)
        assert got.tobytes() == wanted.tobytes()


def test_a_mask_that_grows_with_the_text_is_no_part_of_a_captured_step() -> None:
    model = decoder()
    mask = ir.Value(
        name=interface.ATTENTION_MASK, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "total"])
    )
    model.graph.inputs.append(mask)
    DeviceSession(serialized(model), ONE_THREAD, HostDevice(), buckets=(2,))
    with pytest.raises(UnsupportedError, match="attention_mask grows with the text, so no step is recorded"):
        DeviceSession(serialized(model), ONE_THREAD, HostDevice(), buckets=(2,), graphs=PLAN)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (3, 1)])
def test_only_steps_of_one_token_of_as_many_rows_as_were_planned_run_ahead(rows: int, tokens: int) -> None:
    from llmforge.rewrite.topk_outputs import add_topk_outputs

    model = decoder(vocabulary=512)
    add_topk_outputs(model)
    opened = DeviceSession(serialized(model), ONE_THREAD, HostDevice(), buckets=(2,))
    cache = opened.allocate(3, 64)
    inputs = StepInputs(np.ones((rows, tokens), np.int64), np.zeros(rows, np.int32))
    with pytest.raises(ValueError, match=rf"a step of \({rows}, {tokens}\); top logits of one token for up to 2 rows"):
        opened.begin_decode(inputs, cache.rows(0, rows))


def test_a_build_asks_for_the_gpu_and_opens_there_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []

    def open_engine(*given: Any) -> str:
        told.append(given)
        return "session"

    def prove(*given: Any) -> tuple[str, ...]:
        told.append(given)
        return ("a note",)

    monkeypatch.setattr(builder, "require_host", lambda *given: told.append(given))
    monkeypatch.setattr(builder, "CudaDevice", lambda: GPU)
    monkeypatch.setattr(builder, "module_of", lambda config: SimpleNamespace(open_engine=open_engine))
    monkeypatch.setattr(builder, "prove", prove)
    lowered, _ = lower(prepared())
    built = builder.build(BuildRequest(lowered, tmp_path, SPEC, H100, (3,), None))
    config = RuntimeConfig.read(tmp_path / FILE)
    assert told == [(H100, SPEC), (tmp_path / "model.onnx", config, None, GPU), ("session", config)]
    assert (built.config, built.notes, built.facts) == (config, ("a note",), {})
    assert set(built.written) == {"model.onnx", "model.onnx.data"}
    assert built.size_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_ranks_that_a_build_opened_end_with_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    class Ranks(RankSession):
        def __init__(self) -> None:  # without processes
            pass

        def close(self) -> None:
            ended.append(1)

    config: Any = SimpleNamespace(ranks=2)
    monkeypatch.setattr(builder.rank_session, "open_engine", lambda folder, chosen, threads: (folder, chosen, threads))
    assert builder._opened(Path("engine"), config) == (Path("engine"), config, None)  # type: ignore[comparison-overlap]
    monkeypatch.setattr(builder, "prove", lambda *_: ("proven",))
    assert builder._proven(Ranks(), config) == ("proven",)

    def fails(*_: Any) -> tuple[str, ...]:
        raise VerificationError("NaN")

    monkeypatch.setattr(builder, "prove", fails)
    with pytest.raises(VerificationError):
        builder._proven(Ranks(), config)
    assert ended == [1, 1]
