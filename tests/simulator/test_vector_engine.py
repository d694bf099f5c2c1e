"""The vector engine: the same results as with one greenlet per thread, and a fall-back wherever it cannot be sure."""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from moe_numba import simulator
from moe_numba.ptx.arithmetic import add_rn_bf16x2
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.profiler.counters import is_barrier
from moe_numba.simulator.vector import engine as vector_engine
from moe_numba.simulator.vector import functions, launch
from moe_numba.simulator.vector.errors import Unsupported

FULL = 0xFFFFFFFF
pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")


def run(kernel, engine, grid, block, *args):
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    with override_settings(engine=engine):
        kernel[grid, block](*copies)
    return [a for a in copies if isinstance(a, np.ndarray)]


def check(kernel, grid, block, *args):
    """Run a kernel on both engines, and compare all arrays bit for bit; with a profile too, and what it counts."""
    given = run(kernel, "vector", grid, block, *args)
    profiles = []
    for engine in ("threads", "vector"):
        with simulator.profile() as profile:
            found = run(kernel, engine, grid, block, *args)
        for a, b in zip(given, found, strict=True):
            assert a.tobytes() == b.tobytes()
        profiles.append(profile.as_dict()["kernels"][0])
    for line in (line for profile in profiles for line in profile["lines"]):  # how often a thread polls is not fixed
        line["waits"] = {name: count for name, count in line["waits"].items() if is_barrier(name)}
    by_line = [{(line["file"], line["line"]): line for line in profile["lines"]} for profile in profiles]
    for place in by_line[0].keys() | by_line[1].keys():
        assert by_line[0].get(place) == by_line[1].get(place), place
    assert profiles[0]["critical_path"] == profiles[1]["critical_path"]


@cuda.jit
def loops(x, out, n):
    i = cuda.grid(1)
    if i >= n:
        return
    total, steps = int32(0), 0
    for k in range(x[i] % 7):
        if k == 3:
            continue
        if x[i] % 5 == k:
            break
        total += int32(k * x[i])
        steps += 1
    j = x[i]
    while j > 1 and steps < 40:
        j = j // 2 if j % 2 == 0 else 3 * j + 1
        steps += 1
        if j == 10:
            break
    out[i] = total + int32(1000 * steps)


@cuda.jit(device=True)
def several_returns(a, b):
    if a > b:
        return a - b, 1
    for k in range(5):
        if a + k == b:
            return k, 2
    return int32(-1), 3


@cuda.jit
def calls(x, out):
    i = cuda.threadIdx.x
    a, b = x[i], x[(i + 1) % cuda.blockDim.x]
    value, kind = several_returns(a, b)
    last = max(value, int32(0)) if 0 < a < 50 and (b > 3 or kind == 2) else int32(-5)
    out[i] = last + 100 * kind


@cuda.jit
def local_arrays(x, out):
    i = cuda.threadIdx.x
    values, grid = cuda.local.array(4, int32), cuda.local.array((2, 3), float32)
    for k in range(4):
        values[k] = int32(x[i] + k)
    for a in range(2):
        row = grid[a]
        for b in range(3):
            row[b] = float32(a * b)
    values[x[i] & 3] = int32(-7)
    if x[i] % 2:
        values[0] = int32(values[x[i] % 4] * 2)
    out[i] = values[0] + values[1] * values[2] + int32(grid[1, x[i] % 3])


