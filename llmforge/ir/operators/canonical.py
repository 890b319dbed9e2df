"""The operators of llmforge (docs/dialect.md): of the frontend, the interface passes, and the split among ranks."""

from __future__ import annotations

import onnx_ir as ir

from llmforge.base.errors import UnsupportedError
from llmforge.ir import graph, interface
from llmforge.ir.graph import dims, static
from llmforge.ir.operators.record import (
    CANONICAL,
    FLOAT,
    FLOAT8,
    FLOATS,
    FP32,
    I32,
    I64,
    INT8,
    INT32,
    INT64,
    CachedAttention,
    ChosenExperts,
    Input,
    Operator,
    OptionalInput,
    Output,
    Precision,
    Stage,
    integer,
    integers,
    listed,
    real,
    shown,
    text,
)

MOE_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
CONV_ACTIVATIONS = ("none", "silu")
UPDATE_RULES = ("gated", "gated_delta")  # as ONNX's LinearAttention names them
_INTERFACE = "split the graph before the pass that wrote it"


class _CachedCanonicalAttention(CachedAttention, domain=CANONICAL):
    """q [B, S, num_heads·D], k [B, S, kv_num_heads·D], v [B, S, kv_num_heads·Dv], caches [B, kv_num_heads, C, …]."""

    q = Input(FLOATS, 3)
    k = Input(FLOATS, 3)
    v = Input(FLOATS, 3)
    past_key = Input(FLOATS, 4)
    past_value = Input(FLOATS, 4)
    scale = real()
    softcap = real()
    window = integer()
    layer = integer()
    chunk = integer(0)

    @property
    def projections(self) -> tuple[ir.Value, ...]:
        """Query, key and value."""
        return self.q, self.k, self.v

    @property
    def tokens(self) -> ir.Value:
        """The input that says which slots of the caches hold tokens."""
        return self.required(self.inputs[_CachedCanonicalAttention.past_value.index + 1])

    def check(self) -> None:
        """Check that heads divide widths, and that the caches are the layer's own."""
        heads, kv_heads, layer = self.num_heads, self.kv_num_heads, self.layer
        self.require(0 < kv_heads <= heads and heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} KV heads")
        self.require(min(self.window, self.chunk, self.softcap) >= 0, "window, chunk and softcap must not be negative")
        for field in self.inputs:
            size = _dim(self.operand(field), 0) if field.heads == 0 else None
            self.require(size in (None, heads), f"{field.name} has {size} numbers, there are {heads} heads")
        held = interface.ATTENTION_MASK if isinstance(self, GrowingAttention) else interface.PAST_LENGTHS
        _check_layer(
            self,
            layer,
            [self.past_key, self.past_value, self.tokens],
            [interface.past_part(layer, "key"), interface.past_part(layer, "value"), held],
            [interface.present_part(layer, "key"), interface.present_part(layer, "value")],
        )
        for name, value, count, cache in (
            ("q", self.q, heads, self.past_key),
            ("k", self.k, kv_heads, self.past_key),
            ("v", self.v, kv_heads, self.past_value),
        ):
            width, channels = _dim(value, 2), _dim(cache, 3)
            if width is not None and channels is not None:
                wanted = count * channels
                self.require(width == wanted, f"{name} is {width} wide, {count} heads of {channels} are {wanted}")


class Attention(_CachedCanonicalAttention):
    """Attention over preallocated caches, whose rows hold `past_lengths` tokens before the step."""

    past_lengths = Input(I32, 1)
    sinks = OptionalInput(FLOATS, 1, heads=0)
    alibi_slopes = OptionalInput(FP32, 1, fp32=True, heads=0)


class GrowingAttention(_CachedCanonicalAttention):
    """Attention over caches that hold the past alone and grow by every step; written by optimum-interface."""

    attention_mask = Input(I64, 2)
    sinks = OptionalInput(FLOATS, 1, heads=0)
    alibi_slopes = OptionalInput(FP32, 1, fp32=True, heads=0)
    indivisible = _INTERFACE


