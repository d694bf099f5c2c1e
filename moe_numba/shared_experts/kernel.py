"""Kernel that appends shared experts to a routing, with one thread per output element."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.ptx.arithmetic import murmur3_finalizer
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime.validate import check_choice
from moe_numba.shared_experts.reference import POLICIES


@cache
def make_fuse_kernel(policy, ids_are_int64=False):
    """Make the kernel for a policy: "all", "round_robin" or "random"."""
    check_choice("policy", policy, POLICIES)
    if policy == "all":

        @cuda.jit(device=True)
        def choose_expert(token, column, num_shared, seed_low, seed_high):
            return int32(column)

    elif policy == "round_robin":

        @cuda.jit(device=True)
        def choose_expert(token, column, num_shared, seed_low, seed_high):
            return int32(uint32(token) % uint32(num_shared))

    else:

        @cuda.jit(device=True)
        def choose_expert(token, column, num_shared, seed_low, seed_high):
            word = murmur3_finalizer(
                uint32(murmur3_finalizer(uint32(uint32(token) ^ uint32(seed_low))) + uint32(seed_high))
            )
            return int32((uint64(word) * uint64(num_shared)) >> uint64(32))

    if ids_are_int64:

        @cuda.jit(device=True)
        def to_int32(expert):  # an id that int32 cannot hold is invalid, and must not wrap around to a valid one
            return int32(expert) if int64(int32(expert)) == expert else int32(-1)

    else:

        @cuda.jit(device=True)
        def to_int32(expert):
            return int32(expert)

    @cuda.jit
    def fuse_routing(
        topk_weights,
        topk_ids,
        weights,
        ids,
        num_elements,
        topk,
        width,
        num_experts,
        num_shared,
        seed_low,
        seed_high,
        shared_weight,
    ):
        griddepcontrol_wait()
        element = int32(cuda.grid(1))
        if element < num_elements:
            token = int32(uint32(element) // uint32(width))
            column = int32(element - token * width)
            routing_row = int64(token) * topk
            if column < topk:
                weights[element] = topk_weights[routing_row + column]
                ids[element] = to_int32(topk_ids[routing_row + column])
            else:  # a token with first id -1 is padding
                padding = topk_ids[routing_row] < 0
                expert = int32(
                    num_experts + choose_expert(token, int32(column - topk), num_shared, seed_low, seed_high)
                )
                ids[element] = int32(-1) if padding else expert
                weights[element] = float32(0) if padding else shared_weight
        griddepcontrol_launch_dependents()

    return fuse_routing
