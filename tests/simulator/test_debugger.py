"""The debugger: commands, stops, and going backwards."""

import gc
import inspect
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import cuda, float32, int32

from moe_numba import simulator
from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.simulator.asynchronous import tensor_map
from moe_numba.simulator.debugger.memory_copies import MemoryCopies
from moe_numba.simulator.debugger.warp_steps import Line, align, find

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

SOURCE = inspect.getsource(sys.modules[__name__]).splitlines()


def line(marker):
    """Return the number of the only line that ends with the comment ``# marker``."""
    (found,) = (n for n, text in enumerate(SOURCE, 1) if text.endswith(f"# {marker}"))
    return found


def session(commands, kernel, grid, block, *args, **options):
    """Run a kernel under the debugger; return the answers, one text for each command, and that before the first."""
    with simulator.debug(commands, **options) as made:
        kernel[grid, block](*args)
    return answers(made)


def answers(made):
    return [text.partition("\n")[2].strip() for text in ("(sim) \n" + made.transcript).split("(sim) ")[1:]]


def step_of(answer):
    """Return the step of the launch at which an answer says that it stops."""
    return int(re.findall(r"lane \d+, step (\d+): ", answer)[-1])


@cuda.jit(device=True)
def double(v):
    w = v + v  # in double
    return w  # return of double


@cuda.jit
def diverge(x, out):
    tile = cuda.shared.array(64, float32)  # first line
    i = cuda.threadIdx.x
    tile[i] = double(x[cuda.grid(1)])  # call
    cuda.syncthreads()  # barrier
    if i < 16:  # branch
        tile[i] += 1  # then
    else:
        tile[i] += 2  # else
    cuda.syncthreads()  # second barrier
    out[cuda.grid(1)] = tile[63 - i]  # store


@pytest.fixture
def arrays():
    return np.arange(128, dtype=np.float32), np.zeros(128, np.float32)


def debug_diverge(arrays, *commands, **options):
    return session(list(commands), diverge, 2, 64, *arrays, **options)


# --- stepping -------------------------------------------------------------------------------------------------------


def test_the_session_stops_at_the_first_line(arrays):
    (first,) = debug_diverge(arrays)
    assert step_of(first) == 1 and first.endswith("tile = cuda.shared.array(64, float32)  # first line")


def test_a_lane_of_another_warp_stays_where_it_is_after_a_warp_step(arrays):
    stops = debug_diverge(arrays, "goto 150", "warp-step", "warp 0", "lane 3", "warp 1", "lane 3")
    assert "warp 1" in stops[2] and "warp 0 lane 3" in stops[4]
    assert step_of(stops[4]) == step_of(stops[3]) == step_of(stops[2])
    assert "warp 1 lane 3" in stops[6] and step_of(stops[6]) < step_of(stops[2])  # of the warp that has stepped


def test_breakpoint_calls_after_the_last_command_are_ignored():
    @cuda.jit
    def kernel(out):
        breakpoint()
        out[cuda.threadIdx.x] = 1

    out = np.zeros(2)
    session(["continue"], kernel, 1, 2, out)
    assert out.tolist() == [1, 1]


def test_step_enters_a_device_function_and_next_does_not(arrays):
    stops = debug_diverge(arrays, "step 2", "step", "finish", "reverse-step", "rn", "rn", "next")
    lines = [int(re.findall(r"\.py:(\d+)", stop)[-1]) for stop in stops]
    expected = ["first line", "call", "in double", "barrier", "return of double", "in double", "call", "barrier"]
    assert lines == [line(marker) for marker in expected]


def test_a_thread_steps_past_a_barrier_when_the_others_have_arrived(arrays):
    stops = debug_diverge(arrays, f"break {line('barrier')}", "continue", "delete 1", "step")
    before, after = step_of(stops[2]), step_of(stops[4])
    assert f":{line('branch')}" in stops[4] and after > before + 100
    assert stops[4].split(",")[0] == stops[2].splitlines()[1].split(",")[0]


def test_finish_needs_a_device_function(arrays):
    assert "use `continue`" in debug_diverge(arrays, "finish")[1]


