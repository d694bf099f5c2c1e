"""Test shards for tensor parallelism: what the ranks compute adds up to the whole layer."""

import re
from itertools import product

import numpy as np
import pytest
import torch

import moe_numba
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4, quantise_mxfp4
from moe_numba.moe_layer import fused_experts, pack_mxfp4_experts, reference, shard_experts
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.moe_layer.weights import FP8_BLOCK, FP8_TENSOR, MXFP4, format_of, scaling_of

EXPERTS, HIDDEN = 2, 64
# Format of the weights, order of the rows of gate and up, whether there are biases.
KINDS = {
    "bf16": ("bf16", "stacked", False),
    "bf16, gpt-oss": ("bf16", "interleaved", True),
    "FP8, a scale per expert": ("fp8_tensor", "stacked", False),
    "FP8, block scales": ("fp8_block", "stacked", False),
    "MXFP4": ("mxfp4", "stacked", False),
    "MXFP4, gpt-oss": ("mxfp4", "interleaved", True),
}
SIZES = {  # of a shard, with 1, 2 and 4 ranks
    "bf16": (96, 48, 16),
    "bf16, gpt-oss": (16, 96, 48),
    "FP8, a scale per expert": (48, 16, 96),
    "FP8, block scales": (192, 192, 64),
    "MXFP4": (32, 48, 16),
    "MXFP4, gpt-oss": (96, 16, 48),
}
EACH_SIZE = pytest.mark.parametrize(
    "kind, size, ranks", [(kind, *of) for kind, sizes in SIZES.items() for of in zip(sizes, (1, 2, 4), strict=True)]
)


