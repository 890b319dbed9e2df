"""What the products of experts read over the calibration text, against a loop over tokens and experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llmforge.calibration import calibrate
from llmforge.checkpoint import Checkpoint
from llmforge.checkpoint.text import TokenWindow
from llmforge.quantization.statistics import ExpertRangeDemand, InputRangeDemand

from ..models import zoo


def test_ranges_of_experts_are_those_of_the_model(tmp_path: Path) -> None:
    zoo.write("qwen3-moe", tmp_path, torch.float32)
    random = np.random.default_rng(0)
    windows = [TokenWindow(f"d{place}", random.integers(3, 90, length)) for place, length in enumerate((24, 7))]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    peaks: dict[str, np.ndarray] = {}

    def look(name: str, module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        tokens, ids = (x.reshape(-1, x.shape[-1]) for x in given[:2])
        for token, chosen in zip(tokens, ids, strict=True):
            for expert in chosen:
                gate, up = (module.gate_up_proj[expert] @ token).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                for parameter, read in (("gate_up_proj", token), ("down_proj", inner)):
                    place = f"{name}.{parameter}"
                    peaks[place] = np.maximum(peaks.get(place, 0), read.abs().numpy())

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, given, name=name: look(name, module, given))
    with torch.inference_mode():
        for window in windows:
            model(torch.from_numpy(window.ids)[None])
    checkpoint = Checkpoint.open(tmp_path)
    found = calibrate(checkpoint, windows, [ExpertRangeDemand()]).inputs
    assert peaks
    assert {name for name in found if ".experts." in name} == peaks.keys()
    for name, peak in peaks.items():
        np.testing.assert_allclose(found[name].peaks, peak, rtol=1e-4, atol=1e-6)
    without = calibrate(checkpoint, windows, [InputRangeDemand()]).inputs
    assert without.keys() == found.keys() - peaks.keys()
