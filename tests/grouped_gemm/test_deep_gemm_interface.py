"""DeepGEMM's arguments of the grouped GEMM: the group of each row (``m_indices``) and column-major scales of x."""

import re

import numpy as np
import pytest
import torch
from helpers.grouped_gemm import FUNCTIONS, inputs, with_powers_of_two
from helpers.machine_code import is_dependent_launch
from helpers.wrong_kernels import changed, changed_maker, is_rejected

import moe_numba
from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from numba import cuda, int32

from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_rowwise_fp8,
    group_gemm_silu_and_mul_bf16,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.call import plan as gemm_launch
from moe_numba.grouped_gemm.call.checks import scale_strides
from moe_numba.grouped_gemm.common import block_scales, group_starts
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.wgmma import kernel
from moe_numba.grouped_gemm.wgmma import launch as wgmma_launch
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart

# m_indices

GROUPS, POISON, HUGE = 5, -12345, 0x7FFFFFFF
M_INDICES = {
    "ascending": [0, 0, 0, 1, 1, 3, 4],
    "padding behind each group": [0, 0, -1, -1, 1, 1, 1, -1, 4, -1],
    "any order, padding in front": [-1, 4, 4, 2, -1, 0, 3, 3],
    "one row": [2],
    "only padding": [-1] * 9,
    "no groups": [GROUPS, -2, 1 << 30, HUGE, -HUGE - 1, GROUPS],
    "two runs of a group": [1, 1, 0, 1, -1, 0, 2, 1],
    "many rows of few groups": [0] * 150 + [-1] * 10 + [3] * 140,
    "garbage": torch.randint(-2, 7, (300,), generator=torch.Generator().manual_seed(3)).tolist(),
}


def find(values, device, threads=32, seed=0, make_kernel=group_starts.make_group_starts_kernel):
    """Run the kernel of ``threads`` threads; return lengths and first rows, and check what lies around them."""
    m_indices = torch.tensor(values, dtype=torch.int32, device=device)
    memory = torch.full((2 * GROUPS + 8,), POISON, dtype=torch.int32, device=device)
    with simulator.seed(seed), simulator.races():
        launch(make_kernel(threads), 1, threads, m_indices, memory[4:], np.int64(len(values)), GROUPS)
    assert bool((memory[:4] == POISON).all() and (memory[4 + 2 * GROUPS :] == POISON).all())
    return memory[4 : 4 + GROUPS], memory[4 + GROUPS : 4 + 2 * GROUPS]


@pytest.mark.parametrize("name", M_INDICES)
def test_rows_of_groups(name, device):
    values = M_INDICES[name]
    expected = reference.group_rows(torch.tensor(values, dtype=torch.int32, device=device), GROUPS)
    for threads in (32, 1024) if len(values) < 20 else (32,):
        assert all(map(torch.equal, find(values, device, threads), expected))


def test_reference_of_rows_of_groups():
    lengths, starts = reference.group_rows(torch.tensor([-1, 2, 2, -1, 0, 2, 7, 1]), 4)
    assert lengths.tolist() == [1, 1, 2, 0] and starts.tolist() == [4, 7, 1, 0]


WRONG = {
    "the first row is ignored": (
        "            if group < uint32(groups):\n                cuda.atomic.min(first, g",
        "            if False:\n                cuda.atomic.min(first, g",
    ),
    "the last run has no end": ("if row + 1 < rows else int32(-1)", "if row + 1 < rows else current[b]"),
    "a later run replaces the first": ("cuda.atomic.min(first, next_group", "cuda.atomic.max(first, next_group"),
    "padding counts as a group": ("if next_group < uint32(groups):", "if int32(next_group) < groups:"),
    "ends are written before they are known": (
        "        cuda.syncthreads()\n        g = thread\n        while g < groups:\n            is_empty",
        "        g = thread\n        while g < groups:\n            is_empty",
    ),
    "only one batch is read": ("base += _BATCH * threads", "base = rows"),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="they could be right by chance, or write out of bounds")
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_rejected(what):
    make_kernel = changed(group_starts, *WRONG[what])["make_group_starts_kernel"]

    def attempt(seed):
        for name in ("ascending", "two runs of a group", "many rows of few groups"):
            expected = reference.group_rows(torch.tensor(M_INDICES[name], dtype=torch.int32), GROUPS)
            if not all(map(torch.equal, find(M_INDICES[name], "cpu", 32, seed, make_kernel), expected)):
                return True
        return False

    assert is_rejected(attempt, seeds=3), f"the check accepts a kernel in which {what}"


