"""Models that differ from one that is known in a single line: right, or refused by name; never wrong.

Each is transformers' Llama with an edit of its source (`edited_llama`), which no table of model names could know. What
a build does is done here: the trace, and its proof against the edited model itself on the checkpoint's weights. The
proof refuses what the trace cannot see: a model's own attention function, in place of which the registry gives ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmforge.base.errors import CheckpointError, UnsupportedError, VerificationError
from llmforge.checkpoint import Checkpoint
from llmforge.ir import dialect
from llmforge.trace import trace
from llmforge.verification.trace_verifier import verify_trace

from ..models import edited_llama, zoo

TOLERANCE = 1e-5

NORM = "return self.weight * hidden_states.to(input_dtype)"
TO_FLOAT = "hidden_states = hidden_states.to(torch.float32)"
ROOT = "hidden_states * torch.rsqrt(variance + self.variance_epsilon)"
ROTATED_KEYS = "k_embed = (k * cos) + (rotate_half(k) * sin)"
ANGLES = "cos, sin = position_embeddings\n"
UPDATED = "past_key_values.update(key_states, value_states, self.layer_idx)\n"
OUTPUT = "attn_output = self.o_proj(attn_output)"
CALL = "            scaling=self.scaling,\n            **kwargs,"
SCORES = "attn_weights = nn.functional.softmax("
MASK = "            position_ids=position_ids,\n        )\n\n        hidden_states = inputs_embeds"
MLP = "hidden_states = self.mlp(hidden_states)"
RESIDUAL = "hidden_states = residual + hidden_states"
O_PROJ = "self.o_proj = nn.Linear("


@dataclass(frozen=True)
class Difference:
    """Edits of Llama's source, and whether the edited model has to be traced (else it may be refused)."""

    edits: Mapping[str, str]  # old → new, at every place
    right: bool = False
    layers: int = 1
    slow: bool = True


def behind(line: str, *more: str, indent: int = 8) -> dict[str, str]:
    """Put lines of code behind `line`, which ends a line of a method."""
    return {line: line.rstrip("\n") + "".join(f"\n{' ' * indent}{code}" for code in more) + "\n" * line.endswith("\n")}


def mask(**functions: str) -> dict[str, str]:
    """Let the model ask for its mask with functions of its own."""
    given = "".join(f"            {name}={function},\n" for name, function in functions.items())
    return {MASK: MASK.replace("        )\n", f"{given}        )\n", 1)}


