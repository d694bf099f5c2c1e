"""The compute capability that PTX instructions need, from the target notes of the PTX ISA."""

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
