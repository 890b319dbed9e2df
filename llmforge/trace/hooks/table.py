"""The internals of transformers and torch that llmforge relies on: each name, what for, and how it is called.

A release that moves one of these is told by its name (`lost`), before anything fails in some other way. Of functions
and classes of transformers there is a digest of the source (`digests`), by which a release that changed one is told
from those that llmforge was proven with: `releases.json` has theirs. `python -m llmforge.trace.hooks.table` prints
those of the installed release.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RELEASES = Path(__file__).with_name("releases.json")


@dataclass(frozen=True)
class Hook:
    """One name, the module of llmforge that relies on it, and what would be lost; `takes` are parameters we name."""

    name: str  # module:attribute.attribute
    user: str
    purpose: str
    takes: tuple[str, ...] = ()


HOOKS = [
    # torch: modes and modules without memory
    Hook("torch._subclasses.fake_tensor:FakeTensor", "trace.hooks.internals", "tells fake parameters", ("mode",)),
    Hook(
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "trace.hooks.internals",
        "parameters with shapes and no memory",
        ("allow_non_fake_inputs",),
    ),
    Hook("torch._subclasses.fake_tensor:is_fake", "trace.export.depth", "tells fake parameters from constants", ("x",)),
    Hook(
        "torch.utils._python_dispatch:_disable_current_modes", "trace.hooks.internals", "real numbers inside of a trace"
    ),
    Hook("torch.utils._python_dispatch:TorchDispatchMode", "trace.export.depth", "records what a layer computes"),
    Hook(
        "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__",
        "trace.export.depth",
        "records what a layer computes",
        ("func", "types", "args", "kwargs"),
    ),
    Hook(
        "torch.utils._pytree:tree_map_only",
        "trace.export.stored_matrix",
        "reads stored matrices among arguments",
        ("type_or_types_or_pred", "func", "tree"),
    ),
    Hook(
        "torch.utils._pytree:tree_leaves", "trace.export.reference", "finds the parameters that a run reads", ("tree",)
    ),
    Hook("torch.utils._pytree:tree_map", "trace.export.depth", "walks the arguments of an operator", ("func", "tree")),
    Hook("torch:Tensor._make_wrapper_subclass", "trace.hooks.internals", "matrices that stay in their file"),
    Hook("torch._C:DisableTorchFunctionSubclass", "trace.hooks.internals", "matrices that stay in their file"),
    Hook(
        "torch.onnx._internal.exporter._fx_passes:decompose_with_registry",
        "trace.hooks.internals",
        "leaves a program alone that decomposing would only trace once more",
        ("exported_program", "registry"),
    ),
    Hook(
        "torch.onnx._internal.exporter._registration:ONNXRegistry",
        "trace.hooks.internals",
        "tells which operators have a translation",
    ),
    Hook(
        "torch.onnx._internal.exporter._registration:onnxscript_apis.get_torchlib_ops",
        "trace.hooks.internals",
        "lists translations without parsing them",
    ),
    Hook("onnxscript._internal.values:TracedOnnxFunction.function_ir", "trace.hooks.internals", "parses translations"),
    Hook("onnxscript._internal.values:TracedOnnxFunction.opset", "trace.hooks.internals", "names their domain"),
    Hook(
        "transformers.utils:import_utils.create_import_structure_from_path",
        "trace.hooks.imports",
        "reads the folder of models once",
        ("module_path",),
    ),
    Hook("transformers.utils:is_scipy_available", "trace.hooks.imports", "leaves scipy out"),
    Hook(
        "transformers.masking_utils:eager_mask",
        "trace.export.reference",
        "the mask of a layer, told with the function that made it",
        ("mask_function",),
    ),
    Hook("transformers:MODEL_FOR_CAUSAL_LM_MAPPING", "trace.hooks.internals", "the model class of a configuration"),
    Hook(
        "transformers.modeling_utils:PreTrainedModel._can_set_attn_implementation",
        "trace.hooks.internals",
        "tells models that call attention through the interface from those with code of their own",
    ),
    Hook("torch.overrides:TorchFunctionMode", "calibration.skeleton", "looks tokens up in a mapped table"),
    Hook(
        "torch.nn:Module.register_parameter",
        "trace.hooks.internals",
        "parameters on the meta device",
        ("name", "param"),
    ),
    Hook(
        "torch.nn:Module.register_forward_pre_hook",
        "trace.export.capture",
        "selects rows in front of the head",
        ("hook",),
    ),
    Hook("torch:Tensor._base", "trace.hooks.rotary", "tells that positions of all axes are the same"),
    Hook("torch.nn:functional", "trace.hooks.experts", "candidates for activations"),
    # torch: the exporters
    Hook(
        "torch.export:export",
        "trace.export.capture",
        "traces one step",
        ("mod", "args", "dynamic_shapes", "strict", "prefer_deferred_runtime_asserts_over_guards"),
    ),
    Hook("torch.export:Dim", "trace.export.capture", "dynamic dimensions", ("name",)),
    Hook(
        "torch.export:ExportedProgram.graph_module",
        "trace.export.concatenations",
        "turns piecewise writes into concatenations",
    ),
    Hook("torch:fx", "trace.export.concatenations", "turns piecewise writes into concatenations"),
    Hook(
        "torch.onnx:export",
        "trace.export.capture",
        "translates to ONNX",
        (
            *("model", "dynamo", "opset_version", "optimize", "verbose", "input_names", "output_names"),
            "custom_translation_table",
        ),
    ),
    Hook(
        "torch.onnx.ops:symbolic_multi_out",
        "trace.hooks.symbolic",
        "one node for what was recognized",
        ("domain_op", "inputs", "attrs", "dtypes", "shapes", "version"),
    ),
    Hook("torch:ops.aten.softplus.default", "trace.export.capture", "softplus without torch's threshold"),
    Hook(
        "torch:ops.aten.empty.memory_format",
        "trace.export.concatenations",
        "finds tensors that are filled piece by piece",
    ),
    Hook(
        "torch:ops.aten.new_empty.default",
        "trace.export.concatenations",
        "finds tensors that are filled piece by piece",
    ),
    Hook("torch:ops.aten.slice.Tensor", "trace.export.concatenations", "finds tensors that are filled piece by piece"),
    Hook("torch:ops.aten.copy_.default", "trace.export.concatenations", "finds tensors that are filled piece by piece"),
    Hook("torch:ops.aten.cat.default", "trace.export.concatenations", "turns piecewise writes into concatenations"),
    # transformers: configurations and models
    Hook("transformers:AutoConfig.from_pretrained", "checkpoint", "reads config.json"),
    Hook("transformers.models.auto.configuration_auto:CONFIG_MAPPING", "checkpoint", "tells unknown model types"),
    Hook("transformers:PretrainedConfig.get_text_config", "checkpoint", "sizes of the text model"),
    Hook("transformers:PretrainedConfig.attribute_map", "checkpoint", "sizes by one name for every architecture"),
    Hook("transformers:__version__", "checkpoint", "names the version that does not know a model type"),
    Hook(
        "transformers.integrations.gguf.gguf_tokenizer_mapping:convert_gguf_tokenizer",
        "checkpoint.gguf.tokenizer",
        "makes the tokenizer of a GGUF file",
    ),
    Hook(
        "transformers:CompressedTensorsConfig",
        "measure.runtime_process",
        "dequantizes an exported checkpoint when it is loaded",
    ),
    Hook("transformers:GenerationConfig", "measure.runtime_process", "ends answers of optimum where ours end"),
    Hook("transformers:AutoModelForCausalLM.from_config", "trace.export.skeleton", "builds the model without weights"),
    Hook(
        "transformers:AutoModelForCausalLM.from_pretrained",
        "trace.export.reference",
        "the model that a graph is held to",
    ),
    Hook("transformers:PreTrainedModel.get_output_embeddings", "trace.export.capture", "finds the head"),
    Hook("transformers:PreTrainedModel.get_input_embeddings", "calibration.skeleton", "finds the embedding"),
    Hook(
        "transformers:PreTrainedModel.set_experts_implementation",
        "trace",
        "calls ours for the experts",
        ("experts_implementation",),
    ),
    Hook("transformers.utils:logging.disable_progress_bar", "trace.hooks.internals", "keeps standard error ours"),
    Hook("transformers.utils:logging.enable_progress_bar", "trace.hooks.internals", "keeps standard error ours"),
    Hook("transformers.utils:logging.is_progress_bar_enabled", "trace.hooks.internals", "keeps standard error ours"),
    # transformers: attention, masks, experts
    Hook("transformers.utils.generic:GeneralInterface", "trace.hooks.internals", "the registries' class"),
    Hook("transformers.modeling_utils:AttentionInterface.register", "trace.hooks.internals", "ours", ("key", "value")),
    Hook(
        "transformers.modeling_utils:AttentionInterface._global_mapping", "trace.hooks.internals", "removes ours after"
    ),
    Hook(
        "transformers.masking_utils:AttentionMaskInterface.register", "trace.hooks.internals", "ours", ("key", "value")
    ),
    Hook(
        "transformers.masking_utils:AttentionMaskInterface._global_mapping",
        "trace.hooks.internals",
        "removes ours after",
    ),
    Hook(
        "transformers.masking_utils:sdpa_mask",
        "trace.hooks.attention",
        "the form in which masks are asked for",
        ("mask_function", "attention_mask", "local_size"),
    ),
    Hook("transformers.integrations.moe:ExpertsInterface.register", "trace.hooks.internals", "ours", ("key", "value")),
    Hook(
        "transformers.integrations.moe:ExpertsInterface._global_mapping", "trace.hooks.internals", "removes ours after"
    ),
    Hook(
        "transformers.integrations.moe:use_experts_implementation",
        "trace.hooks.experts",
        "marks how the weights of experts lie",
        ("is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"),
    ),
    Hook("transformers.models.llama.modeling_llama:ALL_ATTENTION_FUNCTIONS", "trace", "how models find attention"),
    Hook(
        "transformers.models.llama.modeling_llama:eager_attention_forward",
        "trace.hooks.attention",
        "the form in which attention is called",
        ("module", "query", "key", "value", "attention_mask", "scaling", "dropout"),
    ),
    Hook(
        "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
        "trace.hooks.rotary",
        "rotary embedding by its name",
        ("q", "k", "cos", "sin"),
    ),
    Hook(
        "transformers.models.qwen3_next.modeling_qwen3_next:causal_conv1d_fn",
        "trace.hooks.recurrent",
        "causal convolutions by their name",
        ("hidden_states", "weight", "bias", "activation"),
    ),
    Hook(
        "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule",
        "trace.hooks.recurrent",
        "the gated delta rule by its name",
        (
            *("query", "key", "value", "g", "beta", "initial_state", "output_final_state"),
            "use_qk_l2norm_in_kernel",
        ),
    ),
    Hook(
        "transformers.models.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention",
        "trace.hooks.recurrent",
        "the delta rule with a decay for each channel by its name",
        (
            *("query", "key", "value", "g", "beta", "initial_state", "output_final_state"),
            "use_qk_l2norm_in_kernel",
        ),
    ),
    Hook(
        "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan",
        "trace.hooks.state_spaces",
        "the scan of Mamba-2 by its name",
        (
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states"),
            *("dt_softplus", "dt_limit", "return_final_states"),
        ),
    ),
    Hook(
        "transformers.models.mamba.modeling_mamba:mamba_selective_scan",
        "trace.hooks.state_spaces",
        "the scan of Mamba by its name",
        ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state"),
    ),
    # transformers: caches
    Hook("transformers.cache_utils:Cache", "trace.hooks.attention", "a cache of our layers", ("layers",)),
    Hook("transformers.cache_utils:DynamicLayer", "measure.baseline", "a cache that can be cut"),
    Hook("transformers.cache_utils:DynamicSlidingWindowLayer", "measure.baseline", "a cache that can be cut"),
    Hook("transformers.cache_utils:CacheLayerMixin", "trace.hooks.attention", "base of a cache's layer"),
    Hook(
        "transformers.cache_utils:CacheLayerMixin.update",
        "trace.hooks.attention",
        "hands over keys and values",
        ("key_states", "value_states"),
    ),
    Hook(
        "transformers.cache_utils:CacheLayerMixin.get_mask_sizes",
        "trace.hooks.attention",
        "asked for",
        ("query_length",),
    ),
    Hook("transformers.cache_utils:CacheLayerMixin.get_seq_length", "trace.hooks.attention", "asked for"),
    Hook("transformers.cache_utils:CacheLayerMixin.lazy_initialization", "trace.hooks.attention", "asked for"),
    Hook("transformers.cache_utils:LinearAttentionCacheLayerMixin", "trace.hooks.attention", "base of a cache's layer"),
    Hook(
        "transformers.cache_utils:LinearAttentionCacheLayerMixin.update_conv_state",
        "trace.hooks.attention",
        "hands over the inputs of a convolution",
        ("conv_states", "state_idx"),
    ),
    Hook(
        "transformers.cache_utils:LinearAttentionCacheLayerMixin.update_recurrent_state",
        "trace.hooks.attention",
        "hands over a state",
        ("recurrent_states", "state_idx"),
    ),
    Hook("transformers:DynamicCache", "measure.baseline", "the baseline's own cache"),
    # transformers: names and layouts of weights
    Hook(
        "transformers.conversion_mapping:get_model_conversion_mapping",
        "trace.hooks.internals",
        "how a model's tensors are renamed and converted",
        ("model",),
    ),
    Hook(
        "transformers.core_model_loading:rename_source_key",
        "trace.hooks.internals",
        "where a tensor goes",
        ("source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"),
    ),
    Hook("transformers.core_model_loading:dot_natural_key", "trace.hooks.internals", "the order of experts"),
    Hook(
        "transformers.core_model_loading:WeightRenaming",
        "trace.hooks.internals",
        "tells renamings",
        ("source_patterns",),
    ),
    Hook(
        "transformers.core_model_loading:WeightConverter",
        "trace.hooks.internals",
        "tells converters",
        ("source_patterns", "target_patterns", "operations"),
    ),
    Hook(
        "transformers.core_model_loading:WeightConverter.convert",
        "trace.export.weights",
        "converts what it collected",
        ("layer_name", "model", "config"),
    ),
    Hook("transformers.core_model_loading:MergeModulelist", "trace.hooks.internals", "tells stacked experts", ("dim",)),
    Hook("transformers.core_model_loading:Concatenate", "trace.hooks.internals", "tells joined matrices", ("dim",)),
]


def find(hook: Hook) -> object:
    """Import what a hook names.

    Raises:
        ImportError, AttributeError: it is gone.
    """
    module, _, path = hook.name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def lost(hook: Hook) -> str | None:
    """Say what the installed releases lack of a hook; None: nothing."""
    what = f"{hook.name} is what llmforge.{hook.user} relies on ({hook.purpose})"
    try:
        found = find(hook)
    except (ImportError, AttributeError) as error:
        return f"{what}, and is gone: {error}"
    if not hook.takes:
        return None
    if not callable(found):
        return f"{what}, and can no longer be called"
    parameters = inspect.signature(found).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if anything and hook.takes[0] not in parameters:
        return None
    missing = [name for name in hook.takes if name not in parameters]
    return f"{what}; it no longer takes {', '.join(missing)}, but {', '.join(parameters)}" if missing else None


def digests() -> dict[str, str]:
    """Digest the source of the functions and classes of transformers among `HOOKS`, by their names; SHA-256, 16 digits.

    Raises:
        ImportError, AttributeError: one is gone.
    """
    found = {}
    for hook in HOOKS:
        if hook.name.startswith("transformers"):
            what = find(hook)
            if inspect.isroutine(what) or inspect.isclass(what):
                source = inspect.getsource(inspect.unwrap(what) if inspect.isroutine(what) else what)
                found[hook.name] = hashlib.sha256(inspect.cleandoc(source).encode()).hexdigest()[:16]
    return found


def releases() -> Mapping[str, Mapping[str, str]]:
    """Return the digests of each release that llmforge was proven with."""
    found: dict[str, dict[str, str]] = json.loads(RELEASES.read_text(encoding="utf-8"))
    return found


def changed(own: Mapping[str, str], known: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Name the hooks whose source is that of none of the `known` releases."""
    return [name for name, digest in own.items() if all(each.get(name) != digest for each in known.values())]


if __name__ == "__main__":
    print(json.dumps(digests(), indent=1, sort_keys=True))
