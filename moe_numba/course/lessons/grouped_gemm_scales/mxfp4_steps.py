"""Steps of the grouped GEMM with MXFP4 weights: layouts of the weights, parts that decode them, and launches.

A step is the kernel of ``grouped_gemm/w4/kernel.py`` with other functions that load and decode a weight tile, 64
rows of weight by 64 elements of k. Its registers of A are numbered as in ``w4/packing.py``: register
``4 s + 2 h + r`` of lane l in warp w has the columns ``16 s + 8 h + 2 (l % 4)`` and the next one of row
``16 w + l // 4 + 8 r``.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.course.steps.instruction_mix import instruction_mix
from moe_numba.course.steps.simulate import changed_module
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.grouped_gemm.common.constants import SharedMemory
from moe_numba.grouped_gemm.w4 import kernel as w4_kernel
from moe_numba.grouped_gemm.w4.config import W4Config, select_w4_config
from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_block as decode_block
from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_tile, make_load_tile
from moe_numba.grouped_gemm.w4.launch import W4_SIGNATURE
from moe_numba.grouped_gemm.w4.layout import W4Layout
from moe_numba.grouped_gemm.w4.packing import SCALE_BYTES, TILE_BYTES
from moe_numba.grouped_gemm.w4.reference import E2M1, dequantise_mxfp4
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.mma import make_mma
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address, launch, launcher
from moe_numba.runtime.tensor_map import tensor_map_template

__all__ = [  # with the parts of the package that the notebook shows
    "E2M1",
    "PARTS",
    "StepLaunch",
    "decode_block",
    "definition",
    "dequantise_mxfp4",
    "instructions_per_tile",
    "launch_dequantise",
    "launch_products",
    "make_load_tile",
    "make_load_tile_by_bytes",
    "make_product_kernel",
    "make_step_kernel",
    "pack_fragments",
    "pack_rows",
]
DEQUANTISE_THREADS = 256
PRODUCT_THREADS = 512  # four warpgroups


# Layouts


def pack_rows(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack weights in tiles whose codes are in the order of rows; see :func:`pack_fragments`."""
    groups, n, bytes_of_k = blocks.shape
    codes = blocks.view(groups, n // TILE, TILE, bytes_of_k // 32, 32).transpose(2, 3)
    return _with_scales(codes, scales)


def pack_fragments(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack weights in tiles whose codes are in the order of wgmma's fragments: 16 consecutive bytes for each thread.

    Byte ``4 s + 2 h + r`` of a thread has the two codes of its register of that number.

    Parameters
    ----------
    blocks : tensor [groups, n, k / 2], uint8
        Two e2m1 codes per byte, the first in the low half. n and k are multiples of 64.
    scales : tensor [groups, n, k / 32], uint8
        Byte s is the scale 2**(s - 127).

    Returns
    -------
    tensor [groups, n / 64, k / 64, 2176], uint8
    """
    groups, n, bytes_of_k = blocks.shape
    # Dimensions: group, tile row, warp, r, row of 8, tile column, s, h, lane of 4
    codes = blocks.view(groups, n // TILE, 4, 2, 8, bytes_of_k // 32, 4, 2, 4)
    return _with_scales(codes.permute(0, 1, 5, 2, 4, 8, 6, 7, 3), scales)


def _with_scales(codes, scales):
    """Join codes [groups, tile rows, tile columns, ...] with scales, a word for a thread's two rows and 64 columns."""
    groups, n, blocks_of_k = scales.shape
    words = scales.view(groups, n // TILE, 4, 2, 8, blocks_of_k // 2, 2).permute(0, 1, 5, 2, 4, 3, 6)
    shape = groups, n // TILE, blocks_of_k // 2
    return torch.cat([codes.reshape(*shape, CODE_BYTES), words.reshape(*shape, SCALE_BYTES)], dim=-1)


# Loads of a weight tile


@cache
def make_load_tile_by_bytes(config, layout):
    """Make ``codes, scales = load_tile(smem, warp, lane, stage, tile)`` for tiles in the order of rows.

    The two codes of a register are one byte, in the row of 32 bytes that the register belongs to.
    """
    weight_offset, weight_bytes, stage_tiles = layout.weight_offset, layout.weight_bytes, config.stage_tiles

    @cuda.jit(device=True)
    def four_bytes(u8, first):
        """Load the codes of 16 columns in two rows, which are eight rows apart."""
        low = uint32(u8[uint32(first)]) | uint32(u8[uint32(first + 256)]) << uint32(8)
        high = uint32(u8[uint32(first + 4)]) | uint32(u8[uint32(first + 260)]) << uint32(8)
        return uint32(low | high << uint32(16))

    @cuda.jit(device=True)
    def load_tile(smem, warp, lane, stage, tile):
        first = int32(weight_offset + (warp >> 2) * (stage_tiles * TILE_BYTES))
        first = int32(first + stage * weight_bytes + tile * TILE_BYTES)
        scales = smem.i32[uint32((first + CODE_BYTES + 32 * (warp & 3)) // 4 + (lane >> 2))]
        first = int32(first + 32 * (16 * (warp & 3) + (lane >> 2)) + (lane & 3))
        codes = (
            four_bytes(smem.u8, first),
            four_bytes(smem.u8, int32(first + 8)),
            four_bytes(smem.u8, int32(first + 16)),
            four_bytes(smem.u8, int32(first + 24)),
        )
        return codes, scales

    return load_tile


# Decoding


@cuda.jit(device=True)
def value_of(code):
    """Return the number of an e2m1 code: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    exponent, mantissa = int32(code >> 1 & 3), int32(code & 1)
    doubled = mantissa if exponent == 0 else int32((2 | mantissa) << (exponent - 1))
    value = float32(doubled) * float32(0.5)
    return -value if code & 8 else value


@cuda.jit(device=True)
def decode_byte(byte, scale):
    """Return two bfloat16 numbers, the first in the low half."""
    return cvt_rn_bf16x2_f32(value_of(byte >> 4) * scale, value_of(byte & 15) * scale)


@cuda.jit(device=True)
def decode_step(word, scale_0, scale_1):
    """Decode a thread's four registers of A of one wgmma; ``scale_0`` and ``scale_1`` are of its two rows."""
    return (
        decode_byte(int32(word & uint32(255)), scale_0),
        decode_byte(int32(word >> uint32(8) & uint32(255)), scale_1),
        decode_byte(int32(word >> uint32(16) & uint32(255)), scale_0),
        decode_byte(int32(word >> uint32(24)), scale_1),
    )


@cuda.jit(device=True)
def decode_tile_by_value(codes, scales):
    """Decode a thread's 16 registers of A; ``scales`` has a byte for each of two rows and two blocks of 32 columns."""
    w_0, w_1, w_2, w_3 = codes
    a_0, a_1 = int_as_float(int32((scales & 255) << 23)), int_as_float(int32((scales >> 8 & 255) << 23))
    b_0, b_1 = int_as_float(int32((scales >> 16 & 255) << 23)), int_as_float(int32((scales >> 24 & 255) << 23))
    first = decode_step(uint32(w_0), a_0, b_0) + decode_step(uint32(w_1), a_0, b_0)
    return first + decode_step(uint32(w_2), a_1, b_1) + decode_step(uint32(w_3), a_1, b_1)


@cuda.jit(device=True)
def decode_nothing(codes, scales):
    """Return 16 registers without decoding: a kernel with it shows what decoding costs."""
    w_0, w_1, w_2, w_3 = codes
    four = uint32(w_0), uint32(w_1), uint32(w_2), uint32(w_3 ^ scales)
    return four + four + four + four


@cuda.jit
def dequantise(blocks, scales, weight, words):
    """Decode eight codes per thread to bfloat16; weight is [.., k] as 32-bit words of two numbers each."""
    i = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < words:
        word, scale = blocks[i], int_as_float(int32(scales[i >> 2]) << 23)
        a, b = decode_byte(word & 255, scale), decode_byte(word >> 8 & 255, scale)
        c, d = decode_byte(word >> 16 & 255, scale), decode_byte(word >> 24 & 255, scale)
        st_global_s32x4(weight, 4 * i, int32(a), int32(b), int32(c), int32(d))


def launch_dequantise(problem: Any) -> None:
    """Decode ``problem.blocks`` and ``problem.scales`` into ``problem.decoded``, bfloat16 [groups, n, k]."""
    words = problem.blocks.numel() // 4
    blocks, weight = problem.blocks.view(torch.int32), problem.decoded.view(torch.int32)
    grid = -(-words // DEQUANTISE_THREADS)
    launch(dequantise, grid, DEQUANTISE_THREADS, blocks, problem.scales, weight, words)


# Instructions


@cache
def make_tile_kernel(name):
    """Make a kernel that loads and decodes one weight tile, to count its instructions; it is not executed."""
    make_load, decode = {
        "bytes, by value": (make_load_tile_by_bytes, decode_tile_by_value),
        "16 bytes, by value": (make_load_tile, decode_tile_by_value),
        "16 bytes, shift and mask": (make_load_tile, decode_scaled_tile),
        "16 bytes, not decoded": (make_load_tile, decode_nothing),
    }[name]
    config = W4Config()
    load_tile = make_load(config, W4Layout(config))

    @cuda.jit
    def tile_kernel(out):
        u8, i32 = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024)
        smem = SharedMemory(u8, i32, cuda.shared.array(0, float32, 1024), cuda.shared.array(0, uint64, 1024))
        thread = int32(cuda.threadIdx.x)
        codes, scales = load_tile(smem, int32(thread >> 5), int32(thread & 31), int32(0), int32(0))
        a = decode(codes, scales)
        st_global_s32x4(out, 16 * thread, int32(a[0]), int32(a[1]), int32(a[2]), int32(a[3]))
        st_global_s32x4(out, 16 * thread + 4, int32(a[4]), int32(a[5]), int32(a[6]), int32(a[7]))
        st_global_s32x4(out, 16 * thread + 8, int32(a[8]), int32(a[9]), int32(a[10]), int32(a[11]))
        st_global_s32x4(out, 16 * thread + 12, int32(a[12]), int32(a[13]), int32(a[14]), int32(a[15]))

    return tile_kernel


def instructions_per_tile(names: Iterable[str], without: str) -> dict[str, dict[str, int]]:
    """Return a thread's SASS instructions for a weight tile by class, beyond those of the kernel ``without``.

    Names are those of `make_tile_kernel`, and classes those of `instruction_mix`, with the sum as "all".
    """
    kernels = {name: (f"make_tile_kernel({name!r})", ("int32*",), 256) for name in (*names, without)}
    mix = instruction_mix(kernels, [make_tile_kernel])
    found = {}
    for name in names:
        more = {key: mix[name].get(key, 0) - mix[without].get(key, 0) for key in mix[name] | mix[without]}
        found[name] = more | {"all": sum(more.values())}
    return found


# Time of a multiplication


@cache
def make_product_kernel(instruction, n):
    """Make a kernel that multiplies 64 x 16 by 16 x n matrices of ones, eight per warpgroup and iteration.

    ``instruction`` is "wgmma", with A in registers, or "mma.sync", with n 8 or 16. Each thread stores the mean
    of two elements of the sum.
    """
    ones, zeros = uint32(0x3F803F80), (np.float32(0),) * (n // 2)  # two bfloat16
    a, words_of_b, last = (ones,) * 16, n // 4, n // 2 - 1
    wgmma, wait, mma = make_wgmma_tile_rs(n, "bf16", 4), make_wgmma_wait(n, 0), make_mma("bf16", 16, n)
    by_wgmma, words = instruction == "wgmma", 32 * n  # of B

    @cuda.jit
    def product_kernel(out, iterations):
        u8, i32 = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024)
        for i in range(cuda.threadIdx.x, words, cuda.blockDim.x):
            i32[i] = int32(ones)
        fence_proxy_async_shared()
        cuda.syncthreads()
        # Loaded, so that the compiler does not know that all columns are equal.
        w_0, w_1, w_2, w_3 = ld_shared_s32x4(i32, int32(4 * (cuda.threadIdx.x & 31)))
        b, acc, other = (uint32(w_0), uint32(w_1), uint32(w_2), uint32(w_3))[:words_of_b], zeros, zeros
        for _ in range(iterations):
            if by_wgmma:
                descriptor = wgmma_descriptor(u8, int32(0))
                acc = wgmma(acc, a, descriptor)
                acc = wait(wgmma(acc, a, descriptor))
            else:
                for _ in range(4):
                    acc, other = mma(acc, a[:4], b), mma(other, a[:4], b)
        mean = float32(0.5) * (acc[0] + acc[last] + other[0] + other[last])
        out[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = mean

    return product_kernel


def launch_products(instruction: str, n: int, out: torch.Tensor, iterations: int, ctas: int) -> None:
    """Launch `make_product_kernel`; ``out`` is float32, one element for each of 512 threads of a CTA."""
    options = dict(shared_bytes=128 * n, cpp_entry=True)
    launch(make_product_kernel(instruction, n), ctas, PRODUCT_THREADS, out, iterations, **options)


# Kernels and launches


def make_step_kernel(config: W4Config, **parts: Any) -> tuple[Any, int]:
    """Return the package's kernel with other functions of these names, and its shared memory in bytes."""
    if not parts:
        return w4_kernel.make_kernel(config)
    module = changed_module(w4_kernel)
    for name, part in parts.items():
        if not hasattr(module, name):
            raise ValueError(f"{name!r} is not a name of {w4_kernel.__name__}")
        setattr(module, name, part)
    return module.make_kernel(config)


_WGMMA: dict[str, Any] = {"MMA_SYNC_ROWS": 0}  # also with few rows
# The package multiplies scales by a power of two, to stay within bfloat16's range, and undoes it in the epilogue.
_BY_VALUE = _WGMMA | {"decode_scaled_tile": decode_tile_by_value, "RESULT_EXPONENT": 0}
PARTS: dict[str, dict[str, Any]] = {
    "rows, by value": _BY_VALUE | {"make_load_tile": make_load_tile_by_bytes},
    "fragments, by value": _BY_VALUE,
    "not decoded": _WGMMA | {"decode_scaled_tile": decode_nothing},
    "rows, not decoded": _WGMMA | {"decode_scaled_tile": decode_nothing, "make_load_tile": make_load_tile_by_bytes},
    "shift and mask": _WGMMA,
}


def config_of(average: int) -> W4Config:
    """Return the configuration of the first steps for groups of ``average`` rows, with two consumer warpgroups.

    With four, ptxas reports that a step's registers do not suffice for wgmmas that run while the next tile is decoded.
    """
    config = select_w4_config("lengths", average)
    return config if config.warpgroups == 2 else config._replace(warpgroups=2, stages=11)


def make_kernel_of(config: W4Config, parts: str) -> Any:
    """Return the kernel with ``PARTS[parts]``."""
    return make_step_kernel(config, **PARTS[parts])[0]


def definition(average: int, parts: str, config: W4Config | None = None) -> KernelDefinition:
    """Return what `compile_ahead` needs to compile a step."""
    config = config or config_of(average)
    return KernelDefinition(make_kernel_of, (config, parts), W4_SIGNATURE, W4Layout(config).threads)


class StepLaunch:
    """Launches a variant of the MXFP4 kernel for problems of one shape.

    Parameters
    ----------
    problem : object
        With ``x`` (bfloat16), ``seqlens``, ``cu_seqlens``, ``out`` and ``average``, the rows per group.
    weight : str
        Name of the problem's packed weights, [groups, n / 64, k / 64, 2176].
    parts : str
        Key of ``PARTS``.
    config : W4Config, optional
        Configuration; by default that of `config_of`.

    Calling it with a problem returns ``problem.out``.
    """

    def __init__(self, problem: Any, weight: str, parts: str, config: W4Config | None = None):
        config = config or config_of(problem.average)
        (kernel, shared_bytes), self.threads = make_step_kernel(config, **PARTS[parts]), W4Layout(config).threads
        device, packed = problem.x.device, getattr(problem, weight)
        options = dict(launch_bounds=self.threads, shared_bytes=shared_bytes)
        self.start = launcher(kernel, W4_SIGNATURE, device.index or 0, dependent=True, **options)
        self.x_map = tensor_map_template(problem.x, (config.box_rows, TILE), swizzle=128, name="x")
        groups, rows, columns, _ = packed.shape
        self.sizes = groups, len(problem.x), 0, problem.out.shape[1], rows, columns
        self.weight, self.grid = weight, persistent_ctas(device)

    def __call__(self, problem: Any) -> torch.Tensor:
        """Launch the kernel on the current stream."""
        p, lengths = problem, address(problem.seqlens)
        pointers = map(address, (getattr(p, self.weight), p.out, p.seqlens, p.cu_seqlens))
        gather = address(p.x), lengths, len(p.x), 0, 2 * p.x.shape[1]  # unused, as the epilogue's pointers
        sizes = *self.sizes, *gather
        unused = *[lengths] * 3, len(p.x)  # of the epilogue
        self.start(self.grid, self.threads, None, self.x_map(p.x), *pointers, *sizes, *unused)
        return p.out
