"""Matrices of 8 rows of 16 bytes, which a warp moves between its registers and shared memory.

Lane ``8 i + r`` names row ``r`` of matrix ``i`` by (array, index), a multiple of 16 bytes. In registers, lane ``l`` has
from each matrix one word, two 16-bit elements: row ``l // 4``, columns ``2 (l % 4)`` (its low half) and the next one.
With ``_trans`` it has column ``l // 4`` and those two rows instead. That layout is the one in which ``wgmma`` gives its
results. All lanes of the warp must come.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction


def _stmatrix(count, trans):
    def simulate(array, index, *words):
        simulator.matrix.store(array, index, words, trans)

    name = f"stmatrix_x{count}" + "_trans" * trans
    simulate.__name__ = simulate.__qualname__ = name
    registers = ", ".join(f"r{i}" for i in range(count))
    variant = f"x{count}" + ".trans" * trans
    simulate.__doc__ = (
        f"``{name}(array, index, {registers})``, ``stmatrix.sync.aligned.m8n8.{variant}.shared.b16``: "
        f"store {count} matri{'x' if count == 1 else 'ces'}."
    )
    template = (
        f"stmatrix.sync.aligned.m8n8.{variant}.shared.b16 [$0], {{{', '.join(f'${1 + i}' for i in range(count))}}};"
    )
    return instruction(template, "void", SHARED, *["u32"] * count, simulate=simulate)


def _ldmatrix(count, trans):
    def simulate(array, index):
        return simulator.matrix.load(array, index, count, trans)

    name = f"ldmatrix_x{count}" + "_trans" * trans
    simulate.__name__ = simulate.__qualname__ = name
    variant = f"x{count}" + ".trans" * trans
    simulate.__doc__ = (
        f"``{name}(array, index)``, ``ldmatrix.sync.aligned.m8n8.{variant}.shared.b16``: load {count} matrices."
    )
    registers = ", ".join(f"${i}" for i in range(count))
    template = f"ldmatrix.sync.aligned.m8n8.{variant}.shared.b16 {{{registers}}}, [${count}];"
    return instruction(template, f"u32 x {count}", SHARED, simulate=simulate)


stmatrix_x1, stmatrix_x1_trans = _stmatrix(1, False), _stmatrix(1, True)
stmatrix_x2, stmatrix_x2_trans = _stmatrix(2, False), _stmatrix(2, True)
stmatrix_x4, stmatrix_x4_trans = _stmatrix(4, False), _stmatrix(4, True)
ldmatrix_x2, ldmatrix_x2_trans = _ldmatrix(2, False), _ldmatrix(2, True)
ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(4, False), _ldmatrix(4, True)
