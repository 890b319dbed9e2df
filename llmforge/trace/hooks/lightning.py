"""Lightning attention (arXiv 2501.08313) as gated linear attention, recognized by computing.

Each head h keeps M [D, D], which decays by one rate: M = exp(-slope[h])·M + k ⊗ v, y = qᵀM. transformers computes it in
blocks, inside of a module with its projections, a norm and an output gate, and with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmforge.base.errors import UnsupportedError
from llmforge.trace.hooks import internals, miniature
from llmforge.trace.hooks.attention import AttentionHook
from llmforge.trace.hooks.linear_attention import LinearAttentionInputs, emit_linear_attention

CACHES = ("get_linear_cache", "set_linear_cache")  # what such a module asks its cache for
PARTS = ("qkv_proj", "act_fn", "norm", "output_gate", "out_proj")
SLOPE = "slope_rate"  # buffer [H, 1, 1]; other buffers follow from it
TOLERANCE = 1e-4  # fp32, on values of order one
HIDDEN, WIDTH = 6, 4  # of a probe
TOKENS = 5  # of a probe's beginning; as many follow over the state


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules of `model` that keep such a state in a cache."""
    return {name: module for name, module in model.named_modules() if _caches(type(module))}


def _caches(kind: type[nn.Module]) -> bool:
    code = getattr(kind.forward, "__code__", None)
    return code is not None and all(name in code.co_names for name in CACHES)


def substitute(model: nn.Module, attention: AttentionHook) -> None:
    """Let each such module of `model` emit `llmforge::LinearAttention`.

    Raises:
        UnsupportedError: one computes something else.
    """
    known: set[object] = set()
    for module in modules(model).values():
        shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
        key = (type(module), str(module), shapes)
        if key not in known:
            with internals.real_tensors():
                probe(module)
            known.add(key)
        module.forward = _emitter(module, attention)


def _emitter(module: nn.Module, attention: AttentionHook) -> Callable[..., Any]:
    heads, width, index = sizes(module)[1], sizes(module)[2], int(vars(module)["layer_idx"])

    def forward(hidden_states: Tensor, *args: object, **kwargs: Any) -> tuple[Tensor, None]:
        if (mask := kwargs.get("attention_mask")) is not None:
            attention.refuse_padding(mask)
        layer = attention.layers[index]
        past = None if layer.past is None else layer.past.get("recurrent")

        def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
            y, state = emit_linear_attention(
                attention, LinearAttentionInputs(q, k, v, decay, None, heads, (heads, width, width)), past
            )
            layer.update_recurrent_state(state)
            return y

        places = attention.places.position_ids
        assert places is not None
        return compute(module, hidden_states, heads, width, (places[..., None] * 0).float(), attend), None

    return forward


