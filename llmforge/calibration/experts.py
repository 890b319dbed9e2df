"""Experts of one decoder layer: what each of them reads over the calibration text, and codes of its matrices.

The error that counts is that of the layer, into which an expert's output goes times a weight of the router. So a token
stands in an expert's moments with the square of its weight there, and only where the expert was chosen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llmforge.calibration.sums import InputSums
from llmforge.calibration.threads import IN_ORDER, WindowMap
from llmforge.quantization import grids
from llmforge.quantization.grid import Grid
from llmforge.quantization.grids import Float32, QuantizedMatrix
from llmforge.quantization.methods.base import Method
from llmforge.trace.hooks.experts import names, probe, weights

MOST_BYTES = 4 << 30  # of what is known of the inputs of experts that are rounded at one time
BYTES_PER_PAIR = 48  # of inputs: sums in fp32 and what is made of them, and factors in fp64


@dataclass(frozen=True, eq=False)
class RoutedInputs:
    """What an experts module was called with for T tokens, and what the unquantized model would have called it with.

    tokens, originals: fp32 [T, H].  ids: int64 [T, top_k].  mixing: fp32 [T, top_k], the weights of the router.
    """

    tokens: Tensor
    ids: Tensor
    mixing: Tensor
    originals: Tensor


def quantize(
    module: nn.Module, seen: RoutedInputs, grid: Grid, method: Method, each: WindowMap = IN_ORDER, threads: int = 1
) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """Quantize the matrices of every expert: [E·N, K] of the first product and of the second, features as they lie.

    The second product sees what the quantized first one makes. `each` runs what is done for each expert, as many at a
    time as fit into memory, on `threads` threads together.

    Raises:
        ValueError: `method` refuses what an expert reads.
        UnsupportedError: the module computes something that `llmforge::MoE` cannot say.
    """
    form, held = probe(module), weights(module)
    fit = MOST_BYTES // (BYTES_PER_PAIR * max(widths(module)) ** 2)
    at_once = max(1, min(each.threads, fit))
    room = threading.BoundedSemaphore(at_once)

    def of_one(expert: int) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        with room:
            return rounded(expert)

    def rounded(expert: int) -> tuple[QuantizedMatrix, QuantizedMatrix]:
        here, place = torch.nonzero(seen.ids == expert, as_tuple=True)
        share = seen.mixing[here, place][:, None]
        x, original = seen.tokens[here], seen.originals[here]
        up, down = _rows(held.up[expert]), _rows(held.down[expert])
        bias = 0 if held.up_bias is None else held.up_bias[expert]
        first = _round(up, x, original, share, grid, method, threads // at_once)
        known = torch.from_numpy(grids.dequantize(first)).to(x.device)
        inner = form.inner(x @ known.T + bias)
        wanted = form.inner(original @ held.up[expert] + bias)
        return first, _round(down, inner, wanted, share, grid, method, threads // at_once)

    ups, downs = zip(*each(of_one, range(len(held.up))), strict=True)
    return grids.stack(ups), grids.stack(downs)


def reads(name: str, module: nn.Module) -> Callable[..., dict[str, Tensor]]:
    """Return what tells what the products of experts `name` read: of each parameter rows [n, K].

    It takes tokens [T, H], the ids of their experts [T, top_k], and weights of the router.

    Raises:
        UnsupportedError: the module computes something that `llmforge::MoE` cannot say.
    """
    form, held, (up, down) = probe(module), weights(module), matrices(module)

    def look_into(tokens: Tensor, ids: Tensor, mixing: Tensor) -> dict[str, Tensor]:
        inner = []
        for expert in range(len(held.up)):
            bias = 0 if held.up_bias is None else held.up_bias[expert]
            inner.append(form.inner(tokens[(ids == expert).any(1)] @ held.up[expert] + bias))
        return {f"{name}.{up}": tokens, f"{name}.{down}": torch.cat(inner)}

    return look_into


def scarcity(module: nn.Module, seen: RoutedInputs) -> str:
    """Say how many experts saw fewer tokens than they read features, and what becomes of them; "" if none did.

    Such a Hessian has no full rank: it is damped the more, the fewer tokens there were, and an expert without a token
    is rounded to nearest.
    """
    held = weights(module)
    counts = np.bincount(seen.ids.reshape(-1).cpu().numpy(), minlength=len(held.up))
    few, none = int((counts < held.up.shape[1]).sum()), int((counts == 0).sum())
    if not few:
        return ""
    return (
        f"{few} of {len(counts)} experts saw fewer calibration tokens than they read features, and are damped more"
        + (f"; {none} saw none, and are rounded to nearest" if none else "")
    )


def matrices(module: nn.Module) -> list[str]:
    """Name the two parameters that hold the matrices of an experts module, in the order in which they are read."""
    return names(module)[:2]


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the features that the first product reads, and the second."""
    held = weights(module)
    return held.up.shape[1], held.down.shape[1]


def rows(module: nn.Module) -> tuple[Float32, Float32]:
    """Return the matrices of all experts, one below the other, [E·N, K], as `assign` takes them."""
    held = weights(module)
    up, down = (_rows(each.transpose(0, 1).reshape(each.shape[1], -1)) for each in (held.up, held.down))
    return up, down


def assign(module: nn.Module, name: str, matrix: Float32) -> None:
    """Give an experts module other matrices `name`, [E·N, K]."""
    old = module.get_parameter(name)
    held = weights(module)
    like = held.up if name == matrices(module)[0] else held.down  # [E, K, N]
    rows = torch.from_numpy(matrix).reshape(len(like), like.shape[2], like.shape[1])
    new = (rows.transpose(1, 2).contiguous() if module.is_transposed else rows).to(old.device)
    assert new.shape == old.shape
    setattr(module, name, nn.Parameter(new, requires_grad=False))


def _rows(matrix: Tensor) -> Float32:
    """Turn one expert's matrix [K, N] into [N, K]."""
    rows: NDArray[np.float32] = np.ascontiguousarray(matrix.detach().cpu().numpy().T)
    return rows


def _round(
    weight: Float32, x: Tensor, original: Tensor, share: Tensor, grid: Grid, method: Method, threads: int
) -> QuantizedMatrix:
    """Quantize [N, K] for inputs x [n, K] that go into the sum with `share` [n, 1]."""
    sums = InputSums.start(method.demands, weight.shape[1], device=x.device)
    sums.add(share * x, share * (original - x))
    return method.quantize(weight, grid, sums.seen(routed=True, threads=threads))
