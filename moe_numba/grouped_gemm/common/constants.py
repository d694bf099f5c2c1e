"""Sizes that all grouped GEMM kernels share: tiles, warps, scale blocks and limits of a problem."""

from typing import Any, NamedTuple

import torch

BLOCK_N = 128  # rows of weight in a tile
BLOCK_K_BYTES = 128  # bytes of k in a stage: one row of the 128-byte swizzle, four wgmma k-steps
CONSUMER_WARPS = 8  # two warpgroups that issue wgmma; each computes 64 of a tile's 128 rows of weight
WARPS = CONSUMER_WARPS + 4  # and one producer warpgroup
THREADS = 32 * WARPS
AUX_PRODUCER_WARPS = 3  # producer warps that load scales or gathered rows, round-robin over the stages
EPILOGUE_ROWS = 16  # rows of y that one epilogue buffer holds
EPILOGUE_BYTES = 2 * EPILOGUE_ROWS * BLOCK_K_BYTES  # a consumer warpgroup's two epilogue buffers
PACKED_SCALES = 4  # exponents in an int32, see `block_scales.py`
MAX_GROUPS = 512
MAX_TILES = (1 << 31) - 1  # of a launch
ALPHA, LIMIT = 1.702, 7.0  # of "swigluoai", as in gpt-oss
MAX_AVERAGE = 1 << 20  # rows per group; more make no difference
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}  # of a bias and of results


class SharedMemory(NamedTuple):
    """Typed views of the dynamic shared memory of a CTA; all begin at the same address."""

    u8: Any
    i32: Any
    f32: Any
    barriers: Any  # uint64


MAX_SHARED_BYTES = 227 * 1024  # per CTA on a Hopper GPU