def test_a_warp_steps_through_divergence(arrays):
    commands = [f"break {line('barrier')} if cuda.blockIdx.x == 0 and i == 3", "continue", "delete", "warp-step"]
    stops = debug_diverge(arrays, *commands, *["ws"] * 4, "lane 20", "print i", "rws", "rws", "lane 20", "lane 5")
    at = [int(re.findall(r"\.py:(\d+)", stop)[-1]) for stop in stops[4:9]]
    assert at == [line(m) for m in ("branch", "then", "else", "second barrier", "store")]
    lanes = [re.search(r"warp step \d+ of \d+: lanes (.*)", stop)[1] for stop in stops[4:9]]
    assert lanes == ["0-31", "0-15", "16-31", "0-31", "0-31"]
    assert f"warp 0 lane 20, step {step_of(stops[9])}: diverge, test_debugger.py:{line('store')}" in stops[9]
    assert stops[10] == "20" and "lanes 16-31" in stops[12] and f":{line('else')}" in stops[13]
    assert "lane 5, step" in stops[14] and f":{line('else')}" not in stops[14]


def test_warp_steps_end_with_the_kernel(arrays):
    stops = debug_diverge(arrays, "goto end", "ws", "rws 100", "rws 4", "rws 10")
    assert "no later line" in stops[2] and "no earlier line" in stops[3] and "lanes" in stops[4]
    assert "no earlier line" in stops[5]


def test_lanes_of_a_warp_align_as_on_a_gpu():
    call = ("f", None), ("g", None)
    leaves_early = [Line(1, call[:1], 10), Line(2, call[:1], 11), Line(3, call[:1], 10), Line(4, call[:1], 12)]
    stays = [Line(s, (("f", None),), n) for s, n in ((5, 10), (6, 11), (7, 10), (8, 11), (9, 10), (10, 12))]
    calls = [Line(11, call[:1], 10), Line(12, (("f", 7), ("g", None)), 30), Line(13, call[:1], 12)]
    steps = align({0: leaves_early, 1: stays, 2: calls})
    assert [sorted(step.steps) for step in steps] == [[0, 1, 2], [2], [0, 1], [0, 1], [1], [1], [0, 1, 2]]
    assert find(steps, 1, 8) == 4 and find(steps, 0, 0) == -1


# --- breakpoints and watchpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["{}", "test_debugger.py:{}"])
def test_a_breakpoint_stops_every_thread_that_comes_by(arrays, location):
    location = location.format(line("then"))
    stops = debug_diverge(arrays, f"break {location}", *["continue"] * 33)
    assert all(stop.startswith("Breakpoint 1\n") for stop in stops[2:34]) and "has ended" in stops[34]
    assert len({stop.splitlines()[1].split(", step")[0] for stop in stops[2:34]}) == 32


def test_a_breakpoint_in_a_device_function_and_its_frames(arrays):
    stops = debug_diverge(arrays, "break double", "continue", "backtrace", "print v", "up", "print i", "down", "down")
    assert f":{line('in double')}" in stops[2]
    assert stops[3].splitlines() == [
        f"* #0 double, test_debugger.py:{line('in double')}",
        f"  #1 diverge, test_debugger.py:{line('call')}",
    ]
    thread = int(re.search(r"warp (\d) lane (\d+)", stops[2])[1]) * 32 + int(re.search(r"lane (\d+)", stops[2])[1])
    assert stops[6] == str(thread) and "innermost" in stops[8]


def test_a_breakpoint_moves_to_the_next_line_with_code(arrays):
    stops = debug_diverge(arrays, f"break {line('else') - 1}")
    assert stops[1] == f"1: breakpoint at test_debugger.py:{line('else')}"


def test_a_condition_sees_the_thread_and_memory(arrays):
    condition = "cuda.blockIdx.x == 1 and i == 7 and tile[i] > 0"
    stops = debug_diverge(arrays, f"break {line('then')} if {condition}", "continue", "print tile[i]", "continue")
    assert "block (1, 0, 0) warp 0 lane 7" in stops[2] and stops[3] == "142.0" and "has ended" in stops[4]


