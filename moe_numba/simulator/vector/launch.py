"""Choice of the engine: vectors of several blocks, of a block, or of a warp, or one greenlet per thread."""

import weakref

from moe_numba.simulator.core import scheduler
from moe_numba.simulator.core.settings import settings
from moe_numba.simulator.vector import fragment, functions, hopper, scoped
from moe_numba.simulator.vector.engine import Engine, VectorWorld
from moe_numba.simulator.vector.errors import Conflict
from moe_numba.simulator.vector.races import Repetition, check_judged

for _calls in (functions.CALLS, functions.NOTED_CALLS):
    _calls.update(fragment.VERSIONS | hopper.VERSIONS | scoped.VERSIONS)
functions.NAMES.update(fragment.NAMES | hopper.NAMES | scoped.NAMES)
functions.FACTORIES.update(fragment.FACTORIES)
_MOST_FAILURES = 2  # launches of a kernel that fall back before the vector engine is not tried any more
_failures = weakref.WeakKeyDictionary()  # kernel -> {(span, strict): number of failed launches}
SPANS = "blocks", "block", "warp"  # of a vector
fallbacks = {}  # name of a kernel -> why its last launch did not run on the vector engine


def possible():
    """Return whether the settings in force leave the choice of the engine open."""
    if settings["engine"] == "threads" or settings["preempt"] or settings["weak_memory"]:
        return False
    if settings["slow_warp"] is not None:
        return False
    return settings["events"] is None


def run(make_grids, with_threads, seed):
    """Run grids on the vector engine; if it gives up, restore memory and call `with_threads()`.

    `make_grids(world)` makes the grids of each rank, those of one rank in order: a dict of lists. Where data races are
    to be detected, the vector engine gives up whatever it cannot tell from a race, and threads report it.
    """
    repeat = Repetition(with_threads) if settings["races"] else None
    failed = attempt(make_grids, seed, repeat) if possible() else {}
    if failed is None:
        return
    with_threads()
    for key, kernels in failed.items():  # without an error: the kernel is correct
        for kernel in kernels:
            counts = _failures.setdefault(kernel, {})
            counts[key] = counts.get(key, 0) + 1


def attempt(make_grids, seed, repeat=None):
    """Try to run grids on the vector engine; return None if they have run, and else {attempt: kernels}.

    `repeat` receives what memory was before, if data races are to be detected.
    """
    reason, failed, strict, engine = None, {}, repeat is not None, None
    for span in SPANS:
        if engine is None:  # a span that does not suit the grids leaves them to the next one
            profile = settings["profile"] and settings["profile"].for_vectors()
            engine = Engine(strict, functions.NOTED_CALLS if profile else functions.CALLS, profile)
            engine.world = world = VectorWorld(engine, seed)
            streams = make_grids(world)
            grids = [grid for stream in streams.values() for grid in stream]
            kernels = {grid.kernel for grid in grids}
        if settings["engine"] != "vector" and any(_failed(k, span, strict) >= _MOST_FAILURES for k in kernels):
            continue
        if not all(_fits(grid, span) for grid in grids) or (span == "blocks" and profile):
            continue
        engine.span = span
        try:
            if strict:
                check_judged(streams)
            engine.prepare(grids)
            for rank, stream in streams.items():
                world.queued_grids[rank] = stream[1:]
            for stream in streams.values():
                world.add(stream[0])
            world.run()
            if strict:
                repeat.keep(engine.memory.regions)
                if grids[0].next_may_overlap_kernel_before:
                    repeat.keep_kernel_before(engine.last_kernel)
            scheduler.set_history(repeat if len(grids) == 1 else None)
            if profile:
                profile.commit()
            return None
        except Exception as error:
            engine.memory.restore()
            reason = f"{type(error).__name__}: {error}"
            failed[span, strict] = kernels
            last = span == "warp" or strict and isinstance(error, Conflict)  # to gangs of warps it is a conflict, too
            if last and settings["engine"] == "vector":
                raise
            if last:
                break
        finally:
            engine.close()
            engine = None
    if reason is not None:
        for kernel in kernels:
            fallbacks[kernel.__name__] = reason

    return failed


def _failed(kernel, span, strict):
    return _failures.get(kernel, {}).get((span, strict), 0)


def _fits(grid, span):
    """Return whether a span may suit a kernel."""
    if span == "warp":
        return True
    if grid.uses_async or grid.cluster_dim != (1, 1, 1):  # warps have different work, or wait for one another
        return False
    return span == "block" or len(grid.blocks) > 1 and grid.block_size % 32 == 0 and not grid.cooperative