def test_machine_code():
    """No spills and no local memory; the shared-memory minima need no loop of compare-and-swap."""
    request = f"make_group_starts_kernel({group_starts.THREADS})", group_starts.SIGNATURE, group_starts.THREADS, False
    report = compile_apart("from moe_numba.grouped_gemm.common.group_starts import *", {"kernel": request})["kernel"]
    assert report.spilled_bytes == report.stack_bytes == 0 and report.complaints == []
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert report.count("LDL", "STL", "LD", "ST", "ATOMS.CAS") == 0
    assert is_dependent_launch(report)
    assert report.count("ATOMS") == 2 * group_starts._BATCH + 1


def rows_of_groups(device, name):
    """Return a problem whose groups have padding between them, and the expected output."""
    x, weight, _, _, *scales = inputs((5, 0, 15), device=device)[name]
    m_indices = torch.tensor([-1, *[2] * 9, -1, -1, *[0] * 6, 7, 1], dtype=torch.int32, device=device)
    expected = FUNCTIONS[name][1](x, weight, *reference.group_rows(m_indices, 3), *scales)
    return x, weight, scales, m_indices, expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_m_indices(name, device):
    """The result is bit-identical to that with lengths and starts, and rows of no group are not written."""
    x, weight, scales, m_indices, expected = rows_of_groups(device, name)
    out = torch.full(expected.shape, float("nan"), dtype=torch.bfloat16, device=device)
    assert FUNCTIONS[name][0](x, weight, None, None, *scales, m_indices=m_indices, out=out) is out
    assert mismatch(out, expected) is None
    assert out.isnan().all(1).nonzero().flatten().tolist() == [0, 10, 11, 18]
    order = torch.arange(len(x) - 1, -1, -1, dtype=torch.int32, device=device)
    if name == "blockwise":
        scales = [scales[0].flip(0).contiguous(), scales[1]]
    given = x.view(torch.uint8).flip(0).view(x.dtype) if name != "bf16" else x.flip(0)
    again = torch.full_like(out, float("nan"))
    FUNCTIONS[name][0](given, weight, None, None, *scales, m_indices=m_indices, gather_indices=order, out=again)
    assert torch.equal(out.nan_to_num(9), again.nan_to_num(9))


def test_m_indices_of_other_functions(device):
    """With activations, scales per row and epilogue options the result is that with lengths and starts, too."""
    if not gpu_of(0).has_wgmma:
        pytest.skip("needs wgmma")
    every = inputs((5, 0, 15), n=256, device=device)
    m_indices = torch.tensor([-1, *[2] * 9, -1, -1, *[0] * 6, 7, 1], dtype=torch.int32, device=device)
    lengths, starts = reference.group_rows(m_indices, 3)
    given = dict(seqlens=lengths, cu_seqlens=torch.cat([starts, starts[:1]])), dict(m_indices=m_indices)
    assert lengths.tolist() == [6, 1, 9]
    bias = torch.randn(3, 256, device=device)
    order = torch.randperm(20).int().to(device)
    terms = dict(bias=bias, row_weights=torch.randn(20, device=device), scatter_indices=order)
    x_scale, w_scale = torch.rand(20, device=device), torch.rand(3, 256, device=device)
    for function, name, options, dtypes in (
        (group_gemm_bf16, "bf16", terms | dict(accumulate=True), {256: torch.float32}),
        (group_gemm_rowwise_fp8, "pertensor", terms | dict(x_scale=x_scale, w_scale=w_scale), {256: torch.bfloat16}),
        (group_gemm_silu_and_mul_bf16, "bf16", dict(bias=bias), {128: torch.bfloat16}),
        (group_gemm_silu_and_mul_pertensor_fp8, "pertensor", dict(bias=bias), {128: FP8, 1: torch.float32}),
        (group_gemm_silu_and_mul_blockwise_fp8, "blockwise", {}, {128: FP8, 1: torch.float32}),
    ):
        x, weight, _, _, *scales = every[name]
        names = ("y_scale",) if name == "pertensor" else ("x_scale", "w_scale")
        options = dict(zip(names, scales, strict=False)) | options if "x_scale" not in options else options
        results = []
        for groups in given:
            outs = [torch.full((20, columns), 7.0, device=device).to(dtype) for columns, dtype in dtypes.items()]
            out = outs[0] if len(outs) == 1 else tuple(outs)
            function(x, weight, **dict(seqlens=None, cu_seqlens=None) | groups, out=out, **options)
            results.append([one.float() for one in outs])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other) and one.isfinite().all()
            written = (other != 7).any(1).nonzero().flatten().tolist()
            rows = [row for row in range(20) if row not in (0, 10, 11, 18)]
            assert written == (sorted(order[rows].tolist()) if "scatter_indices" in options else rows)