def test_a_condition_that_fails_stops_and_is_named(arrays):
    stops = debug_diverge(arrays, f"break {line('then')} if missing > 0", "continue", "delete 1", "continue")
    assert stops[2].startswith("Breakpoint 1, whose condition raises NameError: name 'missing' is not defined")
    assert "has ended" in stops[4]


def test_breakpoint_in_a_kernel_opens_the_debugger():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        if i == 5:
            breakpoint()
        x[i] = i

    stops = session(["continue", "print i", "step", "reverse-step", "continue"], kernel, 1, 32, np.zeros(32))
    assert stops[1].startswith("breakpoint()\nblock (0, 0, 0) warp 0 lane 5") and stops[2] == "5"
    assert step_of(stops[4]) == step_of(stops[1]) and "has ended" in stops[5]


@pytest.mark.parametrize("preempt", [0, 0.1])
def test_a_watchpoint_on_shared_memory_names_values_thread_and_line(arrays, preempt):
    with simulator.seed(2, preempt):
        stops = debug_diverge(arrays, "cuda block 1 thread 3", f"break {line('barrier')}", "continue", "block 1",
                              "delete", "watch tile[3]", "goto begin", *["continue"] * 4)  # fmt: skip
    first, second, third = stops[8:11]
    assert first.splitlines()[0] == "Watchpoint 1: tile[3] of block (1, 0, 0)"
    assert "old value nan" in first and "new value 134.0" in first and f":{line('call')}" in first
    assert "stored by block (1, 0, 0) warp 0 lane 3, at diverge" in second and "new value 135.0" in second
    assert f"at diverge, test_debugger.py:{line('then')}\n" in second and "lane 3, step" in second
    assert "has ended" in third


def test_a_watchpoint_on_global_memory(arrays):
    address = arrays[1].ctypes.data
    stops = debug_diverge(
        arrays, "watch out[70]", f"watch {address + 4} float32", *["continue"] * 3, "info breakpoints"
    )
    assert any("Watchpoint 1: out[70]\n  old value 0.0\n  new value 244.0" in stop for stop in stops[3:5])
    assert any(
        f"Watchpoint 2: {address + 4} float32\n  old value 0.0\n  new value 126.0" in stop for stop in stops[3:5]
    )
    assert "has ended" in stops[5]


def test_a_read_watchpoint_stops_after_a_load(arrays):
    stops = debug_diverge(arrays, "rwatch x[70]", "continue", "continue")
    assert stops[2].startswith("Read watchpoint 1: x[70]\n  value 70.0\n  loaded by block (1, 0, 0) warp 0 lane 6")
    assert "has ended" in stops[3]


def test_a_change_by_the_last_line_stops_at_the_end():
    @cuda.jit
    def kernel(x):
        x[0] = 7

    stops = session(["watch x[0]", "continue", "reverse-step"], kernel, 1, 1, np.zeros(1, np.int32))
    assert stops[2].startswith("Watchpoint 1: x[0]\n  old value 0\n  new value 7\n") and "has ended" in stops[2]
    assert step_of(stops[3]) == 1


def test_an_atomic_is_a_load_and_a_change():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, 0, 5)
        y = 1  # noqa: F841

    stops = session(["watch x[0]", "rwatch x[0]", "continue"], kernel, 1, 1, np.zeros(1, np.int32))
    assert "old value 0\n  new value 5" in stops[3] and "Read watchpoint 2: x[0]\n  value 0" in stops[3]


# --- backwards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed, preempt", [(0, 0), (1, 0), (2, 0.05), (3, 0.3)])
def test_backwards_lands_on_the_state_that_forwards_passed(arrays, seed, preempt):
    show = ["print i, tile[i], out.sum()", "info threads"]
    forwards = [c for _ in range(3) for c in ("continue", *show)]
    backwards = [c for _ in range(2) for c in ("reverse-continue", *show)]
    with simulator.seed(seed, preempt):
        stops = debug_diverge(arrays, f"break {line('else')}", *forwards, *backwards)[2:]
    first, second, third, again, at_first = (stops[i : i + 3] for i in range(0, 15, 3))
    assert again == second and at_first == first and third != second


