import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from llmforge import targets
from llmforge.backends import BACKENDS, BackendName
from llmforge.base import extras
from llmforge.base.errors import EnvironmentLacks, ForgeError, UnsupportedError, UsageError
from llmforge.targets import Isa, achieved

AVX2 = {"sse2", "avx", "avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
GPUS = [name for name in targets.names() if not name.startswith("cpu-")]


@pytest.mark.parametrize("name", targets.names())
def test_every_file_is_a_target(name: str) -> None:
    target = targets.load(name)
    assert target.name == name
    assert target.title
    assert target.engines


def test_the_devices_that_were_promised_are_there() -> None:
    cpus = {f"cpu-{isa.value}" for isa in Isa}
    gpus = {
        "t4", "a10g", "a100-40", "a100-80", "l4", "l40s", "rtx-4090", "h100-sxm", "h100-pcie", "h200", "b200", "gb200",
        "rtx-5090", "rtx-pro-6000",
    }  # fmt: skip
    assert set(targets.names()) == cpus | gpus


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_of_a_gpu_has_its_source(name: str) -> None:
    target = targets.load(name)
    assert target.memory_gb is not None
    assert target.bandwidth_gbs is not None
    figures = [target.memory_gb, target.bandwidth_gbs, *target.rates.values()]
    assert len(figures) >= 4
    assert all(figure.source.strip() and isinstance(figure.verified, bool) for figure in figures)


def test_rates_of_one_gpu_follow_its_generation() -> None:
    assert "bf16" not in targets.load("t4").rates
    assert "fp8" not in targets.load("a100-80").rates
    assert targets.load("l4").rates["fp8"].value == 242
    assert "tensorrt-rtx" not in targets.load("h100-sxm").engines  # it has no SM90
    assert "tensorrt-rtx" in targets.load("rtx-5090").engines


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_its_link_its_power_and_complete_rates(name: str) -> None:
    target = targets.load(name)
    assert target.interconnect is not None
    assert (target.interconnect.kind == "nvlink") is (
        name in {"a100-40", "a100-80", "h100-sxm", "h200", "b200", "gb200"}
    )
    assert target.tdp_w is not None
    assert target.sm is not None
    capability = int(target.sm)
    wanted = {"fp32", "fp16", "int8"}
    wanted |= {"bf16"} if capability >= 80 else set()
    wanted |= {"fp8"} if capability >= 89 else set()
    wanted |= {"fp4"} if capability >= 100 else set()
    wanted |= {"int4"} if capability < 90 else set()  # Hopper's tensor cores have no int4
    assert set(target.rates) - {"tf32"} == wanted
    assert target.rates["int8"].value >= target.rates["fp16"].value >= target.rates["fp32"].value
    link = target.interconnect
    figures = [target.memory_gb, target.bandwidth_gbs, *target.rates.values(), link.gbs, target.tdp_w]
    for figure in figures:
        assert figure is not None
        assert not figure.verified or "NVIDIA" in figure.source, "read where its maker publishes it"


@pytest.mark.parametrize("name", GPUS)
def test_prices_have_a_day(name: str) -> None:
    price = targets.load(name).usd_per_hour
    assert (price is None) is (name == "gb200")
    assert price is None or price.date[:2] == "20"


def test_names_are_known_in_any_case() -> None:
    assert targets.load("H200") == targets.load("h200")
    assert targets.load("RTX-4090").name == "rtx-4090"
    assert targets.load("LOCAL") == targets.local()


@pytest.mark.parametrize(("name", "meant"), [("h100", "h100-pcie, h100-sxm"), ("A100", "a100-40, a100-80")])
def test_a_name_of_several_devices_lists_them(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        targets.load(name)
    assert caught.value.message == f"{name!r} is ambiguous: {meant}"


@pytest.mark.parametrize(
    ("name", "backend", "reason"),
    [
        ("h200", "tensorrt-rtx", "TensorRT-RTX 1.7 has no target SM 9.0"),
        ("b200", "onnxruntime", "holds neither code for SM 10.0 nor PTX"),
        ("gb200", "onnxruntime", "holds neither code for SM 10.0 nor PTX"),
        ("cpu-avx2", "tensorrt", "it builds engines for NVIDIA GPUs only"),
    ],
)
def test_an_engine_that_does_not_run_says_why(name: str, backend: BackendName, reason: str) -> None:
    error = refusal(lambda: targets.load(name).require_engine(backend))
    assert error.exit_code == 6
    assert reason in error.message
    with pytest.raises(UnsupportedError, match=r"cannot load"):
        targets.load(name).support(backend)


@pytest.mark.parametrize("name", targets.names())
def test_engines_are_all_that_run(name: str) -> None:
    target = targets.load(name)
    assert set(target.engines) == {
        each.name for each in BACKENDS.values() if each.export_format is None and each.unsupported(target.sm) is None
    }
    for backend in target.engines:
        taken = target.support(backend)
        assert taken.compute
        assert taken.compute <= taken.weights
        assert all(taken.refusal(dtype, "compute") is None for dtype in taken.compute)


def test_an_engine_that_does_not_run_cannot_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "b200.yaml"
    path.write_text((targets.FOLDER / "b200.yaml").read_text().replace("[tensorrt]", "[tensorrt, onnxruntime]"))
    with pytest.raises(UsageError, match="`engines` cannot hold onnxruntime: the onnxruntime-gpu"):
        targets.read(path)


def test_shares_are_defaults_with_a_source_until_a_file_says_otherwise() -> None:
    target = targets.load("l4")
    assert 0 < target.share("bandwidth").value <= 1
    assert targets.matrix_share_of("int8") == "matrix_8"
    assert targets.matrix_share_of("bf16") == "matrix_16"
    own = targets.SourcedFigure(value=0.5, source="measured", verified=True)
    assert target.model_copy(update={"achieved": {"bandwidth": own}}).share("bandwidth").value == 0.5
    for sm in (None, "75", "120"):
        for name in get_args(achieved.Share):
            assert achieved.defaults(sm)[name].source


def test_a_target_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        targets.load("l4").name = "l5"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("title: x\nkind: cpu\nengines: [onnxruntime]\n", "a CPU target has `isa`"),
        ("title: x\nkind: gpu\nengines: [tensorrt]\n", "a GPU target has `sm`"),
        ('title: x\nkind: gpu\nsm: "89"\nengines: [tensorrt]\n', "`memory_gb`, `bandwidth_gbs` and `rates`"),
        ("title: x\nkind: cpu\nisa: avx3\nengines: [onnxruntime]\n", "avx512-vnni"),
        ("title: x\nkind: cpu\nisa: avx2\nengines: [onnx]\n", "onnxruntime"),
        ("title: x\nkind: cpu\nisa: avx2\nengines: [onnxruntime]\nspeed: 1\n", "speed"),
        ("[]", "expected a mapping with"),
        ("title: [", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_target_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"odd\.yaml") as caught:
        targets.read(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(("name", "meant"), [("cpu-avx", "cpu-avx2"), ("rtx4090", "rtx-4090"), ("locl", "local")])
def test_an_unknown_name_gets_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        targets.load(name)
    assert caught.value.exit_code == 2
    assert name in caught.value.message
    assert "cpu-avx512-vnni" in caught.value.message
    assert caught.value.hint is not None
    assert meant in caught.value.hint


@pytest.mark.parametrize("name", ["../targets/l4", "", "L4.yaml", "/etc/passwd"])
def test_a_name_is_not_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="no target is named"):
        targets.load(name)


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (set(), Isa.GENERIC),
        ({"avx2"}, Isa.GENERIC),  # without FMA there is no AVX2 kernel
        (AVX2, Isa.AVX2),
        (AVX2 | {"avx512f"}, Isa.AVX2),  # Knights Landing: AVX-512 without BW, DQ, VL
        (AVX2 | {"avx_vnni", "amx_tile", "amx_int8"}, Isa.AVX2),
        (AVX512, Isa.AVX512),
        (AVX512 | {"avx512_vnni"}, Isa.AVX512_VNNI),
        (AVX512 | {"avx512_vnni", "amx_tile"}, Isa.AVX512_VNNI),
        (AVX512 | {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}, Isa.AMX),
    ],
)
def test_flags_name_the_instruction_set(flags: set[str], isa: Isa) -> None:
    assert targets.classify(flags) is isa


