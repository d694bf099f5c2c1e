"""TMA: one thread copies a box of a tensor between global and shared memory, as a tensor map describes it.

Coordinates count elements of the tensor, innermost first, and name the first element of the box. The innermost one, in
bytes, must be a multiple of 16; a load may begin before the tensor, a store may not (anything else is an illegal
instruction). Elements outside the tensor are loaded as zeros and are not stored, but a store ends rows only at a
multiple of 16 bytes: up to there it writes the box's bytes behind a row's last element, over padding or a neighbour. A
box in shared memory starts at a multiple of 128 bytes, and of 1024 with a 128-byte swizzle
(``cuda.shared.array(..., 1024)``). Its bytes, those of zeros too, count towards the phase of the barrier. Stores belong
to bulk groups: see ``moe_numba.ptx.cp_async``.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction

_WHERE = {2: "x, y", 3: "x, y, z"}


def _load(rank, *, multicast=False, hint=False):
    """The load of a box of so many dimensions."""

    def simulate(array, at, tensor_map, index, *more):
        coordinates, (barriers, barrier), more = more[:rank], more[rank : rank + 2], more[rank + 2 :]
        mask = int(more[0]) if multicast else None
        simulator.async_copy.load_box(array, at, tensor_map, index, coordinates, barriers, barrier, mask)

    name = f"tma_load_{rank}d" + "_multicast" * multicast + "_hint" * hint
    more = ", mask" * multicast + ", policy" * hint
    modifiers = ".multicast::cluster" * multicast + ".L2::cache_hint" * hint
    simulate.__name__ = simulate.__qualname__ = name
    simulate.__doc__ = (
        f"``{name}(array, at, tensor_map, index, {_WHERE[rank]}, barriers, barrier{more})``, "
        f"``cp.async.bulk.tensor.{rank}d.shared::cluster.global{modifiers}``: copy a box into shared memory."
        + multicast
        * (
            "\n\n    It arrives at the same place in every block of the cluster whose rank is set in ``mask``, and its"
            "\n    bytes are reported to the barrier at the same place there."
        )
        + hint
        * "\n\n    ``policy``, of ``createpolicy_evict_first`` or ``_last``, says how long the L2 cache keeps it."
    )
    box = ", ".join(f"${2 + i}" for i in range(rank))
    template = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers} "
        f"[$0], [$1, {{{box}}}], [${rank + 2}]" + "".join(f", ${rank + 3 + i}" for i in range(multicast + hint)) + ";"
    )
    operands = [SHARED, POINTER, *["s32"] * rank, SHARED, *["u16"] * multicast, *["u64"] * hint]
    return instruction(template, "void", *operands, simulate=simulate)


def _store(rank):
    """The store of a box of so many dimensions."""

    def simulate(tensor_map, index, *more):
        coordinates, (array, at) = more[:rank], more[rank:]
        simulator.async_copy.store_box(tensor_map, index, coordinates, array, at)

    simulate.__name__ = simulate.__qualname__ = f"tma_store_{rank}d"
    simulate.__doc__ = (
        f"``tma_store_{rank}d(tensor_map, index, {_WHERE[rank]}, array, at)``, "
        f"``cp.async.bulk.tensor.{rank}d.global.shared::cta``: copy a box out of shared memory.\n\n"
        "    What threads wrote there they must make visible with ``fence_proxy_async_shared`` and a barrier."
    )
    box = ", ".join(f"${1 + i}" for i in range(rank))
    template = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [$0, {{{box}}}], [${rank + 1}];"
    return instruction(template, "void", POINTER, *["s32"] * rank, SHARED, simulate=simulate)


tma_load_2d = _load(2)
tma_load_3d = _load(3)
tma_load_2d_hint = _load(2, hint=True)
tma_load_3d_hint = _load(3, hint=True)
tma_load_2d_multicast = _load(2, multicast=True)
tma_load_3d_multicast = _load(3, multicast=True)
tma_load_2d_multicast_hint = _load(2, multicast=True, hint=True)
tma_load_3d_multicast_hint = _load(3, multicast=True, hint=True)
tma_store_2d = _store(2)
tma_store_3d = _store(3)


def prefetch_tensormap(tensor_map, index):
    """``prefetch.tensormap``: bring a tensor map nearer, before its first use."""
    simulator.tensor_map.at(tensor_map, index)


def createpolicy_evict_first():
    """``createpolicy.fractional.L2::evict_first``: a policy for what is read once."""
    return simulator.async_copy.EVICT_FIRST


def createpolicy_evict_last():
    """``createpolicy.fractional.L2::evict_last``: a policy for what many blocks read."""
    return simulator.async_copy.EVICT_LAST


prefetch_tensormap = instruction("prefetch.tensormap [$0];", "void", POINTER, simulate=prefetch_tensormap)
createpolicy_evict_first = instruction(
    "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "u64", simulate=createpolicy_evict_first, side_effect=False
)
createpolicy_evict_last = instruction(
    "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "u64", simulate=createpolicy_evict_last, side_effect=False
)
