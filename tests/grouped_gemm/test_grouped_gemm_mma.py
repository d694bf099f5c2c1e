"""The grouped GEMM without wgmma: which GPUs execute it, its configurations, the kernel, and wrong kernels."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.grouped_gemm import (
    FUNCTIONS,
    PATTERNS,
    SILU,
    check_graph_replay,
    inputs,
    lay_out_scales,
    make_problem,
    scatter,
    silu_mismatch,
    with_powers_of_two,
)
from helpers.grouped_gemm_epilogue import FUNCTIONS as OPTIONS
from helpers.grouped_gemm_epilogue import options_mismatch
from helpers.wrong_kernels import changed_maker, is_rejected

import moe_numba
from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from moe_numba.grouped_gemm import (
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_bf16,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.call import checks
from moe_numba.grouped_gemm.call import plan as launch
from moe_numba.grouped_gemm.call.arguments import PLAIN, GemmTensors
from moe_numba.grouped_gemm.common import tma_launch
from moe_numba.grouped_gemm.mma_sync import config as mma_sync_config
from moe_numba.grouped_gemm.mma_sync import epilogue as mma_sync_epilogue
from moe_numba.grouped_gemm.mma_sync import kernel as mma_sync_kernel
from moe_numba.grouped_gemm.mma_sync import launch as mma_sync_launch
from moe_numba.grouped_gemm.mma_sync.config import MmaConfig, MmaLayout, check_mma_config, select_mma_config
from moe_numba.grouped_gemm.mma_sync.launch import MMA_SIGNATURE
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.runtime.device import gpu_like, gpu_of
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.validate import UnsupportedDeviceError

# Which GPUs execute the kernel

CAPABILITIES = {(8, 0): "mma", (8, 6): "mma", (8, 9): "mma", (9, 0): "wgmma", (10, 0): "mma", (12, 0): "mma"}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capability_selects_the_kernel(capability, monkeypatch, device):
    chosen = lambda name: lambda *_: SimpleNamespace(config=SimpleNamespace(block_m=128, columns=128), name=name)
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu_like(capability))
    monkeypatch.setattr(launch, "HopperLaunch", chosen("wgmma"))
    monkeypatch.setattr(launch, "MmaLaunch", chosen("mma"))
    missing = dict.fromkeys(GemmTensors._fields[4:])
    tensors = GemmTensors(*inputs(device=device)["bf16"], **missing)
    assert launch.GemmPlan("none", tensors, None, PLAIN, None, False).launch.name == CAPABILITIES[capability]


def test_code_for_a_newer_gpu_has_no_wgmma():
    """PTX for sm_90 that a newer GPU compiles cannot contain instructions of sm_90a."""
    assert gpu_like((9, 0)).has_wgmma and not gpu_like((10, 0))._replace(capability=(9, 0)).has_wgmma


def test_turing_is_refused(monkeypatch, device):
    monkeypatch.setattr(checks.devices, "gpu_of", lambda device: gpu_like((7, 5), "Tesla T4"))
    x, weight, *sizes = inputs(device=device)["bf16"]
    with pytest.raises(UnsupportedDeviceError, match="Tesla T4 has compute capability 7.5; .* needs 8.0 .* float16"):
        group_gemm_bf16(x[:19].clone(), weight, *sizes)


IN_A_PROCESS = """
import moe_numba, torch
from moe_numba.grouped_gemm.call import plan as launch
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"
x, weight = torch.ones(5, 64, device=device).bfloat16(), torch.ones(2, 64, 64, device=device).bfloat16()
offs = torch.tensor([2, 5], dtype=torch.int32, device=device)
try:
    assert bool((moe_numba.group_gemm_bf16(x, weight, None, None, offs=offs) == 64).all())
    print(*(type(plan.launch).__name__ for plan in launch._plans.values()))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "arch, printed", [("80", "MmaLaunch"), ("75", "compute capability 7.5; the grouped GEMM needs")]
)
def test_environment_variable_selects_the_kernel(arch, printed):
    options = {**os.environ, "MOE_NUMBA_ARCH": arch}
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS], capture_output=True, text=True, env=options)
    assert printed in done.stdout, done.stderr


