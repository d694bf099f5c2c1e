"""Occupancy: how many blocks of a kernel an SM holds, and what limits it."""

from typing import NamedTuple

_WARPS_ALLOCATED_TOGETHER = 4  # one per SM sub-partition
_REGISTERS_PER_WARP = 256  # allocation unit
_SHARED_UNIT = 128  # allocation unit in bytes


class GPUProperties(NamedTuple):
    """Limits of a GPU's SMs."""

    name: str
    capability: tuple[int, int]
    sm_count: int
    warps: int = 64  # of an SM
    blocks: int = 32
    registers: int = 65536
    shared_bytes: int = 228 * 1024
    reserved_shared_bytes: int = 1024  # of each block, for the system


# CUDA Programming Guide, "Technical Specifications per Compute Capability".
_LIMITS = {
    (7, 5): dict(warps=32, blocks=16, shared_bytes=64 * 1024, reserved_shared_bytes=0),
    (8, 0): dict(shared_bytes=164 * 1024),
    (8, 6): dict(warps=48, blocks=16, shared_bytes=100 * 1024),
    (8, 7): dict(warps=48, blocks=16, shared_bytes=164 * 1024),
    (8, 9): dict(warps=48, blocks=24, shared_bytes=100 * 1024),
    (12, 0): dict(warps=48, blocks=24, shared_bytes=100 * 1024),
}
_GPUS = {
    "H200": ((9, 0), 132),
    "H100": ((9, 0), 132),
    "A100": ((8, 0), 108),
    "B200": ((10, 0), 148),
    "L4": ((8, 9), 58),
    "T4": ((7, 5), 40),
    "RTX 4090": ((8, 9), 128),
}


def gpu_properties(gpu) -> GPUProperties:
    """Return the properties of a GPU by its name, or of an object with `capability` and `sm_count`."""
    if isinstance(gpu, GPUProperties):
        return gpu
    if isinstance(gpu, str):
        if gpu not in _GPUS:
            raise ValueError(f"gpu is {gpu!r}; it must be one of {', '.join(_GPUS)}, or an object with its properties")
        name, (capability, sm_count) = gpu, _GPUS[gpu]
    else:
        try:
            name, capability, sm_count = getattr(gpu, "name", "a GPU"), tuple(gpu.capability), gpu.sm_count
        except AttributeError as error:
            raise TypeError(f"gpu is {gpu!r}; it must be a name, or have capability and sm_count") from error
    return GPUProperties(name, capability, sm_count, **_LIMITS.get(capability, {}))


class Occupancy(NamedTuple):
    """Blocks of a kernel that an SM holds at once."""

    blocks_per_sm: int
    limited_by: list[str]  # of "warps", "blocks", "registers" and "shared memory"
    warps_per_sm: int
    share: float  # of the SM's warps
    resident_blocks: int  # on all SMs
    all_resident: bool  # whether the whole grid runs at once, as blocks that wait for one another need


def occupancy(gpu, block_threads, grid_blocks, registers, shared_bytes) -> Occupancy:
    """Return the occupancy of a launch.

    Parameters
    ----------
    gpu : GPUProperties
    block_threads, grid_blocks : int
    registers : int or None
        Per thread; None if not known, and then not a limit.
    shared_bytes : int
        Static and dynamic, per block.
    """
    warps = -(-block_threads // 32)
    limits = {"warps": gpu.warps // warps, "blocks": gpu.blocks}
    if registers is not None:
        per_warp = -(-registers * 32 // _REGISTERS_PER_WARP) * _REGISTERS_PER_WARP
        fitting = gpu.registers // per_warp // _WARPS_ALLOCATED_TOGETHER * _WARPS_ALLOCATED_TOGETHER
        limits["registers"] = fitting // warps
    if shared_bytes + gpu.reserved_shared_bytes:
        allocated = -(-(shared_bytes + gpu.reserved_shared_bytes) // _SHARED_UNIT) * _SHARED_UNIT
        limits["shared memory"] = gpu.shared_bytes // allocated
    blocks = min(limits.values())
    resident = blocks * gpu.sm_count
    return Occupancy(
        blocks,
        [name for name, limit in limits.items() if limit == blocks],
        blocks * warps,
        blocks * warps / gpu.warps,
        resident,
        grid_blocks <= resident,
    )
