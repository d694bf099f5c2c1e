"""The compute capability that PTX instructions need, from the target notes of the PTX ISA, and the one compiled for."""

import contextlib
import contextvars

OLDEST = (7, 5)  # the oldest GPUs that CUDA 13 compiles for

# Parts of an instruction's text, newest GPUs first: the first entry with a part that occurs in the text decides.
_NEEDED = {
    (9, 0): (
        *("griddepcontrol", "barrier.cluster", "shared::cluster", "%cluster_", "mapa", "async.bulk", "elect.sync"),
        *("mbarrier.try_wait", "expect_tx", "mbarrier_init", "fence.proxy.async", "fence.proxy.tensormap"),
        *("tensormap.", "setmaxnreg", "wgmma", "stmatrix", "add.rn.bf16x2", "mul.rn.bf16x2"),
    ),
    (8, 9): ("e4m3",),
    (8, 0): (
        *("redux.sync", "cp.async", "mbarrier.", "bf16", "createpolicy", "L2::cache_hint", "L2::256B"),
        "mma.sync.aligned.m16n8k16",
    ),
}


def needed_by(ptx):
    """Return the least compute capability, (major, minor), that has the instructions in a text."""
    return next((needed for needed, parts in _NEEDED.items() if any(part in ptx for part in parts)), OLDEST)


_COMPILING_FOR = contextvars.ContextVar("the architecture that `runtime.compile` compiles for", default=None)


@contextlib.contextmanager
def compiling_for(arch):
    """Let `compiled_for` return this compute capability, while a compiler runs."""
    token = _COMPILING_FOR.set(arch)
    try:
        yield
    finally:
        _COMPILING_FOR.reset(token)


def compiled_for():
    """Return the compute capability, (major, minor), that is compiled for: by default that of the current device."""
    arch = _COMPILING_FOR.get()
    if arch is None:
        from numba import cuda

        arch = cuda.get_current_device().compute_capability
    return tuple(arch)[:2]
