"""Kernel that finds the rows of each group from the group of each row (``m_indices``, as DeepGEMM takes it).

One CTA reads ``m_indices`` once. Where neighbouring rows have different groups, it records the end of one run of rows
and the start of another in shared memory. It writes each group's number of rows and first row, the ``lengths`` and
``starts`` of the grouped GEMM, which is the next launch. A group has the rows of its first run. A later run belongs to
no group, so that groups never overlap, whatever the indices are.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import MAX_GROUPS
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.outputs import remember
from moe_numba.runtime.workspace import workspace

THREADS = 1024
SIGNATURE = "int32*", "int32*", "int64", "int32"
_BATCH = 4  # rows that a thread loads at once, so that their latencies overlap
_NO_ROW = 0x7FFFFFFF


@cache
def make_group_starts_kernel(threads):
    """Make the kernel for one CTA. It writes ``groups`` lengths to ``sizes`` and then as many first rows."""

    @cuda.jit
    def group_starts(m_indices, sizes, rows, groups):
        first, end = cuda.shared.array(MAX_GROUPS, int32), cuda.shared.array(MAX_GROUPS, int32)
        current, following = cuda.local.array(_BATCH, int32), cuda.local.array(_BATCH, int32)
        thread = int32(cuda.threadIdx.x)
        g = thread
        while g < groups:
            first[uint32(g)] = int32(_NO_ROW)
            end[uint32(g)] = int32(_NO_ROW)
            g = int32(g + threads)
        cuda.syncthreads()
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        if thread == 0:
            group = uint32(m_indices[0])  # as unsigned, negative indices are larger than every group
            if group < uint32(groups):
                cuda.atomic.min(first, group, int32(0))
        base = int64(0)
        while base < rows:
            for b in range(_BATCH):
                row = int64(base + b * threads + thread)
                current[b] = m_indices[row] if row < rows else int32(-1)
                following[b] = m_indices[row + 1] if row + 1 < rows else int32(-1)
            for b in range(_BATCH):
                if current[b] != following[b]:
                    group, next_group = uint32(current[b]), uint32(following[b])
                    boundary = int32(base + b * threads + thread + 1)
                    if group < uint32(groups):
                        cuda.atomic.min(end, group, boundary)
                    if next_group < uint32(groups):
                        cuda.atomic.min(first, next_group, boundary)
            base += _BATCH * threads
        cuda.syncthreads()
        g = thread
        while g < groups:
            is_empty = first[uint32(g)] == int32(_NO_ROW)
            start = int32(0) if is_empty else first[uint32(g)]
            sizes[g] = int32(0) if is_empty else int32(end[uint32(g)] - start)
            sizes[int32(groups + g)] = start
            g = int32(g + threads)

    return group_starts


class GroupStarts:
    """Launches for ``rows`` rows, at least one, in ``groups`` groups."""

    def __init__(self, rows, groups, device):
        self.device, self.sizes = device.index or 0, (rows, groups)
        self.start = launcher(
            make_group_starts_kernel(THREADS), SIGNATURE, self.device, launch_bounds=THREADS, dependent=True
        )
        self._views: dict = {}

    def __call__(self, m_indices):
        """Launch the kernel; return the lengths and first rows, in a workspace of the current stream."""
        groups = self.sizes[1]
        memory = workspace(self.device, 2 * groups, "group_starts")
        self.start(1, THREADS, None, address(m_indices), address(memory), *self.sizes)
        key = memory.data_ptr()
        views = self._views.get(key)
        return views or remember(self._views, key, (memory[:groups], memory[groups : 2 * groups]))