@pytest.mark.parametrize("capability", [c for c, path in CAPABILITIES.items() if path == "mma"])
def test_every_config_fits_into_shared_memory(capability):
    gpu = gpu_like(capability)
    for scaling in ("tensor", "block", "none"):
        for silu_and_mul in (False, True)[: 1 + (scaling != "none")]:
            for average in (1, 16, 17, 33, 64, 65, 4096):
                config = select_mma_config(gpu, scaling, "lengths", average, silu_and_mul)
                check_mma_config(config)
                assert MmaLayout(config).bytes <= gpu.shared_bytes and config.stages >= 2, config
                assert config.mma == ("bf16" if scaling == "none" else "e4m3" if capability >= (8, 9) else "f16")


def test_emulated_fp8_has_smaller_tiles():
    """ptxas replaces mma.sync of e4m3 by conversions on sm_90 and sm_100; larger tiles would spill there."""
    emulated = gpu_like((8, 9))._replace(hardware_capability=(9, 0))
    for gpu, rows in ((gpu_like((8, 9)), 128), (gpu_like((12, 0)), 128), (emulated, 64), (gpu_like((10, 0)), 64)):
        assert select_mma_config(gpu, "block", "lengths", 1000).block_m == rows


SMALL = MmaConfig(block_m=32, block_n=64, warps_m=2, warps_n=2, stages=3, max_groups=8)
FP8 = SMALL._replace(dtype="e4m3", mma="e4m3")
CONFIGS = {
    "bf16": SMALL,
    "bf16, 64 bytes of k": SMALL._replace(block_m=16, warps_m=1, block_k_bytes=64, stages=4),
    "tensor": FP8._replace(scaling="tensor"),
    "block": FP8._replace(scaling="block", block_n=128),
    "tensor, converted": FP8._replace(scaling="tensor", mma="f16", stages=2),
    "block, converted": FP8._replace(scaling="block", mma="f16", block_m=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shared_memory_regions_do_not_overlap(name):
    layout = MmaLayout(CONFIGS[name])
    starts = [layout.row_max_offset, layout.tile_info_offset, layout.warp_sums_offset, layout.first_tile_offset]
    assert 4 * starts[0] == layout.config.stages * layout.stage_bytes and starts == sorted(starts)
    assert layout.tile_info_offset % 4 == 0 and layout.bytes == 4 * (starts[-1] + 8)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(block_m=24), "block_m x block_n is 24 x 64"),
        (dict(block_n=32), "block_m x block_n is 32 x 32"),
        (dict(silu_and_mul=True, block_n=128), "with silu_and_mul it must be 256"),
        (dict(block_k_bytes=32), "block_k_bytes is 32"),
        (dict(scaling="block", block_n=192), "must divide 128"),
        (dict(stages=1), "stages is 1; it must be 2 or more"),
        (dict(block_m=48, warps_m=3), "96 rows at once|24 rows at once"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        mma_sync_kernel.make_kernel(SMALL._replace(**change))


# The kernel


def run(config, p, blocks=2, seed=0, make_kernel=mma_sync_kernel.make_kernel):
    """Run the kernel on a NaN-filled output with 4 guard rows behind it."""
    made, shared_bytes = make_kernel(config)
    indices = p.lengths if p.indices is None else p.indices
    total, (groups, n, k) = len(p.x if p.indices is None else p.indices), p.weight.shape
    y = torch.full((total + 4, n), float("nan"), dtype=torch.bfloat16, device=p.x.device)
    lengths = p.lengths if config.row_layout != "offsets" else (p.starts[:-1] + p.lengths)
    start = launcher(made, MMA_SIGNATURE, 0, launch_bounds=config.threads, shared_bytes=shared_bytes)
    vectors = k * p.x.element_size() // 16
    arrays = p.x, p.weight, y, p.x_scale, lengths, p.starts, p.x_scale, p.weight_scale, indices
    sizes = groups, total, p.capacity, n, 16 * vectors, *p.scale_strides, len(p.x), vectors, vectors, n * vectors
    with simulator.seed(seed):
        unused = address(p.lengths), address(p.x_scale), address(p.lengths), 0
        start(blocks, config.threads, None, *map(address, arrays), *sizes, *unused)
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


def supported(name):
    """Whether this GPU can execute a configuration; the simulator can execute all."""
    return simulator.ENABLED or gpu_of(0).capability >= ((8, 9) if CONFIGS[name].mma == "e4m3" else (8, 0))


NAMES = [name for name in CONFIGS if supported(name)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_group_sizes(name, pattern, device):
    p = make_problem(CONFIGS[name], PATTERNS[pattern], 64, 256 if "bf16" not in name else 128, device)
    assert mismatch(run(CONFIGS[name], p), p.expected) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n, k", [(64, 64), (192, 192), (16, 16), (208, 144)])
def test_sizes_that_are_no_multiples_of_a_tile(name, n, k, device):
    p = make_problem(CONFIGS[name], [5, 0, 12], n, k, device)
    assert mismatch(run(CONFIGS[name], p, blocks=4), p.expected) is None


@pytest.mark.parametrize("row_layout", ["offsets", "masked"])
def test_row_layouts(row_layout, device):
    config = SMALL._replace(row_layout=row_layout)
    p = make_problem(config, [3, 0, 40], 128, 128, device)
    assert mismatch(run(config, p), p.expected) is None


def test_bands(device):
    """The tiles of a group of many rows are computed band by band."""
    p = make_problem(SMALL, [100, 5, 64], 128, 64, device)
    assert mismatch(run(SMALL._replace(band_rows=64), p), p.expected) is None


def test_more_groups_than_threads(device):
    p = make_problem(SMALL, [1 if g in (0, 199) else 0 for g in range(200)], 64, 64, device)
    assert mismatch(run(SMALL._replace(max_groups=200), p, blocks=1), p.expected) is None


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "block, converted"])
def test_result_does_not_depend_on_thread_order(name, seed, device):
    p = make_problem(CONFIGS[name], [3, 40], 64, 256, device)
    first = run(CONFIGS[name], p)
    assert mismatch(first, p.expected) is None
    assert torch.equal(run(CONFIGS[name], p, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_invalid_group_sizes_stay_in_bounds(lengths, starts, device):
    p = make_problem(SMALL, [4, 4], 64, 64, device)
    p.lengths, p.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(SMALL, p)  # asserts that the guard rows are unchanged


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [[5, 0, 12, 40], [0, 0]])
def test_gather(name, lengths, device):
    p = scatter(make_problem(CONFIGS[name], lengths, 64, 192, device))
    assert mismatch(run(CONFIGS[name]._replace(gather=True), p), p.expected) is None


# Public functions


@pytest.fixture(params=[(8, 0), (8, 9)], ids=["sm_80", "sm_89"])
def gpu(request, monkeypatch):
    """A GPU of this capability for the plans; on a GPU the kernel is compiled for the GPU's own architecture."""
    found = gpu_of(0)
    if request.param > found.capability:
        pytest.skip("the GPU is older")
    like = gpu_like(request.param, sm_count=found.sm_count)
    monkeypatch.setattr(launch, "gpu_of", lambda device: like._replace(hardware_capability=found.capability))
    monkeypatch.setattr(tma_launch, "tensor_map_template", None)  # this path has no tensor maps
    monkeypatch.setattr(launch, "_plans", {})
    if simulator.ENABLED:  # smaller tiles, which take less time
        monkeypatch.setattr(mma_sync_config, "_MAX_STAGES", 3)
    select_mma_config.cache_clear()
    yield like
    select_mma_config.cache_clear()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("average", [None, 40, 300])
def test_average_does_not_change_the_result(name, average, gpu, device):
    function, expected = FUNCTIONS[name]
    arguments = inputs(device=device, k=128 if name == "bf16" else 192)[name]
    assert mismatch(function(*arguments, num_seq_per_group_avg=average), expected(*arguments)) is None


@pytest.mark.parametrize("function", [group_gemm_blockwise_fp8, group_gemm_silu_and_mul_blockwise_fp8])
def test_packed_scales(function, gpu, device):
    """The result is, bit for bit, that of float32 scales."""
    if gpu.capability == (8, 9):
        pytest.skip("as for 8.0")
    (*given, x_scale, w_scale), packed = with_powers_of_two(inputs((9,), n=256, k=640, device=device)["blockwise"])
    order = torch.randperm(9).int().to(device)
    one, other = (function(*given, *scales, gather_indices=order) for scales in ((x_scale, w_scale), packed))
    for a, b in zip(*(o if isinstance(o, tuple) else (o,) for o in (one, other)), strict=True):
        assert torch.equal(a.float(), b.float()) and a.float().any()


@pytest.mark.parametrize("name", OPTIONS)
def test_epilogue_options(name, gpu, device):
    """Bias, float32, accumulation, scattered and weighted rows."""
    if gpu.capability == (8, 9) and name in ("bf16", "pertensor"):
        pytest.skip("as for 8.0")
    assert options_mismatch(name, device, n=80, k=128 if name == "bf16" else 192) is None


@pytest.mark.parametrize(
    "function, options, needed",
    [
        (group_gemm_silu_and_mul_bf16, {}, "group_gemm_silu_and_mul_bf16"),
        (group_gemm_silu_and_mul_pertensor_fp8, dict(activation="swigluoai"), "activation 'swigluoai'"),
        (group_gemm_silu_and_mul_pertensor_fp8, dict(bias=torch.zeros(3, 256)), "bias with FP8 results"),
        (group_gemm_silu_and_mul_pertensor_fp8, {}, "n = 192, of which half is no multiple of 128"),
    ],
)
def test_activations_that_need_wgmma_are_refused(function, options, needed, gpu, device):
    name = "bf16" if function is group_gemm_silu_and_mul_bf16 else "pertensor"
    options = {key: to.to(device) if isinstance(to, torch.Tensor) else to for key, to in options.items()}
    arguments = inputs(n=256 if options else 192, device=device)[name]
    with pytest.raises(UnsupportedDeviceError, match=f"has no wgmma .*, which {needed} needs"):
        function(*arguments, **options)


@pytest.mark.parametrize("name", SILU)
@pytest.mark.parametrize("average", [20, 100])
def test_silu_and_mul(name, average, gpu, device):
    function, group_gemm = SILU[name]
    arguments = inputs((5, 0, 18), n=256, k=128, device=device)[name]
    expected = reference.silu_and_mul(group_gemm(*arguments))
    y, scale = function(*arguments, num_seq_per_group_avg=average)
    assert silu_mismatch(y, scale, expected) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gathered_rows_and_strides(name, gpu, device):
    """Rows of x and of weight may be further apart; an index out of bounds stands for a row of zeros."""
    x, weight, seqlens, cu_seqlens, *scales = inputs(k=128, device=device)[name]
    indices = torch.tensor([-1, 3, len(x), *range(17)], dtype=torch.int32, device=device)
    ordered = [reference.gather_rows(scales[0], indices), scales[1]] if name == "blockwise" else scales
    expected = FUNCTIONS[name][0](reference.gather_rows(x, indices), weight, seqlens, cu_seqlens, *ordered)
    x = torch.cat([x, x], 1)[:, : x.shape[1]]
    weight = torch.cat([weight, weight], 2)[:, :, : weight.shape[2]]
    out = FUNCTIONS[name][0](x, weight, seqlens, cu_seqlens, *scales, gather_indices=indices)
    assert torch.equal(out, expected)


def test_gather_from_no_rows(gpu, device):
    x, weight, seqlens, cu_seqlens = inputs(k=128, device=device)["bf16"]
    indices = torch.zeros(20, dtype=torch.int32, device=device)
    assert not group_gemm_bf16(x[:0].clone(), weight, seqlens, cu_seqlens, gather_indices=indices).any()
    assert group_gemm_bf16(x[:0].clone(), weight, 0 * seqlens, 0 * cu_seqlens).shape == (0, 128)


def test_prepared_calls_out_and_torch_ops(gpu, device):
    arguments = inputs(k=128, device=device)["bf16"]
    expected = reference.group_gemm(*arguments)
    out = torch.empty(20, 128, dtype=torch.bfloat16, device=device)
    prepared = moe_numba.prepare(group_gemm_bf16, *arguments, out=out)
    arguments[0].mul_(2)
    assert prepared() is out and mismatch(out, 2 * expected) is None
    assert torch.equal(torch.ops.moe_numba.group_gemm_bf16(*arguments), out)


@pytest.mark.parametrize("name", ["x", "weight"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: torch.cat([t, t[..., :8]], -1)[..., :192], "must be a multiple of 16"),
        (lambda t: t.mT.contiguous().mT, "its last dimension must be contiguous"),
        (lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape), "starts at address"),
        (lambda t: t[:1].expand(t.shape), "positive"),
    ],
    ids=["rows of 200 bytes", "column-major", "misaligned", "expanded"],
)
def test_what_cp_async_cannot_copy_is_refused_by_name(name, change, message, gpu, device):
    arguments = dict(zip(("x", "weight", "seqlens", "cu_seqlens", "y_scale"), inputs(device=device)["pertensor"]))
    arguments[name] = change(arguments[name].view(torch.uint8)).view(arguments[name].dtype)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        group_gemm_pertensor_fp8(**arguments)


