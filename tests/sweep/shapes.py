"""Shapes in which a type is made: the tiny one, and two larger ones that are derived from it by rule.

`wide` has heads, ranks and states twice as wide, one KV head for four of queries, and twice the experts; `deep` twice
the layers, three times the heads and two times the KV heads of the same width, and three times the experts, of which a
token chooses three. Hidden sizes follow, so that heads times their width stay what they are of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

TINY, WIDE, DEEP = "tiny", "wide", "deep"

HIDDEN = (
    "hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim dim_model_base lru_width "
    "input_embedding_size output_embedding_size ple_embed_dim router_hidden_size intermediate_size ffn_dim "
    "encoder_ffn_dim decoder_ffn_dim dim_ff dff d_inner ffn_hidden_size feed_forward_size dense_intermediate_size "
    "intermediate_size_mlp n_inner shared_intermediate_size prefix_dense_intermediate_size mamba_d_ssm "
    "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size expert_ffn_hidden_size "
    "moe_shared_expert_intermediate_size hidden_size_global adapter_in_dim adapter_out_dim adapter_input_size"
)
HEADS = (
    "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads "
    "swa_num_attention_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads "
    "linear_num_heads mamba_n_heads mamba_num_heads index_n_heads indexer_n_heads"
)
KV_HEADS = (
    "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups n_groups linear_num_key_heads"
)
WIDTHS = (
    "head_dim d_head dim_head kv_channels swa_head_dim attention_head_size linear_key_head_dim linear_head_dim "
    "kv_lora_rank o_lora_rank mamba_d_state state_size ssm_state_size index_head_dim v_head_dim linear_value_head_dim "
    "mamba_d_head mamba_head_dim q_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim rotary_dim "
    "time_step_rank mamba_dt_rank laurel_rank hidden_size_per_layer_input rel_extent d_rel gated_norm_rank hc_lowrank "
    "swa_q_lora_rank swa_kv_lora_rank swa_qk_nope_head_dim swa_v_head_dim indexer_head_dim"
)
EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"
CHOSEN = "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k top_k_experts"
LAYERS = (
    "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers depth"
)
FACTORS: Mapping[str, Mapping[str, Fraction]] = {
    WIDE: {
        **dict.fromkeys(HIDDEN.split(), Fraction(2)),
        **dict.fromkeys(WIDTHS.split(), Fraction(2)),
        **dict.fromkeys(KV_HEADS.split(), Fraction(1, 2)),
        **dict.fromkeys(EXPERTS.split(), Fraction(2)),
    },
    DEEP: {
        **dict.fromkeys(HIDDEN.split(), Fraction(3)),
        **dict.fromkeys(HEADS.split(), Fraction(3)),
        **dict.fromkeys(KV_HEADS.split(), Fraction(2)),
        **dict.fromkeys(EXPERTS.split(), Fraction(3)),
        **dict.fromkeys(CHOSEN.split(), Fraction(3, 2)),
        **dict.fromkeys(LAYERS.split(), Fraction(2)),
    },
}
SHAPES = (TINY, *FACTORS)


@dataclass(frozen=True)
class Shape:
    """One of `SHAPES`."""

    name: str = TINY

    def scaled(self, field: str, value: Any) -> Any:
        """Return what a field of the tiny configuration is in this shape."""
        if isinstance(value, Mapping):
            return {name: self.scaled(name, each) for name, each in value.items()}
        factor = FACTORS.get(self.name, {}).get(field.removesuffix("_per_layer"), Fraction(1))
        if isinstance(value, list) and all(type(each) is int for each in value):
            return [self._of(each, factor) for each in value]
        return self._of(value, factor) if type(value) is int else value

    @staticmethod
    def _of(value: int, factor: Fraction) -> int:
        return max(1, int(value * factor)) if value > 0 else value

    @property
    def layers(self) -> int:
        """How many times the layers there are."""
        return int(FACTORS.get(self.name, {}).get("num_hidden_layers", 1))

    def changes(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return entries of a tiny configuration as they are in this shape; what there is for each layer, repeated."""
        counts = [entries[name] for name in LAYERS.split() if type(entries.get(name)) is int]
        made = {}
        for name, value in entries.items():
            value = self.scaled(name, value) if not isinstance(value, Mapping) else self.changes(value)
            made[name] = (
                value * self.layers if counts and isinstance(value, list) and len(value) == counts[0] else value
            )
        for kv_heads, heads in (("swa_num_key_value_heads", "swa_num_attention_heads"),):
            if kv_heads in entries and entries[kv_heads] == entries[heads]:
                made[kv_heads] = made[heads]
        return made
