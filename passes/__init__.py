"""The passes, one flat file each, and the explicit tuple of all of them."""

from llmforge.passes.accept_embeddings import AcceptEmbeddings
from llmforge.passes.add_adapters import AddAdapters
from llmforge.passes.correct_low_rank import CorrectLowRank
from llmforge.passes.cpu_kernels import CpuKernels
from llmforge.passes.flash_attention import FlashAttention
from llmforge.passes.fuse_experts import FuseExperts
from llmforge.passes.fuse_norms import FuseNorms
from llmforge.passes.genai_interface import GenaiInterface
from llmforge.passes.lower_precision import LowerPrecision
from llmforge.passes.optimum_interface import OptimumInterface
from llmforge.passes.pack_gate_up import PackGateUp
from llmforge.passes.pack_qkv import PackQkv
from llmforge.passes.prune_structure import PruneStructure
from llmforge.passes.quantize_channels import QuantizeChannels
from llmforge.passes.quantize_experts import QuantizeExperts
from llmforge.passes.quantize_fp4 import QuantizeFp4
from llmforge.passes.quantize_kv_cache import QuantizeKvCache
from llmforge.passes.quantize_kv_fp8 import QuantizeKvFp8
from llmforge.passes.quantize_mx import QuantizeMx
from llmforge.passes.quantize_weights import QuantizeWeights
from llmforge.passes.recover_scales import RecoverScales
from llmforge.passes.sparsify_weights import Sparsify
from llmforge.rewrite.pass_base import Pass

# In the order in which a recipe would name them.
ALL: tuple[type[Pass], ...] = (
    PruneStructure,
    FuseNorms,
    PackQkv,
    PackGateUp,
    QuantizeKvFp8,
    FlashAttention,
    AddAdapters,
    Sparsify,
    QuantizeWeights,
    CorrectLowRank,
    RecoverScales,
    QuantizeChannels,
    QuantizeFp4,
    QuantizeMx,
    QuantizeExperts,
    FuseExperts,
    QuantizeKvCache,
    LowerPrecision,
    CpuKernels,
    AcceptEmbeddings,
    GenaiInterface,
    OptimumInterface,
)
