"""TMA: one thread issues a copy of a box of a tensor between global and shared memory, as a tensor map describes it.

Coordinates count elements, innermost first, and name the first element of the box. The innermost coordinate times the
element size must be a multiple of 16 bytes. A load may start before the tensor, a store must not; violations are
illegal instructions. A load fills elements outside the tensor with zeros, and a store skips them, except that it ends
rows at a multiple of 16 bytes: up to there it writes the box's bytes after a row's last element, over padding or a
neighbour.

A box in shared memory is aligned to 128 bytes, and to 1024 with a 128-byte swizzle (``cuda.shared.array(..., 1024)``).
A load's bytes, including zeros, are subtracted from the pending bytes of an mbarrier. Stores belong to bulk groups: see
``moe_numba.ptx.cp_async``.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction

_COORDINATES = {2: "x, y", 3: "x, y, z", 4: "x, y, z, w"}


def _load(rank, *, multicast=False, hint=False):
    """Make the load of a box of ``rank`` dimensions."""

    def simulate(array, offset, tensor_map, index, *more):
        coordinates, (barriers, barrier_index), more = more[:rank], more[rank : rank + 2], more[rank + 2 :]
        mask = int(more[0]) if multicast else None
        simulator.async_copy.load_box(array, offset, tensor_map, index, coordinates, barriers, barrier_index, mask)

    name = f"tma_load_{rank}d" + "_multicast" * multicast + "_hint" * hint
    more = ", mask" * multicast + ", policy" * hint
    modifiers = ".multicast::cluster" * multicast + ".L2::cache_hint" * hint
    simulate.__name__ = simulate.__qualname__ = name
    simulate.__doc__ = (
        f"``{name}(array, offset, tensor_map, index, {_COORDINATES[rank]}, barriers, barrier_index{more})``, "
        f"``cp.async.bulk.tensor.{rank}d.shared::cluster.global{modifiers}``: copy a box into shared memory."
        + multicast
        * (
            "\n\n    The box is written at the same offset in every block of the cluster whose rank is set in ``mask``,"
            "\n    and its bytes are reported to the barrier at the same offset there."
        )
        + hint * "\n\n    ``policy`` is an L2 eviction policy from ``createpolicy_evict_first`` or ``_last``."
    )
    box = ", ".join(f"${2 + i}" for i in range(rank))
    template = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers} "
        f"[$0], [$1, {{{box}}}], [${rank + 2}]" + "".join(f", ${rank + 3 + i}" for i in range(multicast + hint)) + ";"
    )
    operands = [SHARED, POINTER, *["s32"] * rank, SHARED, *["u16"] * multicast, *["u64"] * hint]
    return instruction(template, "void", *operands, simulate=simulate)


def _store(rank, *, add=False):
    """Make the store of a box of ``rank`` dimensions, or its addition to what global memory holds."""

    def simulate(tensor_map, index, *more):
        coordinates, (array, offset) = more[:rank], more[rank:]
        simulator.async_copy.store_box(tensor_map, index, coordinates, array, offset, add)

    name = f"tma_reduce_add_{rank}d" if add else f"tma_store_{rank}d"
    opcode = f"cp.reduce.async.bulk.tensor.{rank}d" if add else f"cp.async.bulk.tensor.{rank}d"
    action = "add a box in shared memory to a float32 tensor in global memory" if add else "copy a box to global memory"
    simulate.__name__ = simulate.__qualname__ = name
    simulate.__doc__ = (
        f"``{name}(tensor_map, index, {_COORDINATES[rank]}, array, offset)``, "
        f"``{opcode}.global.shared::cta{'.add' * add}``: {action}."
        + add * " Each element is added atomically and rounded once."
        + "\n\n    Threads that wrote the box must execute ``fence_proxy_async_shared``, then synchronize, before it."
    )
    box = ", ".join(f"${1 + i}" for i in range(rank))
    template = f"{opcode}.global.shared::cta{'.add' * add}.tile.bulk_group [$0, {{{box}}}], [${rank + 1}];"
    return instruction(template, "void", POINTER, *["s32"] * rank, SHARED, simulate=simulate)


tma_load_2d = _load(2)
tma_load_3d = _load(3)
tma_load_2d_hint = _load(2, hint=True)
tma_load_3d_hint = _load(3, hint=True)
tma_load_4d_hint = _load(4, hint=True)
tma_load_2d_multicast = _load(2, multicast=True)
tma_load_2d_multicast_hint = _load(2, multicast=True, hint=True)
tma_load_3d_multicast_hint = _load(3, multicast=True, hint=True)
tma_store_2d = _store(2)
tma_store_3d = _store(3)
tma_reduce_add_3d = _store(3, add=True)


def createpolicy_evict_first():
    """``createpolicy.fractional.L2::evict_first``: make the L2 policy for data that is read once."""
    return simulator.async_copy.EVICT_FIRST


def createpolicy_evict_last():
    """``createpolicy.fractional.L2::evict_last``: make the L2 policy for data that many blocks read."""
    return simulator.async_copy.EVICT_LAST


createpolicy_evict_first = instruction(
    "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "u64", simulate=createpolicy_evict_first, side_effect=False
)
createpolicy_evict_last = instruction(
    "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "u64", simulate=createpolicy_evict_last, side_effect=False
)