# Wrong kernels

WRONG = {
    "the copies of a stage are not waited for": (
        mma_sync_kernel,
        "                wait_for_next_stage()\n                cuda.syncthreads()",
        "                cuda.syncthreads()",
    ),
    "the first stage is not waited for": (
        mma_sync_kernel,
        "        wait_for_next_stage()\n        cuda.syncthreads()\n\n",
        "        cuda.syncthreads()\n\n",
    ),
    "the barrier is missing": (mma_sync_kernel, "cuda.syncthreads()  # all threads'", "pass  # all threads'"),
    "a stage is overwritten while a warp reads it": (
        mma_sync_kernel,
        "        for _ in range(stages - 1):\n",
        "        for _ in range(stages):\n",
    ),
    "too many groups of copies may be in flight": (
        mma_sync_kernel,
        "make_cp_async_wait_group(stages - 2), make_cp_async_wait_group(0)",
        "make_cp_async_wait_group(stages - 1), make_cp_async_wait_group(0)",
    ),
    "rows of weight are swizzled by another phase": (mma_sync_kernel, "(row >> 2 & 6) | (row & 1)", "row & 7"),
    "rows of x are not swizzled": (mma_sync_kernel, "((vector ^ (x_phase >> phase_shift)) << 4)", "(vector << 4)"),
    "fragments are read without the swizzle": (mma_sync_kernel, "(((lane >> 4) ^ phase) << 4)", "((lane >> 4) << 4)"),
    "rows of the next group are stored": (mma_sync_epilogue, "if row < rows and", "if"),
    "the wrong group's weight is loaded": (mma_sync_kernel, "int64(info.group) * operands.group_pitch", "int64(0)"),
    "the last stage is left out": (
        mma_sync_kernel,
        "for k_block in range(k_blocks):",
        "for k_block in range(k_blocks - 1):",
    ),
    "an index beyond x is used": (
        mma_sync_kernel,
        "if row >= 0 and row < operands.x_rows else uint32(NO_ROW)",
        "if row >= 0 else uint32(NO_ROW)",
    ),
}
ON_A_GPU = {  # the others could be right by chance, or access memory out of bounds
    "rows of weight are swizzled by another phase",
    "rows of x are not swizzled",
    "fragments are read without the swizzle",
    "rows of the next group are stored",
    "the wrong group's weight is loaded",
    "the last stage is left out",
}


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("int64(row) * scales.row_stride", "int64(row) * scales.k_stride"),
        ("k_offset(k_block, scales.k_stride)", "k_block"),
        ("group * scale_group_stride", "int64(0)"),
    ],
)
def test_kernels_that_ignore_the_strides_of_scales_are_rejected(right, wrong, device):
    config = next(CONFIGS[name] for name in NAMES if CONFIGS[name].scaling == "block")._replace(row_layout="masked")
    p = lay_out_scales(make_problem(config, [5, 12], 64, 256, device), config)
    assert mismatch(run(config, p, blocks=1), p.expected) is None
    make_kernel = changed_maker(mma_sync_kernel, "make_kernel", mma_sync_kernel, right, wrong)
    assert is_rejected(lambda seed: mismatch(run(config, p, make_kernel=make_kernel), p.expected), seeds=1)


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, device):
    make_kernel, config = changed_maker(mma_sync_kernel, "make_kernel", *WRONG[what]), SMALL
    # The simulator repeats an access out of bounds thread by thread; the epilogue does not depend on k.
    k = 64 if WRONG[what][0] is mma_sync_epilogue else 384
    p = make_problem(config, [5, 35], 64, k, device)
    if "beyond x" in what:
        p, config = scatter(p), SMALL._replace(gather=True)
        p.indices[3], p.expected[3] = len(p.x), 0
    attempt = lambda seed: mismatch(run(config, p, blocks=1, seed=seed, make_kernel=make_kernel), p.expected)
    assert is_rejected(attempt), f"the check accepts a kernel in which {what}"