DIFFERENCES: Mapping[str, Difference] = {
    # norms
    "norm of 1 + weight": Difference(
        {NORM: NORM.replace("self.weight", "(1.0 + self.weight)")}, right=True, slow=False
    ),
    "norm plus 1": Difference({NORM: f"{NORM} + 1.0"}, slow=False),
    "norm with epsilon outside the root": Difference({ROOT: "hidden_states / (variance.sqrt() + 1e-3)"}),
    "norm of clipped states": Difference(
        behind(TO_FLOAT, "hidden_states = hidden_states.clamp(-1.5, 1.5)"), slow=False
    ),
    "norm by the largest magnitude": Difference({ROOT: "hidden_states / hidden_states.abs().amax(-1, keepdim=True)"}),
    # positions
    "angles with a wobble": Difference({"cos = emb.cos()": "cos = emb.cos().abs()"}, right=True),
    "only queries are rotated": Difference({ROTATED_KEYS: "k_embed = k"}),
    "keys turn the other way": Difference({ROTATED_KEYS: ROTATED_KEYS.replace("* sin", "* -sin")}),
    "queries grow with their position": Difference(
        behind(ANGLES, 'query_states = query_states * (1.0 + 0.1 * kwargs["position_ids"][:, None, :, None])')
    ),
    "queries grow with the length of the text": Difference(
        behind(UPDATED, "query_states = query_states * (1.0 + 0.01 * key_states.shape[2])", indent=8)
    ),
    # attention
    "scaled twice": Difference(behind(ANGLES, "query_states = query_states * self.scaling"), right=True, slow=False),
    "a scale of its own for each layer": Difference(
        {"self.scaling = self.head_dim**-0.5": "self.scaling = self.head_dim**-0.5 / (1 + layer_idx)"},
        right=True,
        layers=4,
    ),
    "a bias that grows with the slot": Difference(
        {
            CALL: CALL.replace(
                "**kwargs", "position_bias=0.1 * torch.arange(key_states.shape[2]),\n            **kwargs"
            ),
            SCORES: f'attn_weights = attn_weights + kwargs.get("position_bias", 0.0)\n    {SCORES}',
        }
    ),
    "a bias inside the mask": Difference(
        {"            attention_mask,\n            dropout": "            attention_mask + 0.5,\n            dropout"}
    ),
    "a tanh before softmax": Difference({SCORES: f"attn_weights = torch.tanh(attn_weights)\n    {SCORES}"}),
    "a tanh behind softmax": Difference(
        {
            "self.config._attn_implementation, eager_attention_forward": '"eager", eager_attention_forward',
            "attn_weights = nn.functional.dropout(": "attn_weights = torch.tanh(attn_weights)\n"
            "    attn_weights = nn.functional.dropout(",
        }
    ),
    "a tanh behind attention": Difference({OUTPUT: "attn_output = self.o_proj(torch.tanh(attn_output))"}, right=True),
    "keys alone have a norm": Difference(
        {
            O_PROJ: f"self.k_norm = DroverRMSNorm(self.head_dim)\n        {O_PROJ}",
            ANGLES: f"key_states = self.k_norm(key_states)\n        {ANGLES}",
        },
        right=True,
    ),
    "values change behind the cache": Difference(behind(UPDATED, "value_states = value_states * 2.0"), right=True),
    "keys move behind the cache": Difference(behind(UPDATED, "key_states = key_states.roll(1, 2)")),
    # masks
    "a mask that hides the token itself": Difference(mask(and_mask_function="lambda b, h, q, k: (k < q) | (k == 0)")),
    "a mask that shows the next token": Difference(mask(or_mask_function="lambda b, h, q, k: k <= q + 1"), slow=False),
    "a mask with a hole": Difference(mask(and_mask_function="lambda b, h, q, k: k != q - 3")),
    # layers
    "residuals are scaled": Difference({RESIDUAL: "hidden_states = 0.7 * residual + hidden_states"}, right=True),
    "every third layer has another sign": Difference(
        {OUTPUT: f"{OUTPUT} * (-1.0 if self.layer_idx % 3 == 2 else 1.0)"}, right=True, layers=7
    ),
    "the fifth layer alone is doubled": Difference(
        {OUTPUT: f"{OUTPUT} * (2.0 if self.layer_idx == 4 else 1.0)"}, right=True, layers=6
    ),
    # between tokens
    "tokens see the one before": Difference(
        {MLP: "hidden_states = self.mlp(hidden_states + nn.functional.pad(hidden_states[:, :-1], (0, 0, 1, 0)))"},
    ),
    "tokens are centered": Difference({MLP: "hidden_states = self.mlp(hidden_states - hidden_states.mean(1, True))"}),
    "tokens add up": Difference({MLP: "hidden_states = self.mlp(hidden_states.cumsum(1))"}),
    "rows of a batch are centered": Difference(
        {MLP: "hidden_states = self.mlp(hidden_states - hidden_states.mean(0, True))"}
    ),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if d.slow else []) for n, d in DIFFERENCES.items()]
)
def test_a_model_that_differs_in_a_line_is_right_or_refused(name: str, tmp_path: Path) -> None:
    difference, met = DIFFERENCES[name], set[str]()

    def edit(source: str) -> str:
        for old, new in difference.edits.items():
            met.update({old} if old in source else ())
            source = source.replace(old, new)
        return source

    with edited_llama.registered(tmp_path, edit) as modeling:
        assert met == set(difference.edits)
        config = modeling.DroverConfig(**{**zoo.BASE, "num_hidden_layers": difference.layers})
        zoo.save(config, tmp_path / "checkpoint")
        checkpoint = Checkpoint.open(tmp_path / "checkpoint")
        try:
            model = trace(checkpoint)
            verify_trace(checkpoint, model)
        except UnsupportedError as refusal:
            assert not difference.right, refusal.message  # noqa: PT017  # refused or right: both are answers
            assert "architecture 'DroverForCausalLM' cannot be compiled: " in refusal.message  # noqa: PT017
            return
        except VerificationError as refusal:
            assert not difference.right, refusal.message  # noqa: PT017
            assert "first diverging layer: model.layers.0" in refusal.message  # noqa: PT017
            return
        expected = zoo.reference(tmp_path / "checkpoint")
        found = {
            key: zoo.largest_difference(dialect.expand(model), expected, zoo.SCHEDULES[key]) for key in zoo.SCHEDULES
        }
    assert max(found.values()) <= TOLERANCE, found


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    zoo.write("llama", tmp_path, num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, UnsupportedError), match="spiral"):
        trace(Checkpoint.open(tmp_path))