def compute(
    module: nn.Module,
    x: Tensor,
    heads: int,
    width: int,
    zeros: Tensor,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute `module` on x [B, S, hidden]; `attend` takes q, k, v [B, S, H·D] and the decay [B, S, H].

    `zeros` [B, S, 1] give slopes the axes of tokens: in a graph nothing computes with sizes.
    """
    project, activate, norm, gate, out = (module.get_submodule(name) for name in PARTS)
    batch, sequence, _ = x.shape
    parts = activate(project(x)).reshape(batch, sequence, heads, 3, width).unbind(3)
    q, k, v = (part.reshape(batch, sequence, heads * width) for part in parts)
    decay = zeros - module.get_buffer(SLOPE).reshape(heads)
    result: Tensor = out(torch.sigmoid(gate(x)) * norm(attend(q, k, v, decay)))
    return result


def sizes(module: nn.Module) -> tuple[int, int, int]:
    """Read hidden size, heads and their width off the parameters of `module`.

    Raises:
        UnsupportedError: it has others than those of lightning attention.
    """
    try:
        project, slope = module.get_submodule(PARTS[0]).get_parameter("weight"), module.get_buffer(SLOPE)
        for name in PARTS[1:]:
            module.get_submodule(name)
    except AttributeError as error:
        raise _refusal(module) from error
    if project.dim() != 2 or slope.shape != (slope.shape[0], 1, 1) or project.shape[0] % (3 * slope.shape[0]):
        raise _refusal(module)
    return project.shape[1], slope.shape[0], project.shape[0] // (3 * slope.shape[0])


def probe(module: nn.Module) -> None:
    """Return if `module` computes lightning attention: a beginning in blocks, then what follows over its state.

    Raises:
        UnsupportedError: it computes something else.
    """
    hidden, heads, width = sizes(module)
    smaller = {hidden: HIDDEN, width: WIDTH, heads * width: heads * WIDTH, 3 * heads * width: 3 * heads * WIDTH}
    if heads in smaller or len(smaller) < 4:  # two sizes are one number: copy it as it is
        smaller = {}
    generator = torch.Generator().manual_seed(0)
    small: Any = miniature.copied(module, smaller, generator)
    hidden, width = smaller.get(hidden, hidden), smaller.get(width, width)
    for name in PARTS:  # outputs of order one
        for parameter in small.get_submodule(name).parameters():
            if parameter.dim() == 2:
                parameter.div_(parameter.shape[1] ** 0.5)
    slopes = torch.rand(heads, 1, 1, generator=generator)
    x = torch.randn(2, 2 * TOKENS, hidden, generator=generator)
    state = torch.zeros(2, heads, width, width)

    def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        kept, rows = state, []
        q, k, v = (each.view(2, -1, heads, width) for each in (q, k, v))
        for s in range(q.shape[1]):
            kept = kept * decay[:, s, :, None, None].exp() + torch.einsum("bhd,bhe->bhde", k[:, s], v[:, s])
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, s], kept))
        return torch.stack(rows, 1).flatten(2)

    try:
        cache = _States()
        small._buffers.update(_buffers(small, slopes, block=2))
        got = [small(part, position_embeddings=None, attention_mask=None, past_key_values=cache)[0] for part in
               (x[:, :TOKENS], x[:, TOKENS:])]  # fmt: skip
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(module) from error
    expected = compute(small, x, heads, width, torch.zeros(2, 2 * TOKENS, 1), attend)
    y = torch.cat(got, 1)
    if y.shape != expected.shape or not torch.allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise _refusal(module)


def _buffers(module: Any, slopes: Tensor, block: int | None = None) -> dict[str, Tensor]:
    """Compute the buffers that `module` has for `slopes` [H, 1, 1]; it then works in blocks of `block` tokens."""
    if block is not None:
        module.block_size = block
    made = dict(zip(("query_decay", "key_decay", "diagonal_decay"), module.decay_factors(slopes), strict=True))
    return {SLOPE: slopes, **made}


class _States:
    """The cache that such a module asks for."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """Return the state."""
        return self._kept

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        """Keep the state."""
        self._kept = state


def following(model: nn.Module) -> set[str]:
    """Name the buffers of `model`, as a checkpoint holds them, that follow from slopes: no graph reads them."""
    names: set[str] = set()
    for name, module in modules(model).items():
        buffers = dict(module.named_buffers(recurse=False))
        if any(each.is_meta for each in buffers.values()):  # of a layer that is not there: its twin's tell
            names |= {f"{name}.{each}" for each in buffers if each != SLOPE}
            continue
        made = _buffers(module, buffers[SLOPE].detach().clone())
        names |= {
            f"{name}.{each}"
            for each, tensor in made.items()
            if each != SLOPE and torch.allclose(tensor, buffers[each], rtol=0, atol=TOLERANCE)
        }
    return names


def _refusal(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"{type(module).__name__} keeps a linear state, and does not compute lightning attention",
        hint="needed: an operator with this state, and a hook that finds it (docs/new-architecture.md)",
    )