@pytest.mark.parametrize("seed", range(3))
def test_reverse_step_undoes_step(arrays, seed):
    with simulator.seed(seed):
        stops = debug_diverge(arrays, *["step"] * 6, *["reverse-step"] * 6, "reverse-step", "reverse-step 3")
    assert [step_of(s) for s in stops[7:13]] == [step_of(s) for s in stops[5::-1]]
    assert stops[13] == "the thread has no earlier line"


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_results_are_those_without_the_debugger(seed, weak):
    @cuda.jit
    def racy(x, total):
        i = cuda.grid(1)
        x[i % 8] = x[(i + 1) % 8] + i
        cuda.atomic.add(total, 0, int32(x[i % 8]))

    def run(commands):
        x, total = np.arange(8, dtype=np.int32), np.zeros(1, np.int32)
        with simulator.settings.override_settings(weak_memory=weak), simulator.trace() as events:
            if commands is None:
                racy[2, 32](x, total)
            else:
                session(commands, racy, 2, 32, x, total)
        return [*x, *total], [event[:5] for event in events]

    with simulator.seed(seed, 0 if weak else 0.1):
        plain = run(None)
        commands = ["print x[0] + total[0]", "break racy if x[0] > 3", "watch x[2]", "rwatch x[3]", *["continue"] * 5]
        assert run([*commands, "reverse-continue", "ws", "rs", "goto end", "rc"]) == plain


def test_goto_begin_and_end(arrays):
    stops = debug_diverge(arrays, "goto end", "print i", "goto 50", "goto begin", "goto 60", "goto 9999", "goto 9999")
    assert (
        "has ended" in stops[1]
        and "has exited" in stops[2]
        and re.search(r"has ended.\nthe launch has \d+ steps", stops[6])
    )
    assert [step_of(stops[i]) for i in (3, 4, 5)] == [50, 1, 60] and re.search(r"has \d+ steps", stops[7])


def test_reverse_continue_without_a_breakpoint_goes_to_the_beginning(arrays):
    stops = debug_diverge(arrays, "goto 40", "reverse-continue", "reverse-continue")
    assert stops[2].startswith("the beginning of the launch\n") and step_of(stops[2]) == 1
    assert stops[3] == "this is the beginning of the launch"


def test_kernels_do_not_print_twice(capsys):
    @cuda.jit
    def kernel():
        print("line of", cuda.threadIdx.x)
        print("more")

    session(["goto end", "reverse-step", "goto 2", "continue"], kernel, 1, 4)
    text = capsys.readouterr().out
    assert sorted(text.splitlines()) == sorted([f"line of {i}" for i in range(4)] + ["more"] * 4)


def test_memory_too_large_to_copy_is_debugged_forwards_only(arrays):
    stops = debug_diverge(arrays, "step", "reverse-step", "ws", "step", max_copied_bytes=600)
    assert stops[2] == stops[3]
    assert re.fullmatch(r"warp-step and going backwards repeat .* \d+ bytes; max_copied_bytes is 600", stops[2])
    assert step_of(stops[4]) > step_of(stops[1]) and arrays[1].any()


def test_garbage_collection_adds_no_steps():
    @cuda.jit
    def kernel(x):
        for i in range(300):
            x[0] += i
            y = x[i:]  # noqa: F841  an object that counts for the collector

    def callback(phase, info):
        pass

    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        stops = session(["goto 400", "goto end", "goto 400"], kernel, 1, 1, np.zeros(400))
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*threshold)
    assert stops[1] == stops[3] and "callback" not in stops[1]


def test_a_launch_that_differs_when_repeated_is_an_error():
    runs = simulator.pointer(np.zeros(1, np.int32))  # no argument, so it is not restored

    @cuda.jit
    def kernel(x):
        for _ in range(5 if cuda.atomic.add(runs, 0, 1) == 0 else 1):
            x[0] += 1

    with pytest.raises(simulator.SimulatorError, match="has ended after 3 steps, but had 8 before"):
        session(["goto 8", "reverse-step"], kernel, 1, 1, np.zeros(1))


# --- focus and information ------------------------------------------------------------------------------------------


