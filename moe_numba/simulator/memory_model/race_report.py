"""Error messages for data races: both accesses with source lines and threads, the memory, and what is missing."""

import ast
import functools
import inspect
import textwrap

from moe_numba.simulator.core.errors import DataRace, MissingFence, line_of, location_of


def data_race(earlier, later, where):
    """Return the error for two accesses that nothing orders."""
    return DataRace(
        f"{_describe(later)} {where}, which {_describe(earlier, relative=True)}; "
        f"nothing orders the two: {_remedy(earlier, later)}"
    )


def missing_proxy_fence(earlier, later, where):
    """Return the error for a copy through the async proxy with no proxy fence before it."""
    return MissingFence(
        f"{_describe(later)} {where}, which "
        f"{_describe(earlier, relative=True)}; no proxy fence lies between the two: "
        f"the thread that issues the copy needs fence_proxy_async after it has acquired"
    )


def _describe(access, relative=False):
    verb = ("wrote" if access.writes else "read") if relative else ("writes" if access.writes else "reads")
    what = f"{access.thread}"
    if access.operation is not None:
        what += f" with {access.operation.what}"
    elif access.scope:
        what += f" with a strong access of {access.scope} scope"
    place = location_of(access.code, access.instruction)
    return f"{what} at {place} {verb}" if relative else f"{what}, at {place}, {verb}"


def _remedy(earlier, later):
    """Return what would order the two accesses."""
    if earlier.operation is not None:
        return f"{earlier.operation.remedy}, then let other threads know (a barrier, or release and acquire)"
    ordering = _ordering(earlier.thread, later.thread)
    if _may_update(earlier, later):
        return f"if threads update one element here, it needs an atomic operation; otherwise, {ordering}"
    return ordering


def _may_update(a, b):
    """Return whether two accesses are those of threads that update one element: in one line, or by one index in two."""
    if a.code is not b.code:
        return False
    lines = [line_of(each.code, each.instruction) for each in (a, b)]
    if lines[0] == lines[1]:
        return True
    if a.writes == b.writes:
        return False
    read, written = lines if b.writes else lines[::-1]
    loaded, stored = _elements(a.code)
    return read < written and bool(loaded.get(read, set()) & stored.get(written, set()))


@functools.lru_cache
def _elements(code):
    """Return the elements, such as "cumsum[e]", that a function loads and stores: line -> texts."""
    loaded, stored = {}, {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return loaded, stored
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            found = loaded if isinstance(node.ctx, ast.Load) else stored
            line = node.lineno + code.co_firstlineno - 1
            found.setdefault(line, set()).add(ast.unparse(ast.Subscript(node.value, node.slice, ast.Load())))
    return loaded, stored


def _ordering(a, b):
    """Return what orders accesses of two threads."""
    if a.grid is not b.grid and a.grid.rank == b.grid.rank:
        if between := a.grid.overlapped_by:
            return (
                f"kernel {b.grid.name} may overlap kernel {a.grid.name}, since kernel {between} let it start before it "
                f"had itself waited: {between} needs griddepcontrol_wait before griddepcontrol_launch_dependents"
            )
        return (
            f"kernel {b.grid.name} is launched to overlap the kernel before it, {a.grid.name}: "
            "it needs griddepcontrol_wait first"
        )
    if a.block is b.block:
        if a.warp == b.warp:
            return "between lanes of a warp it needs cuda.syncwarp, or a barrier of the block, between the two accesses"
        return "between warps of a block it needs cuda.syncthreads or another barrier, between the two accesses"
    if a.block.cluster is b.block.cluster:
        return "between blocks of a cluster it needs the cluster barrier, or release and acquire at cluster scope"
    if a.grid.rank == b.grid.rank:
        return "between blocks it needs release and acquire at gpu scope (or fences), or the barrier of the grid"
    return "between ranks it needs release and acquire at sys scope (or fences)"
