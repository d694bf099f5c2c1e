"""Clocks of pipes: `moe_numba.course.lessons.gate.pipe_clocks`, and the main path and loops of machine code."""

import os

import pytest

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32

from moe_numba.course.lessons.gate.pipe_clocks import NAMES, PipeClocks, clocks_of, executions, pipe_clocks
from moe_numba.course.steps.estimate import PIPES
from moe_numba.runtime.sass import MachineCode, body_and_loops

SASS = """
	.section	.text.slow_path,"ax",@progbits
.L_x_0:
        /*0000*/                   FMUL R0, R0, R1 ;
        /*0010*/                   BRA `(.L_x_0) ;
	.section	.text.kernel,"ax",@progbits
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   FADD R0, R0, R1 ;
        /*0020*/               @P1 EXIT ;
.L_x_2:
        /*0030*/                   SHFL.BFLY PT, R2, R2, 0x1, 0x1f ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/               @P0 BRA `(.L_x_3) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_1) ;
"""


def test_the_main_path_ends_with_the_first_exit_without_a_predicate():
    assert body_and_loops(SASS) == ([2, 9], [[5, 6], [3, 7]])
    assert body_and_loops(SASS.replace("EXIT", "RET")) == (None, None)


def code(opcodes, loops=(), body=None):
    opcodes = opcodes.split()
    return MachineCode(8, 0, 0, [], opcodes, body=body or [0, len(opcodes) - 1], loops=[list(loop) for loop in loops])


def test_an_opcode_has_one_pipe():
    opcodes = [opcode for _, names in PIPES.values() for opcode in names.split()]
    assert len(opcodes) == len(set(opcodes))


def test_clocks_are_added_up_per_pipe():
    found = clocks_of(code("FMUL.FTZ IMAD.WIDE ISETP.NE.AND MUFU.EX2 LDG.E.128 SHFL.IDX NOP BRA EXIT"))
    assert found == {"issue slots": 8, "FMA": 1 + 2, "ALU": 2, "XU": 8, "LSU": 4 + 4}
    assert clocks_of(code("FADD FADD NOP FADD EXIT NOP BRA", body=[1, 4]))["FMA"] == 2


def test_iterations_follow_from_the_executed_opcodes():
    kernel = code("SHFL.BFLY FADD SHFL.BFLY SHFL.IDX FADD SHFL.BFLY BRA EXIT", [(1, 3), (4, 6)])
    assert executions(kernel) == [1] * 8
    assert executions(kernel, {"SHFL.IDX": 4, "SHFL.BFLY": 1 + 4 + 3}) == [1, 4, 4, 4, 3, 3, 3, 1]
    unrolled = code("SHFL.IDX SHFL.IDX BRA EXIT", [(0, 2)])
    assert executions(unrolled, {"SHFL": 8}) == [4, 4, 4, 1]
    nested = code("REDUX FADD BRA BRA EXIT", [(1, 2), (0, 3)])
    assert executions(nested, {"REDUX": 3}) == [3, 3, 3, 3, 1]


@pytest.mark.parametrize("executed, message", [({"SHFL": 5}, "do not determine"), ({"REDUX": 2}, "do not fit")])
def test_counts_that_do_not_fit_are_refused(executed, message):
    with pytest.raises(ValueError, match=message):
        executions(code("SHFL BRA SHFL BRA EXIT", [(0, 1), (2, 3)]), executed)


def test_unknown_instructions_are_refused():
    with pytest.raises(ValueError, match="install nvidia-cuda-nvdisasm"):
        clocks_of(MachineCode(8, 0, 0, [], None))
    with pytest.raises(ValueError, match="every EXIT has a predicate"):
        clocks_of(MachineCode(8, 0, 0, [], ["FADD"]))


def test_the_table_marks_the_slowest_pipe():
    counts = {"a <b>": dict.fromkeys(NAMES, 1) | {"ALU": 1200}, "b": dict.fromkeys(NAMES, 1) | {"XU": 16}}
    table = PipeClocks(counts, dict.fromkeys(counts))
    assert table["a <b>"] == 1200 and table.slowest("a <b>") == "ALU" and table.slowest("b") == "XU"
    assert [line.split() for line in str(table.select("b")).splitlines()[1:]] == [["b", "1", "1", "1", "16", "1"]]
    assert "<b>1,200</b>" in table._repr_html_() and "a &lt;b&gt;" in table._repr_html_()
    table.update(PipeClocks({"c": dict.fromkeys(NAMES, 7)}, {"c": None}))
    assert table["c"] == 7 and len(str(table).splitlines()) == 4


@cuda.jit
def sums(x, rounds):
    lane = cuda.threadIdx.x
    total = x[lane]
    for _ in range(rounds):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1)
    x[lane] = total


def make_sums(rounds):
    @cuda.jit
    def kernel(x):
        total = x[cuda.threadIdx.x]
        for _ in range(rounds):
            total = max(total, cuda.shfl_xor_sync(0xFFFFFFFF, total, 1) * float32(1.5))
        x[cuda.threadIdx.x] = total

    return kernel


def test_kernels_are_compiled_and_counted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # the compiler's process imports this module
    pointer = ("float32*",)
    table = pipe_clocks(
        {"5": ("make_sums(5)", pointer), "400": ("make_sums(400)", pointer, {"SHFL": 400})}, [make_sums]
    )
    assert table.codes["5"].count("SHFL") == 5 and table.codes["400"].count("SHFL") < 400
    assert [table.counts[name]["LSU"] for name in ("5", "400")] == [4 * (5 + 2), 4 * (400 + 2)]
    with pytest.raises(ValueError, match="do not determine"):  # it is unrolled, and a second loop does the rest
        pipe_clocks({"run time": (sums, ("float32*", "int32"), {"SHFL": 40})})