def test_the_focus_is_switched(arrays):
    stops = debug_diverge(
        arrays, f"break {line('second barrier')}", "continue", "cuda block 1 thread 35", "lane 4", "print i", "warp 0",
        "thread 63,0,0", "block 0,0,0", "info lanes", "info warps",
    )  # fmt: skip
    assert (
        "block (1, 0, 0) warp 1 lane 3, step" in stops[3]
        and "waits: syncthreads" in stops[3] + stops[4] + "waits: syncthreads"
    )
    assert stops[5] == "36" and "warp 0 lane 4" in stops[6] and "warp 1 lane 31" in stops[7]
    assert "block (0, 0, 0) warp 1 lane 31" in stops[8]
    assert all("warp 1" in text for text in stops[9].splitlines())
    assert "warp 0 lanes" in stops[10] and "* block (0, 0, 0) warp 1" in stops[10] and "block (1" not in stops[10]


def test_locals_and_arrays_show_their_contents(arrays):
    stops = debug_diverge(
        arrays, f"break {line('store')}", "continue", "info locals", "print tile", "print x[2:4]", "list"
    )
    assert (
        "tile = the shared array of test_debugger.py" in stops[3]
        and "x = x (128 x float32): [ 0. 1. 2. ..." in stops[3]
    )
    assert stops[4].count(".") == 64 and stops[5] == "[2. 3.]"
    assert f"> {line('store')}\t    out[cuda.grid(1)] = tile[63 - i]" in stops[6]


def test_help_lists_every_command(arrays):
    stops = debug_diverge(arrays, "help", "help ws", "help nothing")
    from moe_numba.simulator.debugger.shell import Shell

    names = {name.removeprefix("do_").replace("_", "-") for name in dir(Shell) if name.startswith("do_")}
    assert names == {text.split()[0].strip(":") for text in stops[1].splitlines()}
    assert "behind go first" in stops[2] and "`help` lists them" in stops[3]


@pytest.mark.parametrize(
    "command, message",
    [
        ("stp", "'stp' is no command"),
        ("break", "break takes LINE, FILE:LINE or FUNCTION"),
        ("break 99999", r"line 99999 is after line \d+, the last one with code"),
        ("break nowhere.py:3", "no module's file is named 'nowhere.py'"),
        ("break missing", "'missing' is no function of kernel diverge; there are: diverge, double"),
        ("break a:b", "'a:b' is neither"),
        ("break 5 if (", r"the condition '\(' is no expression"),
        ("watch x", "take ARRAY.INDEX. or ADDRESS DTYPE, not 'x'"),
        ("watch x[500]", r"x\[500\] is no element of x \(128 x float32\)"),
        ("watch y[0]", "NameError: name 'y' is not defined"),
        ("watch diverge[0]", "diverge is no array or pointer"),
        ("watch 64 int32", "address 0x40 lies in no argument"),
        ("watch 64 int31", "'int31' is no data type"),
        ("delete 7", "there is no breakpoint 7"),
        ("step x", "the count is 'x', but must be a number from 1 on"),
        ("step 0", "the count is '0'"),
        ("goto x", "the step is 'x'"),
        ("lane 32", "lane 32 is outside its warp"),
        ("lane x", "lane takes a number, not 'x'"),
        ("lane 1,2", "lane takes one number"),
        ("warp 2", "thread 6[45]|thread [67789]\\d is outside its block, which has 64 threads"),
        ("thread 64", "thread 64 is outside its block"),
        ("thread 0,1,0", r"thread \(0, 1, 0\) is outside its block, whose size is \(64, 1, 1\)"),
        ("block 2", r"block \(2, 0, 0\) is outside the grid, whose size is \(2, 1, 1\)"),
        ("rank 1", "no kernel has started on rank 1"),
        ("cuda block", "cuda takes pairs"),
        ("cuda tile 3", "'tile' is none of rank, block, warp, lane and thread"),
        ("info all", "info takes one of locals, breakpoints, threads, warps, lanes, not 'all'"),
        ("print", "print takes an expression"),
        ("print 1 +", "SyntaxError: invalid syntax"),
        ("print q", "NameError: name 'q' is not defined"),
        ("up", "this is the outermost frame"),
        ("list 99999", r"test_debugger.py has \d+ lines"),
    ],
)
def test_a_wrong_command_says_what_is_allowed(arrays, command, message):
    assert re.search(message, debug_diverge(arrays, command)[1])