@cuda.jit
def python_numbers(x, out):
    i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    mask = (1 << (i & 31)) - 1
    half = i / 2 if i % 3 else 1.5
    out[i] = float32(half) + float32(mask % 1000) + float32(uint32(7) >> (i & 3)) + float32(-i // 4) + float32(x[i])


@cuda.jit
def warp_operations(x, out):
    t = cuda.threadIdx.x
    lane, value = t & 31, x[t]
    total = value
    for d in range(5):
        total += cuda.shfl_xor_sync(FULL, total, 1 << d)
    above = cuda.shfl_down_sync(FULL, value, 3)
    chosen = cuda.shfl_sync(FULL, value, (lane * 7) % 32)
    votes = cuda.ballot_sync(FULL, value % 3 == 0)
    same = cuda.match_any_sync(FULL, value % 4)
    if t < 64:
        total += cuda.popc(uint32(cuda.ballot_sync(FULL, value > 10)))
    if lane < 8:
        chosen += cuda.shfl_xor_sync(0xFF, value, 1)
    everywhere = cuda.all_sync(FULL, value >= 0)
    out[t] = total + 3 * above + 5 * chosen + int32(votes) + int32(same) + int32(everywhere) + cuda.clz(uint32(value))


@cuda.jit
def block_operations(x, out):
    t = cuda.threadIdx.x
    counts = cuda.shared.array(8, int32)
    if t < 8:
        counts[t] = 0
    cuda.syncthreads()
    cuda.atomic.add(counts, x[t] & 7, 1)
    many = cuda.syncthreads_count(x[t] > 20)
    out[t] = counts[t & 7] + int32(100 * many) + int32(1000 * cuda.syncthreads_or(x[t] == 3))
    cuda.atomic.max(out, 96, int32(5))


@cuda.jit
def last_block_sums(x, partial, done, out):
    """The last block, as an atomic counter says, adds the sums of all blocks."""
    b, t = cuda.blockIdx.x, cuda.threadIdx.x
    if t == 0:
        total = int32(0)
        for k in range(32):
            total += x[b * 32 + k]
        partial[b] = total
        cuda.threadfence()
        if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            cuda.threadfence()
            total = int32(0)
            for k in range(cuda.gridDim.x):
                total += partial[k]
            out[0] = total


@cuda.jit
def enumerations(x, out):
    i = cuda.threadIdx.x
    total = int32(0)
    for k, (a, b) in enumerate(zip((x[i], x[i] + int32(1)), (int32(3), x[0]))):
        total += int32(k + a * b)
    out[i] = total


@cuda.jit
def packed_sums(x, out):
    i = cuda.threadIdx.x
    out[i] = int32(add_rn_bf16x2(uint32(x[i]) << uint32(7), uint32(0x3F803F80)))


@cuda.jit
def store_numbers(out):
    i = cuda.threadIdx.x
    out[i] = 0.1 if i == 3 else 2.5
    out[32] = 0.1
    out[33] = True


@cuda.jit
def transpose(x, out):
    tile = cuda.shared.array((8, 9), int32)
    a, b = cuda.threadIdx.x, cuda.threadIdx.y
    tile[b, a] = x[cuda.blockIdx.y * 8 + b, cuda.blockIdx.x * 8 + a]
    cuda.syncthreads()
    out[cuda.blockIdx.x * 8 + b, cuda.blockIdx.y * 8 + a] = tile[a, b]


X = np.arange(96, dtype=np.int32) * 37 % 101


@pytest.mark.parametrize("block", [32, 96, 40])
@pytest.mark.parametrize("kernel", [calls, local_arrays], ids=lambda k: k.__name__)
def test_control_flow_of_diverging_lanes(kernel, block):
    check(kernel, 1, block, X, np.zeros(96, np.int32))


def test_loops_that_lanes_leave_at_different_times():
    check(loops, 3, 32, X, np.zeros(96, np.int32), 90)


def test_python_numbers_take_the_type_of_numpy_numbers():
    check(python_numbers, 3, 32, X, np.zeros(96, np.float32))


def test_warp_operations():
    check(warp_operations, 1, 96, X, np.zeros(96, np.int32))


@pytest.mark.parametrize("seed", range(3))
def test_block_operations(seed):
    with simulator.seed(seed):
        check(block_operations, 1, 96, X, np.zeros(97, np.int32))
        check(last_block_sums, 3, 32, X, np.zeros(3, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))


def test_two_dimensions():
    x = np.arange(16 * 24, dtype=np.int32).reshape(16, 24)
    check(transpose, (3, 2), (8, 8), x, np.zeros((24, 16), np.int32))


@pytest.mark.parametrize("block", [1, 2, 32])
@pytest.mark.parametrize("kernel", [enumerations, packed_sums], ids=lambda k: k.__name__)
def test_functions_of_several_values(kernel, block):
    check(kernel, 1, block, X, np.zeros(96, np.int32))


def test_lanes_are_no_elements_of_an_array():
    """The package's own functions make arrays of registers: those of two lanes would look like two registers."""
    with pytest.raises(Unsupported):
        functions.CALLS[np.array](None, [np.arange(2)], np.uint32)


def test_python_numbers_are_stored():
    check(store_numbers, 1, 32, np.zeros(34, np.float32))


@pytest.mark.parametrize("cast, table", [(int32, (0, 1)), (uint32, (0, 2)), (int32, np.array([4, 5]))])
def test_configs_share_the_transformed_code(cast, table):
    """Closures of one code object, with another type and with a value that has no hash."""

    def factory(cast, table):
        @cuda.jit
        def kernel(x, out):
            i = cuda.threadIdx.x
            out[i] = float32(cast(x[i] - 50)) + float32(table[1])

        return kernel

    check(factory(cast, table), 1, 32, X, np.zeros(32, np.float32))


# Kernels that the engine must give up, each with a different answer under another order, or an error


@cuda.jit
def missing_syncthreads(out):
    t = cuda.threadIdx.x
    s = cuda.shared.array(64, int32)
    s[t] = t
    out[t] = s[63 - t]


@cuda.jit
def missing_second_syncthreads(out):
    t = cuda.threadIdx.x
    s = cuda.shared.array(64, int32)
    s[t] = t
    cuda.syncthreads()
    value = s[63 - t]
    s[t] = -value
    cuda.syncthreads()
    out[t] = s[t] + value


@cuda.jit
def missing_syncwarp(out):
    t = cuda.threadIdx.x
    s = cuda.shared.array(64, int32)
    s[t] = t
    out[t] = s[t ^ 1]


@cuda.jit
def syncwarp_for_syncthreads(out):
    t = cuda.threadIdx.x
    s = cuda.shared.array(64, int32)
    s[t] = t
    cuda.syncwarp()
    out[t] = s[63 - t]


@cuda.jit
def all_write(out):
    out[0] = cuda.threadIdx.x


@cuda.jit
def blocks_write(out):
    if cuda.threadIdx.x == 0:
        out[0] = cuda.blockIdx.x


@cuda.jit
def blocks_read(out):
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = out[1 - cuda.blockIdx.x] + 1


@cuda.jit
def plain_beside_atomic(out):
    cuda.atomic.add(out, 0, 1)
    out[cuda.threadIdx.x + 1 & 63] = out[0]


@cuda.jit
def out_of_bounds(out):
    out[cuda.threadIdx.x + 1] = 1


@cuda.jit
def negative_index(out):
    if out[cuda.threadIdx.x - 1] == 0:
        cuda.syncwarp()


@cuda.jit
def unbound(out):
    if cuda.threadIdx.x < 5:
        value = 1
    out[cuda.threadIdx.x] = value


@cuda.jit
def diverging_barrier(out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    cuda.syncthreads()
    out[cuda.threadIdx.x] = 1


@cuda.jit
def missing_lane(out):
    if cuda.threadIdx.x & 31 < 16:
        out[cuda.threadIdx.x] = cuda.shfl_xor_sync(FULL, 1, 1)


@cuda.jit
def endless(out):
    while cuda.atomic.add(out, 0, 0) == 0:
        pass


RACES = [missing_syncthreads, missing_second_syncthreads, missing_syncwarp, syncwarp_for_syncthreads, all_write]
RACES += [blocks_write, blocks_read, plain_beside_atomic]
ERRORS = [out_of_bounds, negative_index, unbound, diverging_barrier, missing_lane, endless]


@pytest.mark.parametrize("kernel", RACES + ERRORS, ids=lambda k: k.__name__)
def test_the_vector_engine_gives_up_wrong_kernels(kernel):
    with pytest.raises(Exception) as found:
        run(kernel, "vector", 2 if kernel.__name__.startswith("blocks") else 1, 64, np.zeros(64, np.int32))
    assert isinstance(found.value, (Unsupported, IndexError, simulator.SimulatorError))


@pytest.mark.parametrize("kernel", RACES, ids=lambda k: k.__name__)
def test_results_of_races_are_those_of_threads_with_the_same_seed(kernel):
    grid = 2 if kernel.__name__.startswith("blocks") else 1
    for seed in range(5):
        with simulator.seed(seed):
            expected = run(kernel, "threads", grid, 64, np.zeros(64, np.int32))
            assert (run(kernel, "either", grid, 64, np.zeros(64, np.int32))[0] == expected[0]).all()


@pytest.mark.parametrize("kernel", ERRORS, ids=lambda k: k.__name__)
def test_errors_are_those_of_threads(kernel):
    messages = []
    for engine in ("threads", "either"):
        with pytest.raises(Exception) as found:
            run(kernel, engine, 1, 64, np.zeros(64, np.int32))
        messages.append((type(found.value), str(found.value)))
    assert messages[0] == messages[1]


def test_memory_is_restored_before_the_kernel_runs_again():
    @cuda.jit
    def increments_then_races(x, out):
        t = cuda.threadIdx.x
        x[t] += 1
        out[0] = t

    x, out = np.zeros(64, np.int32), np.zeros(1, np.int32)
    with override_settings(engine="either"):
        increments_then_races[1, 64](x, out)
    assert (x == 1).all()


def test_settings_that_need_threads():
    with override_settings(engine="vector"), simulator.trace() as events:
        warp_operations[1, 32](X, np.zeros(96, np.int32))
    assert events


# Vectors of several blocks


@cuda.jit
def plane(x, out):
    a, b = cuda.grid(2)
    if a < out.shape[0] and b < out.shape[1]:
        local = cuda.local.array(2, int32)
        local[0], local[1] = x[(a * 7 + b) % x.size], cuda.threadIdx.y
        out[a, b] = local[0] + 100 * local[1] + 1000 * cuda.blockIdx.x + 10000 * cuda.blockIdx.y * cuda.gridDim.x


@cuda.jit
def rows_of_warps(x, out):
    """A warp per row, in a loop whose length differs between blocks."""
    lane, row = cuda.threadIdx.x & 31, (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // 32
    while row < 23:
        total = x[(row * 5 + lane) % x.size]
        for d in range(5):
            total += cuda.shfl_xor_sync(FULL, total, 1 << d)
        votes = cuda.ballot_sync(FULL, (total + lane) % 3 == 0)
        if lane == 0:
            out[row] = total + cuda.popc(uint32(votes))
        row += cuda.gridDim.x * cuda.blockDim.x // 32


@cuda.jit
def next_block(x, out):
    i = cuda.grid(1)
    out[i] = x[i]
    x[(i + cuda.blockDim.x) % 96] = 0


def only(span, monkeypatch):
    monkeypatch.setattr(launch, "SPANS", (span,))


@pytest.mark.parametrize(
    "kernel, grid, block, shape",
    [(loops, 5, 32, 160), (plane, (3, 4), (8, 4), (20, 15)), (rows_of_warps, 5, 64, 23), (python_numbers, 3, 32, 96)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("lanes", [1, 64, 1 << 14])
def test_several_blocks_in_a_vector(kernel, grid, block, shape, lanes, monkeypatch):
    monkeypatch.setattr(vector_engine, "_LANES", lanes)
    x = np.arange(160, dtype=np.int32) * 37 % 101
    arguments = x, np.zeros(shape, np.float32 if kernel is python_numbers else np.int32)
    arguments += (150,) if kernel is loops else ()
    expected = run(kernel, "threads", grid, block, *arguments)
    only("blocks", monkeypatch)
    for a, b in zip(run(kernel, "vector", grid, block, *arguments), expected, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "kernel, block, arguments",
    [
        (block_operations, 96, (X, np.zeros(97, np.int32))),  # shared memory, barriers and atomic operations
        (last_block_sums, 32, (X, np.zeros(3, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))),
        (python_numbers, 16, (X, np.zeros(96, np.float32))),  # no whole warps
    ],
)
def test_kernels_whose_threads_need_one_another_run_block_by_block(kernel, block, arguments, monkeypatch):
    only("blocks", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(vector_engine, "Gang", None)
        run(kernel, "either", 3, block, *arguments)  # as threads
    assert block == 16 or "several blocks" in launch.fallbacks[kernel.py_func.__name__]


@pytest.mark.parametrize("lanes", [32, 1 << 14])
def test_blocks_of_a_vector_race(lanes, monkeypatch):
    """Blocks are not ordered, whether they are in one vector or not."""
    monkeypatch.setattr(vector_engine, "_LANES", lanes)
    with simulator.races(), pytest.raises(simulator.DataRace):
        next_block[3, 32](X.copy(), np.zeros(96, np.int32))