def in_blocks(weight, random):
    """Return FP8 weights, a scale per 128 x 128 block, and their products, which bfloat16 represents.

    Scales are powers of 2 that differ from block to block.
    """
    experts, rows, columns = weight.shape
    scale = torch.exp2(torch.randint(-9, -5, (experts, -(-rows // 128), -(-columns // 128)), generator=random).float())
    values = (weight * 64).to(FP8)
    return values, scale, reference.dequantise_blocks(values, scale).bfloat16()


def make_layer(kind, intermediate, seed=0):
    """Return arguments of shard_experts for a whole layer, and the layer in bfloat16, exactly."""
    format_, gate_up, has_bias = KINDS[kind]
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random)
    halves = draw(EXPERTS, 2, intermediate, HIDDEN) / 8
    order = lambda halves: (halves if gate_up == "stacked" else halves.transpose(1, 2)).flatten(1, 2).contiguous()
    w13, w2, scales = order(halves), draw(EXPERTS, HIDDEN, intermediate) / 8, {}
    if format_ == "bf16":
        w13, w2 = exact = w13.bfloat16(), w2.bfloat16()
    elif format_ == "fp8_tensor":
        scales = dict(w13_scale=torch.tensor([2**-6, 2**-5]), w2_scale=torch.tensor([2**-6, 2**-7]))
        w13, w2 = (w13 * 64).to(FP8), (w2 * 64).to(FP8)
        exact = tuple(
            (w.float() * s[:, None, None]).bfloat16() for w, s in zip((w13, w2), scales.values(), strict=True)
        )
    elif format_ == "fp8_block":  # blocks of gate and of up begin at their first row
        gate, up = (in_blocks(half, random) for half in halves.unbind(1))
        w13, scales["w13_scale"], w13_exact = (torch.cat([g.view(torch.uint8), u.view(torch.uint8)], 1).view(g.dtype)
                                               for g, u in zip(gate, up, strict=True))  # fmt: skip
        w2, scales["w2_scale"], w2_exact = in_blocks(w2, random)
        exact = w13_exact, w2_exact
    else:
        (w13, scales["w13_scale"]), (w2, scales["w2_scale"]) = quantise_mxfp4(w13), quantise_mxfp4(w2)
        exact = tuple(dequantise_mxfp4(*p).bfloat16() for p in ((w13, scales["w13_scale"]), (w2, scales["w2_scale"])))
    biases = {}
    if has_bias:
        biases = dict(w13_bias=draw(EXPERTS, 2 * intermediate).bfloat16(), w2_bias=draw(EXPERTS, HIDDEN))
    return dict(w13=w13, w2=w2, gate_up=gate_up) | scales | biases, dict(w13=exact[0], w2=exact[1]) | biases


def in_float64(arguments, gate_up):
    """Return gate and up [experts, 2, intermediate, hidden + 1], with their biases as last column, and w2."""
    t = ExpertsTensors(None, arguments["w13"], arguments["w2"], None, None)
    t = t._replace(**{name: arguments[name] for name in ("w13_scale", "w2_scale") if name in arguments})
    results = []
    for expert in range(EXPERTS):
        format_ = format_of(t.w13, scaling_of(t.w13_scale))
        w13, w2 = reference.float_weights(t, format_, gate_up == "interleaved", expert)
        bias = arguments["w13_bias"][expert].float() if "w13_bias" in arguments else w13.new_zeros(len(w13))
        w13 = torch.cat([w13, bias[:, None]], 1).double()
        halves = w13.chunk(2) if gate_up == "stacked" else (w13[::2], w13[1::2])
        results.append((torch.stack(halves), w2.double()))
    return map(torch.stack, zip(*results, strict=True))


def products(halves, w2):
    """Return w2 times gate and up, which do not depend on where a shard's columns are."""
    return w2[:, None] @ halves


PARTS = {  # sizes of a shard, and numbers of ranks
    "bf16": ((16, 96), (1, 3)),
    "bf16, gpt-oss": ((48, 64), (1, 3)),
    "FP8, a scale per expert": ((16,), (2,)),
    "FP8, block scales": ((64, 128, 192, 320), (1, 2, 3)),
    "MXFP4": ((16, 48, 80), (2, 4)),
    "MXFP4, gpt-oss": ((32, 64, 96), (1, 3)),
}


@pytest.mark.parametrize(
    "kind, size, ranks", [(kind, size, ranks) for kind, parts in PARTS.items() for size, ranks in product(*parts)]
)
def test_shards_have_all_columns_once(kind, size, ranks):
    """Exactly, and shards are no larger than they must be."""
    layer, exact = make_layer(kind, size * ranks)
    shards = [shard_experts(**layer, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert all(tensor.is_contiguous() for shard in shards for tensor in shard.values())
    weights = [tuple(in_float64(shard, layer["gate_up"])) for shard in shards]
    wanted = products(*in_float64(exact, layer["gate_up"]))
    torch.testing.assert_close(sum(products(*pair) for pair in weights), wanted, rtol=1e-12, atol=1e-12)
    for halves, w2 in weights:  # all other columns are zeros
        used = w2.any(1)
        assert (used.sum(1) == size).all() and torch.equal(halves.any(3), used[:, None].expand(-1, 2, -1))
    format_ = KINDS[kind][0]
    multiple = 128 if format_ == FP8_BLOCK else 64
    columns = {shard["w2"].shape[2] * (64 if format_ == MXFP4 else 1) for shard in shards}
    assert columns == {-(-size // multiple) * multiple}
    names = {"w13", "w2"} | {n for n in layer if n.endswith("bias") or n.endswith("scale") and format_ != MXFP4}
    assert [set(shard) for shard in shards] == [names] + [names - {"w2_bias"}] * (ranks - 1)


@EACH_SIZE
def test_sum_of_the_ranks_is_the_layer(kind, size, ranks, device):
    """Without roundings to FP8: each of the two, of x and of activations, has a relative error of about 2.6e-2."""
    layer, exact = make_layer(kind, size * ranks)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=random).bfloat16()
    ids = torch.randint(-1, EXPERTS, (5, 2), generator=random, dtype=torch.int32)
    routed = dict(x=x, topk_ids=ids, topk_weights=torch.rand(5, 2, generator=random) + 0.5)
    options = dict(activation="swigluoai", limit=1.0) if layer["gate_up"] == "interleaved" else {}
    to = lambda arguments: {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    layer, exact, routed = map(to, (layer, exact, routed))
    shards = [shard_experts(**layer, rank=rank, ranks=ranks) for rank in range(ranks)]
    total = sum(fused_experts(**routed, **options, **shard).double() for shard in shards)
    in_fp8 = KINDS[kind][0] in (FP8_BLOCK, FP8_TENSOR)
    assert mismatch(total, reference.fused_experts(**routed, **options, **exact), 6e-2 if in_fp8 else 6e-3) is None


@pytest.mark.parametrize("gate_up", ["stacked", "interleaved"])
def test_packing_pads_whole_blocks(gate_up):
    layer, _ = make_layer("MXFP4, gpt-oss", 96)
    packed = pack_mxfp4_experts(*(layer[name] for name in ("w13", "w13_scale", "w2", "w2_scale")), gate_up)
    shard = shard_experts(**layer | dict(gate_up=gate_up), rank=0, ranks=1)
    assert torch.equal(packed[0], shard["w13"]) and torch.equal(packed[1], shard["w2"])


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides_and_parameters(kind):
    """A shard that has been cut by slicing, and the weights of a module, which may require grad."""
    layer, _ = make_layer(kind, 256)
    shard = shard_experts(**layer, rank=1, ranks=2)
    strided = {
        name: value if isinstance(value, str) else value.repeat_interleave(2, 0)[::2] for name, value in layer.items()
    }
    if layer["w13"].dtype == torch.bfloat16:
        strided["w13"] = torch.nn.Parameter(layer["w13"].mT.contiguous().mT)
    result = shard_experts(**strided, rank=1, ranks=2)
    assert result.keys() == shard.keys() and all(torch.equal(result[name], shard[name]) for name in shard)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in result.values())


def test_arrays_of_other_libraries():
    layer, _ = make_layer("MXFP4", 64)
    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in layer.items()}
    shard, result = (shard_experts(**given, rank=0, ranks=2) for given in (layer, arrays))
    assert all(isinstance(array, np.ndarray) for array in result.values())
    assert result.keys() == shard.keys() and all(np.array_equal(result[name], shard[name]) for name in shard)


REFUSALS = [  # kind, intermediate size, changed arguments, message
    ("bf16", 64, dict(rank=4, ranks=4), "rank is 4, but ranks is 4; 0 to 3 are allowed"),
    ("bf16", 64, dict(rank=-1), "rank is -1; it must be 0 or more"),
    ("bf16", 64, dict(rank=0.0), "rank is 0.0; it must be an int"),
    ("bf16", 64, dict(ranks=0), "ranks is 0; it must be 1 or more"),
    ("bf16", 64, dict(ranks=3), "ranks is 3; it must divide intermediate, 64 (w13 has 128 rows, gate and up)"),
    (
        "bf16",
        48,
        dict(ranks=2),
        "a shard has 24 of 48 intermediate columns (w13 has 96 rows, gate and up; ranks is 2); with torch.bfloat16 it "
        "must be a multiple of 16",
    ),
    ("FP8, a scale per expert", 24, {}, "a scale per expert it must be a multiple of 16"),
    ("FP8, block scales", 192, dict(ranks=2), "a shard has 96 of 192 intermediate columns (w13 has 384 rows"),
    ("FP8, block scales", 192, dict(ranks=2), "with a scale per 128 x 128 block it must be a multiple of 64"),
    ("MXFP4", 96, dict(ranks=4), "a shard has 24 of 96 intermediate columns (w13 has 192 rows"),
    ("bf16", 64, dict(gate_up="rows"), "gate_up is 'rows'; it must be one of interleaved, stacked"),
    ("FP8, block scales", 64, dict(gate_up="interleaved"), "128 x 128 block it must be 'stacked'"),
    ("bf16", 64, dict(w13=torch.zeros(2, 128, 64)), "w13 is torch.float32; it must be torch.bfloat16 or"),
    ("bf16", 64, dict(w13=[1]), "w13 is list; it must be a tensor"),
    ("bf16", 64, dict(w2=[1]), "w2 is list; it must be a tensor"),
    ("bf16", 64, dict(w2=torch.zeros(2, 64, 64)), "w2 is torch.float32; it must be torch.bfloat16"),
    ("bf16", 64, dict(w2=torch.zeros(2, 64, 32).bfloat16()), "it must be [2, 64, 64], as w13 has 128 rows"),
    ("bf16", 64, dict(w13=torch.zeros(2, 127, 64).bfloat16()), "w13 has 127 rows; it must have 2 * intermediate"),
    ("bf16", 64, dict(w13=torch.zeros(2, 128, 48).bfloat16()), "w13's hidden is 48; it must be a multiple of 64"),
    ("bf16", 64, dict(w13_scale=torch.ones(2)), "w13_scale is given, but the weights are torch.bfloat16"),
    ("bf16", 64, dict(w13_bias=torch.zeros(2, 64)), "w13_bias has shape (2, 64); it must be [2, 128], as w13 has 128"),
    ("bf16", 64, dict(w2_bias=torch.zeros(2, 64).half()), "w2_bias is torch.float16; it must be torch.bfloat16 or"),
    ("FP8, block scales", 64, dict(w2_bias=torch.zeros(2, 64)), "w2_bias is given; with FP8 weights it must be None"),
    ("FP8, block scales", 192, dict(w13_scale=torch.ones(2, 3, 1)), "shape (2, 3, 1); it must be (2, 4, 1)"),
    ("FP8, block scales", 192, dict(w2_scale=None), "w2_scale is None; FP8 weights need"),
    ("FP8, block scales", 192, dict(w2_scale=torch.ones(2)), "w2_scale has shape (2,); it must be (2, 1, 2)"),
    ("MXFP4", 64, dict(w2_scale=None), "w2_scale is None; MXFP4 weights need a scale per 32 elements"),
    ("MXFP4", 64, dict(w13=torch.zeros(2, 96, 2, 16).byte()), "with hidden a multiple of 64 and intermediate of 32"),
    ("MXFP4", 64, dict(w2=torch.zeros(2, 64, 1, 16).byte()), "it must be [2, 64, 2, 16], as w13 has 128 rows"),
]  # fmt: skip


@pytest.mark.parametrize("kind, intermediate, change, message", REFUSALS)
def test_refusals(kind, intermediate, change, message):
    layer, _ = make_layer(kind, intermediate)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        moe_numba.shard_experts(**dict(rank=0, ranks=1) | layer | change)