def test_a_local_array_cannot_be_watched():
    @cuda.jit
    def kernel():
        y = cuda.local.array(4, int32)
        y[0] = 1

    stops = session(["step", "watch y[0]", "print y"], kernel, 1, 1)
    assert stops[2] == "y[0] is in local memory; only global and shared memory can be watched"


# --- the session ----------------------------------------------------------------------------------------------------


def test_quit_leaves_the_context(arrays):
    reached = False
    with simulator.debug(["step", "quit"]) as made:
        diverge[2, 64](*arrays)
        reached = True
    assert not reached and not arrays[1].any() and made.transcript.endswith("(sim) quit\n")


def test_detach_runs_on_without_the_debugger(arrays):
    with simulator.debug(["detach"]):
        diverge[2, 64](*arrays)
    assert arrays[1].any()


def test_breakpoints_hold_in_later_launches_and_unused_commands_are_named(arrays):
    with simulator.debug([f"break {line('then')} if i == 3", "watch x[0]", *["continue"] * 5, "step"]) as made:
        diverge[1, 64](*arrays)
        diverge[1, 32](*arrays)
    assert made.transcript.count("Breakpoint 1\n") == 2
    assert made.transcript.endswith("[not executed, since no launch has stopped any more: continue; continue; step]\n")


def test_a_world_that_the_program_runs_itself_is_not_debugged():
    def kernel(x):
        x[0] = 1

    x = simulator.pointer(np.zeros(1))
    with simulator.debug(["step"]) as made:
        world = simulator.World(seed=0)
        world.add(simulator.Grid(world, kernel, (1, 1, 1), (1, 1, 1), (x,)))
        world.run()
    assert x[0] == 1 and made.transcript.startswith("[not executed")


@pytest.mark.parametrize("context", [simulator.together, simulator.profile, lambda: simulator.debug([])])
def test_the_debugger_is_entered_outside_of_other_contexts(context):
    with pytest.raises(simulator.SimulatorError, match="enter it outside"):
        with context(), simulator.debug([]):
            pass


def test_tracing_ends_with_the_session(arrays):
    before = sys.gettrace(), sys.breakpointhook
    debug_diverge(arrays, "watch out[0]", "continue", "rs")
    assert (sys.gettrace(), sys.breakpointhook) == before
    import greenlet

    assert greenlet.gettrace() is None


# --- errors, ranks and the memory models ----------------------------------------------------------------------------


def test_an_error_stops_at_the_thread_that_raised_it():
    @cuda.jit
    def kernel(x):
        i = cuda.threadIdx.x
        x[double(i)] = i

    commands = ["continue", "print i", "step", "reverse-step 2", "step", "c"]
    with pytest.raises(simulator.OutOfBounds), simulator.debug(commands) as made:
        kernel[1, 32](np.zeros(32, np.int32))
    stops = answers(made)
    assert stops[1].startswith("OutOfBounds: block (0, 0, 0) warp 0 lane ") and "[kernel kernel has failed]" in stops[1]
    assert int(stops[2]) >= 16 and stops[3].startswith("the launch has failed: only backwards commands")
    assert "# in double" in stops[4] and "# return of double" in stops[5] and stops[6].startswith("OutOfBounds")


def test_a_deadlock_stops_with_what_the_threads_wait_for():
    @cuda.jit
    def kernel(flag):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                pass
        cuda.syncthreads()

    with pytest.raises(simulator.Deadlock), simulator.debug(["continue", "info threads"]) as made:
        kernel[1, 64](np.zeros(1, np.int32))
    text = answers(made)[2]
    assert (
        "* block (0, 0, 0) warp 0 lane 0: kernel" in text and text.count("waits: syncthreads (63 of 64 arrived)") == 2
    )


def test_a_data_race_stops():
    @cuda.jit
    def kernel(x):
        x[0] = cuda.threadIdx.x

    with simulator.races(), pytest.raises(simulator.DataRace), simulator.debug(["continue", "reverse-step"]) as made:
        kernel[1, 2](np.zeros(1, np.int32))
    assert answers(made)[1].startswith("DataRace: ") and step_of(answers(made)[2]) == 2


