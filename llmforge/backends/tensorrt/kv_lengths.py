"""Lengths that attention reads up to: a tensor at each IAttention, which no ONNX operator carries to the builder.

An IAttention over a cache of `capacity` slots reads all of them, and the mask drops what lies after the text. With
`key_value_lengths`, int32 [batch], past_lengths + sequence, a kernel may stop where the text ends. The mask stays, for
windows and causality: slots after the text are masked either way, so lengths change what is read and never a result.
The parser drops Attention-24's `nonpad_kv_seqlen`, so lengths are set in the network.
"""

from __future__ import annotations

from typing import Any

from llmforge.base.errors import VerificationError
from llmforge.ir import interface

KIND = "ATTENTION_INPUT"
COUNTED = "ATTENTION_INPUT with lengths"


def set_lengths(network: Any, api: Any) -> int:
    """Give every attention of a parsed `network` the lengths of its texts; return how many there are.

    0 where the graph has no past_lengths or input_ids: it is no decoder.

    Raises:
        VerificationError: an attention does not keep them.
    """
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    past, ids = inputs.get(interface.PAST_LENGTHS), inputs.get(interface.INPUT_IDS)
    found = [layer for i in range(network.num_layers) if (layer := network.get_layer(i)).type.name == KIND]
    if past is None or ids is None or not found:
        return 0
    lengths = _lengths(network, api, past, ids)
    for layer in found:
        layer.__class__ = api.IAttentionInputLayer  # how a layer is narrowed in TensorRT's Python API
        layer.attention.key_value_lengths = lengths
        kept = layer.attention.key_value_lengths
        if kept is None or kept.name != lengths.name:
            raise VerificationError(f"attention {layer.attention.name} did not keep the lengths of its keys and values")
    return len(found)


def _lengths(network: Any, api: Any, past: Any, ids: Any) -> Any:
    """past_lengths [B] + sequence of input_ids [B, S], int32 [B]."""
    shape = network.add_shape(ids).get_output(0)  # int64 [2]
    sequence = network.add_slice(shape, (1,), (1,), (1,)).get_output(0)
    terms = [network.add_cast(each, api.int32).get_output(0) for each in (past, sequence)]
    total = network.add_elementwise(*terms, api.ElementWiseOperation.SUM)
    total.name = total.get_output(0).name = "key_value_lengths"
    return total.get_output(0)