def test_a_kernel_that_stores_columns_beyond_y_is_rejected(device):
    change = mma_sync_kernel, "int32(n - column - (lane & 3) * 8)", "int32(n - column)"
    make_kernel = changed_maker(mma_sync_kernel, "make_kernel", *change)
    p = make_problem(SMALL, [5, 35], 80, 64, device)
    assert is_rejected(lambda seed: mismatch(run(SMALL, p, seed=seed, make_kernel=make_kernel), p.expected))


def test_a_kernel_that_reads_beyond_the_end_of_k_is_rejected(device):
    change = mma_sync_kernel, "ahead.tile < tiles and begin < operands.k_bytes", "ahead.tile < tiles"
    make_kernel = changed_maker(mma_sync_kernel, "make_kernel", *change)
    p = make_problem(SMALL, [5, 35], 64, 80, device)
    assert is_rejected(lambda seed: mismatch(run(SMALL, p, seed=seed, make_kernel=make_kernel), p.expected))


# Large sizes, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "lengths, n, k",
    [
        ([0, 1, 300, 257, 7, 0, 64, 144, 145, 1000, 289, 16], 4096, 7168),
        ([30] * 128, 1024, 4096),
        ([2100, 0, 33, 255, 256, 1], 2112, 2048),
        ([1] * 512, 512, 512),
    ],
)
def test_large_sizes(name, lengths, n, k, gpu):
    """All rows are written and no others, and results are bit-identical from run to run."""
    function, expected = FUNCTIONS[name]
    torch.manual_seed(2)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32, device="cuda"), seqlens.cumsum(0).int()])
    dtype = torch.bfloat16 if name == "bf16" else reference.FP8
    x = (torch.randn(sum(lengths), k, device="cuda") * 0.5).to(dtype)
    weight = torch.empty(len(lengths), n, k, dtype=dtype, device="cuda")
    for g in range(len(lengths)):
        weight[g] = (torch.randn(n, k, device="cuda") * 0.5).to(dtype)
    blocks = torch.rand(len(x), k // 128, device="cuda"), torch.rand(len(weight), -(-n // 128), k // 128, device="cuda")
    scales = {"bf16": (), "pertensor": (blocks[1][:, 0, 0].contiguous() + 0.5,), "blockwise": [b + 0.5 for b in blocks]}
    arguments = x, weight, seqlens, cu_seqlens, *scales[name]
    wanted = expected(*arguments)
    padded = torch.full((len(x) + 64, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    for average in (None, 8, 64, 300):
        padded.fill_(float("nan"))
        out = function(*arguments, num_seq_per_group_avg=average, out=padded[: len(x)])
        assert mismatch(out, wanted) is None and bool(padded[len(x) :].isnan().all())
        first = out.clone()
        for _ in range(20):
            assert torch.equal(function(*arguments, num_seq_per_group_avg=average, out=out), first)


@pytest.mark.gpu
def test_graph_replay_reads_new_lengths(gpu):
    check_graph_replay()


WRONG_OPTIONS = {
    "the first group's bias is added": ("int64(group) * n + first", "int64(first)"),
    "rows are weighted before the bias is added": (
        "(value * scale * term[0] + term[1]) * weight",
        "value * scale * term[0] * weight + term[1]",
    ),
    "scales of x are not gathered": ("x_row = inputs.row_indices[x_row]", "pass"),
    "rows beyond the output are stored": ("y_row if y_row < inputs.y_rows else int32(-1)", "y_row"),
    "accumulation overwrites": ("v0 + int_as_float(a)", "v0"),
    "rows of the next group are stored": ("if below < rows:\n            y_row", "if True:\n            y_row"),
}


@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_wrong_options_are_rejected(what, device, monkeypatch):
    if not simulator.ENABLED:
        pytest.skip("some changes write out of bounds")
    made = changed_maker(mma_sync_kernel, "make_kernel", mma_sync_epilogue, *WRONG_OPTIONS[what])
    monkeypatch.setattr(launch, "gpu_of", lambda device: gpu_like((8, 0)))
    monkeypatch.setattr(launch, "_plans", {})
    monkeypatch.setattr(mma_sync_launch, "make_kernel", made)
    monkeypatch.setattr(mma_sync_launch, "get_mma_launcher", mma_sync_launch.get_mma_launcher.__wrapped__)
    assert is_rejected(lambda seed: options_mismatch("rowwise", device, n=32, k=64), seeds=1)