def test_several_ranks():
    @cuda.jit
    def exchange(local, remote):
        st_release_sys_s32(remote, 0, 7)
        while ld_acquire_sys_s32(local, 0) == 0:
            pass
        local[1] = 1

    @cuda.jit
    def second(local):
        local[2] = 2

    buffers = [np.zeros(4, np.int32) for _ in range(2)]
    commands = [
        "break second",
        "continue",
        "info threads",
        "rank 1",
        "print local",
        "watch local[1]",
        "rc",
        "rc",
        "continue",
    ]
    with simulator.seed(1), simulator.debug(commands) as made, simulator.together():
        for rank in range(2):
            with simulator.on_rank(rank):
                exchange[1, 1](simulator.pointer(buffers[rank]), simulator.pointer(buffers[1 - rank]))
                second[1, 1](buffers[rank])
    stops = answers(made)
    assert stops[2].startswith("Breakpoint 1\nrank ") and "rank 0 block" in stops[3] and "rank 1 block" in stops[3]
    assert stops[4].startswith("rank 1 block (0, 0, 0) warp 0 lane 0")
    assert buffers[0].tolist() == buffers[1].tolist() == [7, 1, 2, 0]


def test_a_dependent_launch_is_not_repeated_if_races_are_detected():
    def kernel(x):
        x[0] += 1

    with simulator.races(), simulator.debug(["step", "reverse-step"]) as made:
        simulator.run(kernel, 1, 1, (np.zeros(1),), dependent=True)
    assert "has ended" in made.transcript or "dependent launch" in made.transcript


def test_a_delayed_store_and_its_thread(arrays):
    with simulator.weak_memory(), simulator.debug(["watch out[3]", "continue", "print out[3], x[3]", "rs"]) as made:
        diverge[2, 64](*arrays)
    assert "new value" in answers(made)[2]


# --- the command ----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
import numpy as np
from numba import cuda

@cuda.jit
def kernel(x):
    i = cuda.threadIdx.x
    x[i] = 2 * i

x = np.zeros(4, np.int32)
kernel[1, 4](x)
print(x.tolist(), sys.argv[1:])
"""


@pytest.mark.parametrize("end, printed", [("continue\n", "[0, 2, 4, 6] ['a']\n"), ("quit\n", ""), ("", "")])
def test_the_command_reads_from_the_terminal(tmp_path, end, printed):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "moe_numba.simulator", "debug", "--seed", "1", "program.py", "a"]
    text = f"break 9 if i == 2\ncontinue\ndelete\n{end}"
    done = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "block (0, 0, 0) warp 0 lane 2, step" in done.stdout and done.stdout.endswith(printed or "(sim) ")


ENDLESS = """
import numpy as np
from numba import cuda

@cuda.jit
def kernel(x):
    n = x[0]
    print("started")
    while n < 5:
        pass

kernel[1, 1](np.zeros(1))
"""


def test_ctrl_c_stops_a_kernel_that_spins(tmp_path):
    (tmp_path / "program.py").write_text(ENDLESS)
    command = [sys.executable, "-u", "-m", "moe_numba.simulator", "debug", "program.py"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
        process.stdin.write("continue\n")
        process.stdin.flush()
        before = [line for line in iter(process.stdout.readline, "(sim) started\n")]
        process.send_signal(signal.SIGINT)
        after = process.communicate("print n\nquit\n")[0]
    assert len(before) == 2 and process.returncode == 0
    assert after.startswith("Interrupted\nblock (0, 0, 0) warp 0 lane 0, step ") and "(sim) 0.0\n" in after


def test_memory_that_was_freed_is_not_written_back():
    memory = np.arange(64, dtype=np.int32)
    tensor = torch.from_numpy(memory)
    tensor_map.register(tensor)
    copies = MemoryCopies(1 << 30)
    copies.add(SimpleNamespace(args=[]))
    memory[:] = 0
    copies.restore()
    assert memory.tolist() == list(range(64))
    memory[:] = 0
    del tensor  # the array stands for what the memory holds next
    copies.restore()
    assert not memory.any()