def test_instruction_sets_include_the_weaker_ones() -> None:
    assert Isa.AMX.includes(Isa.GENERIC)
    assert Isa.AVX512.includes(Isa.AVX512)
    assert not Isa.AVX2.includes(Isa.AVX512)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_local_is_the_machine_at_hand() -> None:
    target = targets.load("local")
    assert target == targets.local()
    assert target.kind == "cpu"
    assert target.isa is targets.detect()


def test_cpuinfo_is_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: none\n\nprocessor\t: 1\nflags\t: fpu\n")
    assert targets.cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    assert targets.cpu_flags(tmp_path / "absent") == set()


def test_a_system_that_does_not_tell_is_asked_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(targets.platform, "system", lambda: "Windows")
    monkeypatch.setattr(targets, "cpu_flags", frozenset)
    with pytest.raises(EnvironmentLacks, match="Windows") as caught:
        targets.local()
    assert caught.value.exit_code == 8
    assert "cpu-avx2" in (caught.value.hint or "")


def test_another_architecture_runs_the_portable_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.platform, "machine", lambda: "arm64")
    assert targets.local().name == "cpu-generic"


def refusal(call: Callable[[], object]) -> ForgeError:
    with pytest.raises(ForgeError) as caught:
        call()
    assert caught.value.hint, "a refusal says what to do"
    return caught.value


def test_this_machine_builds_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here = targets.local()
    here.require_engine("onnxruntime")
    here.require_here()
    monkeypatch.setattr(targets.platform, "machine", lambda: "arm64")
    assert refusal(targets.load("cpu-avx2").require_here).exit_code == 8
    assert refusal(lambda: here.require_engine("tensorrt")).exit_code == 6


@pytest.mark.parametrize("name", ["cpu-generic", "cpu-avx512-vnni"])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_on_a_cpu_is_not_supported(name: str, backend: BackendName) -> None:
    error = refusal(lambda: targets.load(name).require_engine(backend))
    assert isinstance(error, UnsupportedError)
    assert error.exit_code == 6
    assert "cannot load" in error.message
    assert "onnxruntime" in error.message


def test_tensorrt_rtx_where_it_has_no_code_is_not_supported() -> None:
    error = refusal(lambda: targets.load("h200").require_engine("tensorrt-rtx"))
    assert "cannot load engines of tensorrt-rtx" in error.message
    assert error.hint is not None
    assert "backend: tensorrt" in error.hint


def test_an_engine_is_not_built_where_it_cannot_be_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "detect", lambda: Isa.AVX2)
    targets.load("cpu-avx2").require_here()
    targets.load("cpu-generic").require_here()
    error = refusal(targets.load("cpu-amx").require_here)
    assert error.exit_code == 8
    assert "amx" in error.message
    assert "avx2" in error.message


def test_a_missing_onnxruntime_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(extras, "_version", lambda distribution: None)
    error = refusal(targets.local().require_here)
    assert error.exit_code == 8
    assert error.hint == "pip install 'llmforge[cpu]'"
