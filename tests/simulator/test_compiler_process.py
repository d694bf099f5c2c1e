"""Simulator: the second process, which compiles."""

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from moe_numba.simulator import compiler
from moe_numba.simulator.compiler import process


class Expression:
    """Stands for a kernel: the second process evaluates it when it unpacks the request."""

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return eval, (self.text,)


def answer(text):
    return process.compile_apart([pickle.dumps(Expression(text))])[0]


def told(expression):
    """Return the value of an expression in the second process, as text."""
    found = answer(f"exec('raise LookupError(' + {expression!r} + ')')")
    assert found["unpacked"] is False
    return found["reason"].removeprefix("LookupError: ")


PID = "__import__('os').getpid()"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Name a module that imports fast: no test here compiles."""
    monkeypatch.setattr(compiler, "MODULE", "json")
    yield
    process._end()


def test_one_process_answers_and_an_answer_is_kept(monkeypatch):
    process.start()
    pid = told(PID)
    assert told(f"0 + {PID}") == pid == str(process._running.process.pid)
    clock = told("__import__('time').time_ns()")
    assert told("__import__('time').time_ns()") == clock and told("1 + __import__('time').time_ns()") != clock
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another")
    assert told(f"1 + {PID}") == str(1 + int(pid))
    monkeypatch.setenv("NUMBA_OPT", "2")
    assert told(PID) != pid and told("__import__('os').environ['NUMBA_OPT']") == "2"


@pytest.mark.parametrize(
    "dies, reason",
    [
        ("__import__('os')._exit(3)", "the compiler ended with 3"),
        ("exec('import sys; sys.exit(\"no room\")')", "no room"),
    ],
)
def test_a_process_that_dies_is_started_again(dies, reason):
    pid = told(PID)
    assert answer("__import__('sys').stderr.write('earlier\\n')")["unpacked"] is False
    both = process.compile_apart([pickle.dumps(Expression(text)) for text in (PID, dies)])
    assert both == [{"reason": reason}] * 2
    assert (other := told(PID)) != pid
    os.kill(int(other), signal.SIGKILL)
    process._running.process.wait()
    assert told(PID) != other


def test_what_the_compiler_prints_is_no_reply():
    assert answer("print('x' * 100)") == {
        "reason": "TypeError: cannot unpack non-iterable NoneType object",
        "unpacked": False,
    }


def test_an_interrupted_program_gets_no_old_answer(monkeypatch):
    def interrupted(stream):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(process, "_read", interrupted)
        told("1")
    assert told("2") == "2"


@pytest.mark.parametrize("module, reason", [("no_module", "No module named 'no_module'"), (None, "names no compiler")])
def test_a_missing_compiler_is_named(module, reason, monkeypatch):
    monkeypatch.setattr(compiler, "MODULE", module)
    process.start()
    nothing = process.request(lambda: None, {}, (), arch=(9, 0))
    assert reason in process.compile_apart([nothing])[0]["reason"]


def test_modules_are_those_of_the_program(tmp_path, monkeypatch):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "named_by_a_kernel.py").write_text(f"value = '{folder}'\n")
    value = "__import__('named_by_a_kernel').value"
    assert "No module named" in answer(value)["reason"]
    for folder in ("one", "two"):
        with monkeypatch.context() as patched:
            patched.syspath_prepend(tmp_path / folder)
            import named_by_a_kernel as module

            assert told(value) == module.value == folder
            path = tmp_path / folder / "named_by_a_kernel.py"
            path.write_text("value = 'edited'\n")
            os.utime(path, ns=(1, 1))
            assert told(value) == "edited"
            del sys.modules[module.__name__]


@pytest.mark.parametrize("ends", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"], ids=["returns", "exits", "is killed"])
def test_it_ends_with_the_program(ends):
    code = (
        "import os; from moe_numba.simulator import compiler; from moe_numba.simulator.compiler import process\n"
        f"compiler.MODULE = 'json'; process.start(); print(process._running.process.pid, flush=True); {ends}"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    for _ in range(3000):
        if not _runs(pid):
            return
        time.sleep(0.02)
    raise AssertionError("it still runs")


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