def test_calls_of_different_sizes_share_no_memory_wrongly(device):
    """Plans for several numbers of rows and groups use the same stream, one after the other."""
    x, weight, _, m_indices, expected = rows_of_groups(device, "bf16")
    for groups, rows in ((3, 20), (1, 20), (3, 12), (3, 20)):
        wanted = reference.group_gemm(x[:rows], weight[:groups], *reference.group_rows(m_indices[:rows], groups))
        out = torch.full(wanted.shape, float("nan"), dtype=torch.bfloat16, device=device)
        group_gemm_bf16(x[:rows], weight[:groups], None, None, m_indices=m_indices[:rows].clone(), out=out)
        assert mismatch(out, wanted) is None


def test_prepared_call_reads_new_m_indices(device):
    x, weight, _, m_indices, _ = rows_of_groups(device, "bf16")
    out = torch.empty(20, 128, dtype=torch.bfloat16, device=device)
    prepared = moe_numba.prepare(group_gemm_bf16, x, weight, None, None, m_indices=m_indices, out=out)
    m_indices.copy_(torch.tensor([0] * 3 + [1] * 17))
    out.fill_(float("nan"))
    prepared()
    assert mismatch(out, reference.group_gemm(x, weight, *reference.group_rows(m_indices, 3))) is None


# Strides of x_scale