class LatentAttention(Operator, domain=CANONICAL):
    """Attention over latents, of which each head's keys and values are made (DeepSeek-V2, arXiv 2405.04434, 2.1).

    q [B, S, num_heads·(N+R)], in each head N channels without rotary embedding and then R with it; latent [B, S, L+R],
    a latent and the R rotary channels that keys of all heads share; up [num_heads·(N+Dv), L], as it is stored: of each
    head the rows that make the N channels of its key, and then those of its value; cache [B, 1, C, L+R].
    """

    q = Input(FLOATS, 3)
    latent = Input(FLOATS, 3)
    up = Input(FLOATS, 2, heads=0)
    past = Input(FLOATS, 4)
    past_lengths = Input(I32, 1)
    sinks = OptionalInput(FLOATS, 1, heads=0)
    num_heads = integer()
    scale = real()
    softcap = real()
    window = integer()
    layer = integer()
    y = Output()
    present = Output(like="past")
    precision = Precision.HALF

    @property
    def chunk(self) -> int:
        """0: what `Attention` has in chunks, this has not."""
        return 0

    @property
    def rank(self) -> int:
        """Channels of a latent, L."""
        return graph.width(self.up)

    @property
    def rotary(self) -> int:
        """Channels of a key that all heads share, R."""
        return graph.width(self.past) - self.rank

    @property
    def plain(self) -> int:
        """Channels of a head's key that are made of the latent, N."""
        return graph.width(self.q) // self.num_heads - self.rotary

    @property
    def value_dim(self) -> int:
        """Channels of a head's value, Dv."""
        return graph.static(self.up)[0] // self.num_heads - self.plain

    def check(self) -> None:
        """Check that heads divide widths, and that the cache is the layer's own."""
        heads, layer = self.num_heads, self.layer
        self.require(heads > 0, f"there are {heads} heads")
        self.require(self.window >= 0 and self.softcap >= 0, "window and softcap must not be negative")
        sinks = _dim(self.sinks, 0)
        self.require(sinks in (None, heads), f"sinks has {sinks} numbers, there are {heads} heads")
        _check_layer(
            self,
            layer,
            [self.past, self.past_lengths],
            [interface.past_part(layer, "latent"), interface.PAST_LENGTHS],
            [interface.present_part(layer, "latent")],
        )
        width, rank, q, rows = _dim(self.past, 3), _dim(self.up, 1), _dim(self.q, 2), _dim(self.up, 0)
        latent, kv_heads = _dim(self.latent, 2), _dim(self.past, 1)
        self.require(kv_heads in (None, 1), f"the cache has {kv_heads} heads; latents are of all heads")
        self.require(None in (latent, width) or latent == width, f"latent is {latent} wide, the cache {width}")
        if width is None or rank is None or q is None or rows is None:
            return
        self.require(0 < rank <= width, f"latents have {rank} channels, of {width} that are cached")
        for name, size in (("q", q), ("up", rows)):
            self.require(size % heads == 0, f"{name} has {size} channels, which {heads} heads cannot share")
        plain = q // heads - (width - rank)
        self.require(0 < plain < rows // heads, f"up has {rows // heads} rows a head, {plain} of which make its key")


ATTENTIONS = (Attention, LatentAttention)  # over preallocated caches, each in a window of tokens


POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")  # of PoolSequences


class EncoderAttention(Operator, domain=CANONICAL):
    """Attention of sequences that stand side by side, each to itself and as a whole: there is no cache.

    q [1, T, num_heads·D], k [1, T, kv_num_heads·D], v [1, T, kv_num_heads·Dv]. A query sees its own place, `left` keys
    of its sequence before it and `right` after it; -1: all of them.
    """

    q = Input(FLOATS, 3)
    k = Input(FLOATS, 3)
    v = Input(FLOATS, 3)
    sequence_starts = Input(I32, 1)
    num_heads = integer()
    kv_num_heads = integer()
    scale = real()
    softcap = real()
    left = integer()
    right = integer()
    y = Output()
    precision = Precision.HALF
    indivisible = "an encoder is not divided among ranks"

    def check(self) -> None:
        """Check that heads divide widths."""
        heads, kv_heads = self.num_heads, self.kv_num_heads
        self.require(0 < kv_heads <= heads and heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} KV heads")
        self.require(min(self.left, self.right) >= -1, "left and right must not be less than -1")
        self.require(self.softcap >= 0, "softcap must not be negative")
        self.require(self.sequence_starts.name == interface.SEQUENCE_STARTS, "sequences begin where the graph says")
        q, k, v = _dim(self.q, 2), _dim(self.k, 2), _dim(self.v, 2)
        for name, width, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            self.require(
                width is None or width % count == 0, f"{name} is {width} wide, which {count} heads cannot share"
            )
        if q is not None and k is not None:
            self.require(q // heads == k // kv_heads, f"queries have {q // heads} channels, keys {k // kv_heads}")


class PoolSequences(Operator, domain=CANONICAL):
    """One row of each sequence that stands in x [1, T, H], y [sequences, H]: its first or last token, or of all.

    Of all, the largest number of each column, their mean, their sum by the root of their count, or their mean with
    weights 1, 2, 3 … from the first on (arXiv:2202.08904).
    """

    x = Input(FLOATS, 3)
    sequence_starts = Input(I32, 1)
    mode = text()
    y = Output()
    indivisible = "an encoder is not divided among ranks"

    def check(self) -> None:
        """Check the mode."""
        self.require(self.mode in POOLINGS, f"mode {self.mode!r} is unknown; known are {listed(POOLINGS)}")
        self.require(self.sequence_starts.name == interface.SEQUENCE_STARTS, "sequences begin where the graph says")


class SequenceSoftmax(Operator, domain=CANONICAL):
    """Softmax of scores x [..., T, T] over the keys of each query's own sequence; other keys get 0."""

    x = Input(FLOATS)
    sequence_starts = Input(I32, 1)
    y = Output()
    stage = Stage.OWN_ATTENTION
    precision = Precision.FP32
    indivisible = "an encoder is not divided among ranks"

    def check(self) -> None:
        """Check that sequences begin where the graph says."""
        self.require(self.sequence_starts.name == interface.SEQUENCE_STARTS, "sequences begin where the graph says")


class CausalMask(Operator, domain=CANONICAL):
    """What a model adds to scores in attention code of its own, fp32 [batch, 1, queries, keys]; of a raw graph."""

    past_lengths = Input(I32, 1)
    window = integer()
    y = Output(dtype=FLOAT)
    stage = Stage.LOWERED


class MoE(ChosenExperts, domain=CANONICAL):
    """Experts: x [..., H], expert_ids and expert_weights [..., top_k], up [E, H, 2·I or I], down [E, I, H]."""

    x = Input()
    expert_ids = Input(I64, chooses=True)
    expert_weights = Input(chooses=True)
    up = Input(FLOATS, 3, of="experts")
    down = Input(FLOATS, 3, of="experts")
    up_bias = OptionalInput(FLOATS, 2, of="experts")
    down_bias = OptionalInput(FLOATS, 2, of="experts")
    activation = text()
    gated = integer()
    interleaved = integer()
    alpha = real()
    beta = real()
    limit = real()

    def check(self) -> None:
        """Check the activation, and that matrices and biases belong together."""
        known = listed(MOE_ACTIVATIONS)
        gated, up, down = self.gated, self.up, self.down
        activation = self.activation
        self.require(activation in MOE_ACTIVATIONS, f"activation {activation!r} is unknown; known are {known}")
        self.require(gated in (0, 1) and self.interleaved in (0, gated), "gated, interleaved must be 0 or 1")
        self.require(self.limit >= 0, "limit must not be negative")
        self.require(gated == 1 or not (self.limit or self.beta), "limit and beta are of gates")
        self.require((self.up_bias is None) == (self.down_bias is None), "one of two biases is missing")
        inner = _dim(down, 1)
        wide = None if inner is None else inner * (1 + gated)
        for name, value, axes in (
            ("x", self.x, {-1: _dim(up, 1)}),
            ("expert_weights", self.expert_weights, {-1: _dim(self.expert_ids, -1)}),
            ("up", up, {2: wide}),
            ("down", down, {0: _dim(up, 0), 2: _dim(up, 1)}),
            ("up_bias", self.up_bias, {0: _dim(up, 0), 1: wide}),
            ("down_bias", self.down_bias, {0: _dim(up, 0), 1: _dim(up, 1)}),
        ):
            for axis, size in axes.items():
                held = _dim(value, axis)
                fits = held is None or size is None or held == size
                self.require(fits, f"{name} has size {held} along axis {axis}, must have {size}")

    @property
    def chosen(self) -> int | None:
        """How many experts a token chooses, where that is known."""
        return _dim(self.expert_ids, -1)


class LowPrecisionMoE(ChosenExperts, domain=CANONICAL):
    """Experts in codes of int8, fp8 or NVFP4, whose two products read what is rounded as codes are.

    Inputs and attributes as of `MoE`, but `up` and `down` are codes. Scales [E, K / group, N] are of `group` input
    features: 128, 16 of NVFP4, or 0, all of them, [E, 1, N]; so many features of a token share a scale as well, its
    largest magnitude over the largest code. NVFP4 has scales in fp8, one of each expert [E], and one [] for what is
    read.
    """

    x = Input()
    expert_ids = Input(I64, chooses=True)
    expert_weights = Input(chooses=True)
    up = Input({INT8, FLOAT8, ir.DataType.FLOAT4E2M1}, 3, of="experts")
    down = Input({INT8, FLOAT8, ir.DataType.FLOAT4E2M1}, 3, of="experts")
    up_scales = Input({FLOAT, FLOAT8}, 3, of="experts")
    down_scales = Input({FLOAT, FLOAT8}, 3, of="experts")
    up_bias = OptionalInput(FLOATS, 2, of="experts")
    down_bias = OptionalInput(FLOATS, 2, of="experts")
    up_scale = OptionalInput(FP32, 1, fp32=True, of="experts")
    down_scale = OptionalInput(FP32, 1, fp32=True, of="experts")
    up_input_scale = OptionalInput(FP32, 0, fp32=True)
    down_input_scale = OptionalInput(FP32, 0, fp32=True)
    activation = text()
    gated = integer()
    interleaved = integer()
    alpha = real()
    beta = real()
    limit = real()
    group = integer()
    indivisible = "experts in codes of a channel are not divided; split the graph before quantize-experts"

    def check(self) -> None:
        """Check that scales fit the codes, and that what NVFP4 needs is there."""
        for name in ("up", "down"):
            codes, scales = dims(getattr(self, name)), dims(getattr(self, f"{name}_scales"))
            if codes and scales and isinstance(codes[1], int):
                rows = codes[1] // self.group if self.group else 1
                fits = scales == (codes[0], rows, codes[2]) and (not self.group or codes[1] % self.group == 0)
                self.require(fits, f"{name}_scales {shown(scales)} do not fit {shown(codes)} in groups of {self.group}")
        beside = (self.up_scale, self.down_scale, self.up_input_scale, self.down_input_scale)
        self.require(all((each is not None) == self.is_fp4 for each in beside), "scales of experts are of NVFP4 alone")

    @property
    def is_fp4(self) -> bool:
        """Whether codes are NVFP4."""
        return self.up.dtype == ir.DataType.FLOAT4E2M1

    @property
    def chosen(self) -> int | None:
        """How many experts a token chooses, where that is known."""
        return _dim(self.expert_ids, -1)


class LowRankAdapter(Operator, domain=CANONICAL):
    """What adapters add to a linear layer: base [B, S, N], x [B, S, K], one of `a` [n + 1, K, P·R], `b` [n + 1, R, N].

    Row b of the batch takes number adapter_ids[b] of the n adapters, 0 is none. The features of the layer are P parts,
    side by side, of `widths`; part p multiplies columns p·R … (p + 1)·R - 1 of x·a[id] by its columns of b[id].
    """

    base = Input(FLOATS, 3)
    x = Input(FLOATS, 3)
    adapter_ids = Input(I64, 1)
    a = Input(FLOATS, 3, of="adapters")
    b = Input(FLOATS, 3, of="adapters")
    widths = integers()
    y = Output()
    indivisible = "adapters that requests choose are not divided"

    def check(self) -> None:
        """Check that the matrices fit the layer and its parts."""
        a, b, parts = dims(self.a), dims(self.b), len(self.widths)
        self.require(parts > 0 and min(self.widths) > 0, f"widths are {list(self.widths)}, must be positive")
        if not a or not b or not isinstance(b[1], int):
            return
        fits = a[0] == b[0] and a[2] == parts * b[1] and b[2] == sum(self.widths)
        self.require(fits, f"a {shown(a)} and b {shown(b)} do not fit parts of {list(self.widths)}")
        for name, axis, size in (("x", -1, a[1]), ("base", -1, b[2])):
            held = _dim(getattr(self, name), axis)
            self.require(held in (None, size), f"{name} is {held} wide, must be {size}")

    @property
    def rank(self) -> int:
        """The rank R of each part's product."""
        return static(self.b)[1]


class CausalConv(Operator, domain=CANONICAL):
    """A depthwise convolution over the tokens: x [B, S, C], weight [C, 1, taps], its state [B, taps - 1, C]."""

    x = Input(FLOATS, 3)
    weight = Input(FLOATS, 3)
    past = Input(FLOATS, 3)
    past_lengths = Input(I32, 1)
    lengths = Input(I32, 1)
    bias = OptionalInput(FLOATS, 1)
    activation = text()
    layer = integer()
    y = Output()
    present = Output(like="past")
    precision = Precision.HALF
    state = "conv"
    indivisible = "the state of a convolution is not divided"

    def check(self) -> None:
        """Check that the state is the layer's own, and that channels and taps fit it."""
        _check_state(self)
        self.require(
            self.activation in CONV_ACTIVATIONS,
            f"activation is {self.activation!r}, must be {listed(CONV_ACTIVATIONS)}",
        )
        weight, state, x = dims(self.weight), dims(self.past), dims(self.x)
        if weight and state and x and isinstance(weight[2], int):
            fits = weight[1] == 1 and state[1:] == (weight[2] - 1, weight[0]) and x[2] == weight[0]
            self.require(fits, f"x {shown(x)} and state {shown(state)} do not fit a kernel {shown(weight)}")


class LinearAttention(Operator, domain=CANONICAL):
    """A state of keys and values that decays: q, k [B, S, num_heads·D], v [B, S, H·Dv], state [B, H, D, Dv].

    `decay` is [B, S, H], or [B, S, H·D] where each channel of the keys has its own. `gated` adds k ⊗ v to the state;
    `gated_delta` adds what the state lacks of it, by the rate `beta` [B, S, H], which `gated` has not.
    """

    q = Input(FLOATS, 3)
    k = Input(FLOATS, 3)
    v = Input(FLOATS, 3)
    decay = Input(FLOATS, 3)
    past = Input(FLOATS, 4)
    past_lengths = Input(I32, 1)
    lengths = Input(I32, 1)
    beta = OptionalInput(FLOATS, 3)
    num_heads = integer()
    update_rule = text()
    scale = real()
    layer = integer()
    y = Output()
    present = Output(like="past")
    precision = Precision.FP32
    state = "recurrent"
    indivisible = "the state of a recurrent layer is not divided"

    def check(self) -> None:
        """Check that the state is the layer's own, and that heads and channels fit it."""
        _check_state(self)
        rule, known = self.update_rule, listed(UPDATE_RULES)
        self.require(rule in UPDATE_RULES, f"update_rule is {rule!r}, must be {known}")
        self.require((self.beta is not None) == (rule == "gated_delta"), f"beta is of gated_delta, the rule is {rule}")
        key_heads, state = self.num_heads, dims(self.past)
        heads, width, value_width = (dim if isinstance(dim, int) else 0 for dim in (state or (0, 0, 0, 0))[1:])
        if not (heads and width and value_width):
            return
        shared = 0 < key_heads <= heads and heads % key_heads == 0
        self.require(shared, f"{key_heads} heads of keys cannot serve {heads} of values")
        for name, value, wanted in (
            ("q", self.q, key_heads * width),
            ("k", self.k, key_heads * width),
            ("v", self.v, heads * value_width),
            ("beta", self.beta, heads),
        ):
            found = _dim(value, 2)
            self.require(found in (None, wanted), f"{name} is {found} wide, must be {wanted} for {shown(state)}")
        found = _dim(self.decay, 2)
        fits = found in (None, heads, heads * width)
        self.require(fits, f"decay is {found} wide, must be {heads} or {heads * width} for {shown(state)}")


class Fp4Linear(Operator, domain=CANONICAL):
    """A product in NVFP4: x [B, S, K], rounded to e2m1 in blocks of 16 features, codes [K, N], scales [K / 16, N]."""

    x = Input(FLOATS, 3)
    codes = Input({ir.DataType.FLOAT4E2M1}, 2)
    scales = Input({FLOAT8}, 2)
    weight_scale = Input(FP32, 0, fp32=True)
    input_scale = Input(FP32, 0, fp32=True)  # of x: block scales are fp8 in its units
    linear = True
    precision = Precision.HALF
    indivisible = "layers in NVFP4 are not divided; split the graph before quantize-fp4"

    def check(self) -> None:
        """Check that blocks divide the matrix."""
        k, rows = _dim(self.codes, 0), _dim(self.scales, 0)
        self.require(k is not None and rows is not None and k == 16 * rows, f"{k} rows are not {rows} blocks of 16")


class MxLinear(Operator, domain=CANONICAL):
    """A product in MXFP4 or MXFP8: x [B, S, K], rounded as codes [K, N] are; scales e8m0 [K / 32, N], powers of two."""

    x = Input(FLOATS, 3)
    codes = Input({ir.DataType.FLOAT4E2M1, FLOAT8}, 2)
    scales = Input({ir.DataType.FLOAT8E8M0}, 2)
    linear = True
    precision = Precision.HALF
    indivisible = "layers in microscaling formats are not divided; split the graph before quantize-mx"

    def check(self) -> None:
        """Check that blocks divide the matrix."""
        k, rows = _dim(self.codes, 0), _dim(self.scales, 0)
        self.require(k is not None and rows is not None and k == 32 * rows, f"{k} rows are not {rows} blocks of 32")


class CacheLengths(Operator, domain=CANONICAL):
    """The lengths that GroupQueryAttention takes, of a mask; written by genai-interface."""

    attention_mask = Input(I64, 2)
    seqlens_k = Output(dtype=INT32)
    total_sequence_length = Output(dtype=INT32)
    indivisible = _INTERFACE


class TokenOrder(Operator, domain=CANONICAL):
    """Where the tokens of a padded step stand once padding is on the right, and the way back."""

    attention_mask = Input(I64, 2)
    input_ids = Input(I64, 2)
    order = Output(dtype=INT64)
    inverse = Output(dtype=INT64)


class RowPlaces(Operator, domain=CANONICAL):
    """Which rows of a padded step get logits."""

    logits_rows = Input(I64, 1)
    attention_mask = Input(I64, 2)
    input_ids = Input(I64, 2)
    y = Output(dtype=INT64)


class _Collective(Operator, domain=CANONICAL):
    """Where ranks meet; not an operator itself. Written by the split among ranks (`llmforge.parallel.split`)."""

    x = Input()
    ranks = integer()

    def expand(self, model: ir.Model) -> None:
        """Refuse it (UnsupportedError: always)."""
        raise UnsupportedError(
            f"{self.op_type} {self.name} puts the results of several ranks together; standard ONNX has no operator "
            "that does",
            hint="use an engine with collectives (docs/tensor-parallelism.md)",
        )


class AllReduce(_Collective):
    """The sum of `x` over all ranks."""


class AllGather(_Collective):
    """What all ranks have in `x`, side by side along `axis`."""

    axis = integer()


def _check_layer(view: Operator, layer: int, given: list[ir.Value], expected: list[str], makes: list[str]) -> None:
    """Check the names of what a layer reads of its cache, and of what it makes of it."""
    names = [value.name for value in given]
    reads = listed(map(str, names))
    view.require(names == expected, f"layer {layer} must read {listed(expected)}, reads {reads}")
    made = [value.name for value in view.node.outputs[1:]]
    view.require(made == makes, f"layer {layer} must make {listed(makes)}, makes {listed(map(str, made))}")


def _check_state(view: CausalConv | LinearAttention) -> None:
    layer, part = view.layer, view.state
    expected = [interface.past_part(layer, part), interface.PAST_LENGTHS, interface.LENGTHS]
    given = [view.past, view.past_lengths, view.lengths]
    _check_layer(view, layer, given, expected, [interface.present_part(layer, part)])


def _dim(value: ir.Value | None, axis: int) -> int | None:
    known = None if value is None else dims(value)
    dim = None if known is None else known[axis]
    return dim if isinstance(dim, int) else None
