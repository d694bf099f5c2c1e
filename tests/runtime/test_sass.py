"""The compiler's process: errors, other environments, and requests that do not see each other."""

import os
import signal

import pytest

from moe_numba.runtime import sass
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from numba import cuda
import math
print("a module may print")

assert not hasattr(math, "left_behind"), "a request sees what another one left behind"
math.left_behind = True

@cuda.jit
def kernel(x):
    x[cuda.grid(1)] = 1
"""
REQUEST = {"kernel": ("kernel", ("float32*",), None, False)}


def test_one_process_compiles_all_requests():
    first = compile_apart(SOURCE, REQUEST)["kernel"]
    process = sass._servers[0].process
    assert compile_apart(SOURCE, REQUEST)["kernel"] == first
    assert sass._servers[0].process is process


def test_errors_are_those_of_the_request():
    with pytest.raises(RuntimeError, match="the compiler failed:(.|\n)*ValueError: wrong"):
        compile_apart("raise ValueError('wrong')", REQUEST)
    with pytest.raises(RuntimeError, match="NameError: name 'other'"):
        compile_apart(SOURCE, {"kernel": ("other", ("float32*",), None, False)})
    assert compile_apart(SOURCE, REQUEST)["kernel"].registers > 0


def test_another_environment_has_another_process(monkeypatch, tmp_path):
    compile_apart(SOURCE, REQUEST)
    process = sass._servers[0].process
    (tmp_path / "a_module_of_this_test.py").write_text("from numba import int32")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    compile_apart("from a_module_of_this_test import int32\n" + SOURCE, REQUEST)
    assert sass._servers[0].process is not process and process.poll() is not None


def test_an_interrupted_request_leaves_no_answer_behind():
    """The next request must not take its exit status for its own."""
    first = compile_apart(SOURCE, REQUEST)["kernel"]

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_apart("import time\ntime.sleep(1)\nraise ValueError('interrupted')", REQUEST)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert compile_apart(SOURCE, REQUEST)["kernel"] == first


def test_a_process_that_has_ended_is_replaced():
    compile_apart(SOURCE, REQUEST)
    sass._servers[0].process.kill()
    sass._servers[0].process.wait()
    assert compile_apart(SOURCE, REQUEST)["kernel"].registers > 0


SASS = """
	.section	.text.slow_path,"ax",@progbits
        /*0000*/                   FMUL R0, R0, R1 ;  /* 0x00 */
                                                                             /* 0x000fe20000000800 */
	.section	.text.kernel,"ax",@progbits
        .global         kernel
	//## File "a.py", line 7 inlined at "b.py", line 3
	//## File "b.py", line 3
.L_x_1:
        /*0000*/              @!P1 LDG.E R3, [R2] ;                          /* 0x000000ff0600720c */
                                                                             /* 0x000ee40000000800 */
	//## File "b.py", line 4
        /*0010*/                   FADD R0, R0, R3 ;                         /* 0x00000004ff007982 */
                                                                             /* 0x008fca0000000000 */
        /*0020*/               @P0 BRA `(.L_x_1) ;                           /* 0x0000000400689947 */
                                                                             /* 0x000fea0003800000 */
.L_x_2:
        /*0030*/                   BRA `(.L_x_2);                            /* 0x00000004006899ff */
                                                                             /* 0x000fea0003800000 */
        /*0040*/                   NOP;                                      /* 0x0000000000007918 */
                                                                             /* 0x000fc00000000000 */
"""


def test_instructions_have_lines_targets_and_what_they_wait_for():
    load, add, branch = sass.instructions(SASS)
    assert load == sass.Instruction("LDG.E", True, ("a.py", 7), None, 2, 3, None, 0)
    assert add == sass.Instruction("FADD", False, ("b.py", 4), None, 5, None, None, 1 << 3)
    assert (branch.opcode, branch.target, branch.predicated) == ("BRA", 0, True)