def column_major(scale):
    """Return scales [..., rows, k blocks] in DeepGEMM's layout: rows are contiguous, columns 16-byte aligned."""
    *groups, rows, blocks = scale.shape
    aligned = torch.full((*groups, blocks, -(-rows // 4) * 4), float("nan"), device=scale.device)
    aligned[..., :rows] = scale.mT
    return aligned[..., :rows].mT


LAYOUTS = {
    "column-major": column_major,
    "padded rows": lambda scale: torch.cat([scale, torch.full_like(scale, float("nan"))], -1)[..., : scale.shape[-1]],
}


@pytest.mark.parametrize("layout, average", [("column-major", 1), ("column-major", 1000), ("padded rows", 1)])
def test_strides_of_scales(layout, average, device):
    """The result is that of contiguous scales: rows in order, gathered, with m_indices, masked, and with activation."""
    x, weight, seqlens, cu_seqlens, x_scale, w_scale = inputs((5, 0, 18), n=256, k=320, device=device)["blockwise"]
    given = dict(x=x, weight=weight, seqlens=seqlens, cu_seqlens=cu_seqlens, w_scale=w_scale)
    order = torch.tensor([3, -1, 22, 0, 23, *range(18)], dtype=torch.int32, device=device)
    group_of_row = torch.tensor([2] * 10 + [-1] * 5 + [0] * 8, dtype=torch.int32, device=device)
    masked = (
        torch.stack([x[:9].view(torch.uint8)] * 3).view(x.dtype),
        torch.stack([x_scale[:9], x_scale[3:12], x_scale[5:14]]),
    )
    for function, more in (
        (group_gemm_blockwise_fp8, {}),
        (group_gemm_blockwise_fp8, dict(gather_indices=order)),
        (group_gemm_blockwise_fp8, dict(seqlens=None, cu_seqlens=None, m_indices=group_of_row)),
        (group_gemm_blockwise_fp8, dict(x=masked[0], cu_seqlens=None, x_scale=masked[1])),
        (group_gemm_silu_and_mul_blockwise_fp8, {}),
    ):
        arguments = dict(x_scale=x_scale, num_seq_per_group_avg=average) | given | more
        strided = LAYOUTS[layout](arguments["x_scale"])
        assert torch.equal(strided, arguments["x_scale"]) and not strided.is_contiguous()
        rows = more.get("gather_indices", arguments["x"]).shape[: arguments["x"].dim() - 1]
        outs = []
        for scale in (arguments["x_scale"], strided):
            y = torch.zeros(*rows, 256, dtype=torch.bfloat16, device=device)
            silu = function is group_gemm_silu_and_mul_blockwise_fp8
            out = (y[:, :128].to(FP8).contiguous(), torch.zeros(*rows, 1, device=device)) if silu else y
            outs.append(function(**arguments | dict(x_scale=scale, out=out)))
        for one, other in zip(*outs, strict=True) if silu else [outs]:
            # Block scales with other strides take the kernel of fewer rows, which adds in another order.
            torch.testing.assert_close(other.float(), one.float(), rtol=0.13 if silu else 2**-7, atol=1e-2)
            assert other.float().any()


def test_strides_that_do_not_fit():
    with pytest.raises(ValueError, match="x_scale has strides .* must be below 2\\^31"):
        scale_strides(torch.empty(2, 1 << 31, device="meta").T)


# Packed exponents instead of float32 scales


def test_packing_is_deep_gemms():
    """Bytes in order of k, rows contiguous, columns at multiples of 16 bytes; see DeepGEMM's tests of its layouts."""
    exponents = torch.arange(1, 1 + 3 * 6).view(3, 6)
    packed = reference.pack_ue8m0(torch.exp2(exponents - 127.0))
    assert packed.shape == (3, 2) and packed.stride() == (1, 4) and packed.dtype == torch.int32
    assert packed.tolist() == [
        [int.from_bytes(bytes(row[:4]), "little"), int.from_bytes(bytes(row[4:]), "little")]
        for row in exponents.tolist()
    ]
    assert torch.equal(reference.unpack_ue8m0(packed, 6), torch.exp2(exponents - 127.0))
    assert reference.pack_ue8m0(torch.full((2, 5, 4), 2.0**100)).stride() == (8, 1, 8)


def unpacking_error(device, unpack=block_scales.unpack_ue8m0):
    """Unpack every exponent from every byte; return None or how the kernel differs from the reference."""

    @cuda.jit
    def kernel(packed, scales):
        thread = int32(cuda.threadIdx.x)
        for k_block in range(8):
            scales[thread * 8 + k_block] = unpack(packed[thread * 2 + (k_block >> 2)], int32(k_block))

    exponents = torch.stack([(torch.arange(256) * 37 + 31 * i) % 256 for i in range(8)], 1)
    packed = (exponents.view(256, 2, 4) << torch.arange(4) * 8).sum(-1).to(torch.int32)
    expected, scales = reference.unpack_ue8m0(packed, 8), torch.empty(256, 8, device=device)
    launch(kernel, 1, 256, packed.to(device), scales.view(-1))
    return None if torch.equal(scales.cpu().view(torch.int32), expected.view(torch.int32)) else "a scale is wrong"


WRONG_UNPACKING = {
    "the first exponent in the highest byte": ("(k_block & 3) << 3", "24 - ((k_block & 3) << 3)"),
    "the same byte for all blocks of k": ("(k_block & 3) << 3", "k_block >> 2 << 3"),
    "zero for exponent 0": (") & 255) < 2", ") & 255) < 1"),
    "infinity for exponent 255": ("((exponent + 1) & 255) < 2", "exponent < 1"),
    "the bias is off by one": ("(exponent << 23)", "((exponent + 1) << 23)"),
}


def test_exponents_are_unpacked_exactly(device):
    assert unpacking_error(device) is None


@pytest.mark.parametrize("what", WRONG_UNPACKING)
def test_wrong_unpacking_is_rejected(what, device):
    assert unpacking_error(device, changed(block_scales, *WRONG_UNPACKING[what])["unpack_ue8m0"]) is not None


def packed_error(device, average, function=group_gemm_blockwise_fp8, which=(0, 1), k=640, n=144, **more):
    """Return None, or how results with packed scales differ from those with equal float32 scales, bit for bit."""
    (*given, x_scale, w_scale), packed = with_powers_of_two(inputs((5, 0, 15), n=n, k=k, device=device)["blockwise"])
    names = "x", "weight", "seqlens", "cu_seqlens", "x_scale", "w_scale"
    options, results = dict(num_seq_per_group_avg=average, **more), []
    for scales in ((x_scale, w_scale), tuple(packed[i] if i in which else (x_scale, w_scale)[i] for i in (0, 1))):
        out = function(**dict(zip(names, (*given, *scales), strict=True)) | options)
        results.append([one.float() for one in (out if isinstance(out, tuple) else (out,))])
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return None if same and all(one.isfinite().all() for one in results[0]) else "packed scales have another result"


@pytest.mark.parametrize("average", [1, 1000])
def test_packed_scales(average, device):
    """Of x, of weight, or of both; rows in order, gathered, and with m_indices; with a bias, and with an activation."""
    order = torch.randperm(20).int().to(device)
    m_indices = torch.tensor([2] * 9 + [-1] * 3 + [0] * 8, dtype=torch.int32, device=device)
    out = lambda: torch.zeros(20, 144, dtype=torch.bfloat16, device=device)
    assert packed_error(device, average) is None
    assert packed_error(device, average, which=(0,), gather_indices=order) is None
    groups = dict(seqlens=None, cu_seqlens=None, m_indices=m_indices)
    assert packed_error(device, average, which=(1,), k=512, out=out(), **groups) is None
    assert packed_error(device, average, group_gemm_silu_and_mul_blockwise_fp8, n=512) is None
    if average == 1:
        assert packed_error(device, average, bias=torch.randn(3, 144, device=device)) is None


def test_packed_scales_of_masked_rows(device):
    x, weight, seqlens, _, *scales = inputs((5, 0, 7), n=128, k=640, device=device)["blockwise"]
    masked = torch.stack([x[i : i + 9].view(torch.uint8) for i in (0, 1, 3)]).view(x.dtype)
    x_scale = torch.exp2(torch.log2(torch.stack([scales[0][i : i + 9] for i in (0, 1, 3)])).round())
    packed, outs = reference.pack_ue8m0(x_scale), []
    assert packed.shape == (3, 9, 2) and packed.stride() == (24, 1, 12)
    for scale in (x_scale, packed):
        out = torch.zeros(3, 9, 128, dtype=torch.bfloat16, device=device)
        outs.append(group_gemm_blockwise_fp8(masked, weight, seqlens, None, scale, scales[1], out=out))
    assert torch.equal(*outs) and outs[0].any()


WRONG_INDICES = {
    "a block of k for each int32": ("int64(k_block >> 2) * stride", "int64(k_block) * stride"),
    "a block of rows for each row of scales": ("int64(n_block) * FP8_SCALE_BLOCK", "int64(n_block)"),
    "one int32 of weight": ("int64(k_block >> 2) * rows", "int64(0)"),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="memory beyond an array is checked in the simulator")
@pytest.mark.parametrize("what", WRONG_INDICES)
def test_wrong_indices_of_packed_scales_are_rejected(what, monkeypatch, device):
    made = changed_maker(kernel, "make_kernel", block_scales, *WRONG_INDICES[what])
    monkeypatch.setattr(wgmma_launch, "make_kernel", made)
    monkeypatch.setattr(wgmma_launch, "get_launcher", wgmma_launch.get_launcher.__wrapped__)
    monkeypatch.setattr(gemm_launch, "_plans", {})
    assert is_rejected(lambda seed: packed_error(device, 1, n=272), seeds=1)


def test_wrong_packed_scales_are_refused(device):
    (x, weight, *sizes, x_scale, w_scale), packed = with_powers_of_two(inputs(device=device)["blockwise"])
    for scales, message in (
        ((packed[0][:, :0], w_scale), "x_scale has shape (20, 0); it must be [20, 1]"),
        ((packed[0].double(), w_scale), "x_scale is torch.float64; it must be torch.float32 or torch.int32"),
        ((x_scale, packed[1][:, :1]), "w_scale has shape (3, 1, 1); it must be [3, 128, 1]"),
        ((x_scale, w_scale.int()), "w_scale has shape (3, 1, 2); it must be [3, 128, 1]"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            group_gemm_blockwise_fp8(x, weight, *sizes, *scales)
    wide = torch.zeros(3, 128, 2, dtype=torch.int32, device=device)
    x, weight, *sizes, x_scale, _ = inputs(k=640, device=device)["blockwise"]
    with pytest.raises(ValueError, match="w_scale has strides .*; packed exponents must have contiguous rows"):
        group_gemm_blockwise_fp8(x, weight, *sizes, x_scale, wide)


@pytest.mark.gpu
def test_graph_replay_reads_new_m_indices():
    x, weight, _, m_indices, _ = rows_of_groups("cuda", "bf16")
    out = torch.empty(20, 128, dtype=torch.bfloat16, device="cuda")
    call = lambda: group_gemm_bf16(x, weight, None, None, m_indices=m_indices, out=out)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    for values in ([0] * 20, [2] * 3 + [-1] * 5 + [1] * 12, torch.randint(-2, 5, (20,)).tolist()):
        m_indices.copy_(torch.tensor(values))
        out.fill_(float("nan"))
        graph.replay()
        assert mismatch(out, reference.group_gemm(x, weight, *reference.group_rows(m_indices, 3))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4095, 4096, 4097, 100_000])
def test_many_rows_of_groups(rows):
    """Random runs of rows, and random indices; the first row is not aligned to 16 bytes."""
    generator = torch.Generator().manual_seed(rows)
    runs = torch.randint(-2, 515, (2 + rows // 50,), generator=generator).repeat_interleave(61)[: rows + 1].int()
    noise = torch.randint(-2, 515, (rows + 1,), generator=generator, dtype=torch.int32)
    for values in (runs, noise):
        values = values[1 : rows + 1].cuda()
        found = group_starts.GroupStarts(len(values), 512, torch.device("cuda", 0))(values)
        assert all(map(torch.equal, found, reference.group_rows(values, 512)))
