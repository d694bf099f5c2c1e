"""One main-loop step of a GEMM in CUDA C++; see ``moe_numba.ptx.wgmma`` for its instructions."""

from moe_numba import simulator
from moe_numba.ptx.cuda_cpp import declared
from moe_numba.ptx.wgmma import wgmma_descriptor

_N, _RESULTS = 64, 32


def wgmma_step_m64n64k128_e4m3(acc, array, a_offset, b_offset, accumulate):
    """Fence, four ``wgmma.mma_async.m64n64k32``, commit and wait: ``acc = accumulate * acc + A B^T``.

    ``acc`` is a pointer to a thread's 32 floats, ``ffi.from_buffer(cuda.local.array(32, float32))``. The tiles are 64
    rows of 128 bytes each, 128-byte swizzled, at bytes ``a_offset`` and ``b_offset`` of
    ``array``. All threads of a warpgroup must execute it.
    """
    old = tuple(acc[i] for i in range(_RESULTS)) if accumulate else None
    a, b = int(wgmma_descriptor(array, a_offset)), int(wgmma_descriptor(array, b_offset))
    pending = simulator.wgmma.multiply(_N, "e4m3", a, b, old, steps=4)
    new = simulator.wgmma.wait(0, pending)
    for i in range(_RESULTS):
        acc[i] = new[i]


wgmma_step_m64n64k128_e4m3 = declared(
    "cu_wgmma_step_m64n64k128_e4m3",
    "wgmma",
    "float32*",
    "uint8*",
    "int32",
    "int32",
    "int32",
    simulate=wgmma_step_m64n64k128_e4m3,
)
