"""The kernel that appends shared experts to a routing: a thread for each element of the result."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait


@cuda.jit(device=True)
def finish(word):
    """The finisher of MurmurHash3."""
    word = uint32(word ^ (word >> uint32(16)))
    word = uint32(word * uint32(0x85EBCA6B))
    word = uint32(word ^ (word >> uint32(13)))
    word = uint32(word * uint32(0xC2B2AE35))
    return uint32(word ^ (word >> uint32(16)))


@cache
def make_fuse_kernel(policy):
    """The kernel of one policy."""
    if policy == "all":

        @cuda.jit(device=True)
        def choose(token, column, shared, seed_low, seed_high):
            return int32(column)

    elif policy == "round_robin":

        @cuda.jit(device=True)
        def choose(token, column, shared, seed_low, seed_high):
            return int32(uint32(token) % uint32(shared))

    else:

        @cuda.jit(device=True)
        def choose(token, column, shared, seed_low, seed_high):
            word = finish(uint32(finish(uint32(uint32(token) ^ uint32(seed_low))) + uint32(seed_high)))
            return int32((uint64(word) * uint64(shared)) >> uint64(32))

    @cuda.jit
    def fuse_routing(
        topk_weights,
        topk_ids,
        weights,
        ids,
        elements,
        topk,
        width,
        num_experts,
        shared,
        seed_low,
        seed_high,
        shared_weight,
    ):
        griddepcontrol_wait()
        i = int32(cuda.grid(1))
        if i < elements:
            token = int32(uint32(i) // uint32(width))
            column = int32(i - token * width)
            source = int64(token) * topk
            if column < topk:
                weights[i] = topk_weights[source + column]
                ids[i] = topk_ids[source + column]
            else:  # a token whose first expert is -1 is padding
                padding = topk_ids[source] < 0
                expert = int32(num_experts + choose(token, int32(column - topk), shared, seed_low, seed_high))
                ids[i] = int32(-1) if padding else expert
                weights[i] = float32(0) if padding else shared_weight
        griddepcontrol_launch_dependents()

    return fuse_routing
