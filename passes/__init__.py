"""The passes, one flat file each, and the explicit tuple of all of them."""

from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.transform import Pass

# In the order in which a recipe would name them.
ALL: tuple[type[Pass], ...] = (
    FuseNorms,
    PackQkv,
    PackGateUp,
    FlashAttention,
)
