"""Tile schedules of the hpc-ops port, computed on the host."""

from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import host


def schedule(name, tiles, n_tiles, blocks, schedulers=host):
    """Each CTA's tiles, (group, m, n), in order."""
    table, groups = list(tiles), len(tiles)
    if name == "vertical":
        table = [sum(tiles[:g]) for g in range(groups + 1)]
    schedules = []
    for block in range(blocks):
        tile, g, tiles_before, own = block, 0, 0, []
        while g < groups:
            g, tiles_before, m, n = getattr(schedulers, name)([-1, *table], 1, groups, n_tiles, tile, g, tiles_before)
            if g < groups:
                own.append((int(g), int(m), int(n)))
            tile += blocks
        schedules.append(own)
    return schedules
