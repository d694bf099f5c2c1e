"""Instruction mix: `moe_numba.course.steps.instruction_mix`."""

import sys

import pytest

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.steps.instruction_mix import CLASSES, InstructionMix, classify, instruction_mix
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.grouped_gemm.common.tma_launch import SIGNATURE
from moe_numba.runtime.sass import MachineCode, compile_apart


def code(*opcodes, registers=8, stack=0):
    return MachineCode(registers, stack, 0, [], list(opcodes))


def test_instructions_are_counted_by_class():
    mix = classify(code("FADD", "FFMA.FTZ", "LDG.E.128", "STG.E", "ISETP.NE.AND", "UIADD3", "NOP", "NEWOP.X", "BRA"))
    assert mix == {"float": 2, "integer": 1, "global load": 1, "global store": 1, "branch": 1, "uniform": 1, "other": 1}


def test_an_opcode_has_one_class():
    opcodes = [opcode for names in CLASSES.values() for opcode in names.split()]
    assert len(opcodes) == len(set(opcodes))


def test_the_table_has_a_row_per_class_and_a_column_per_kernel():
    mix = InstructionMix({"before": code("LDL", "LDL", "FADD", registers=82, stack=256), "after": code("FADD")})
    lines = str(mix).splitlines()
    assert lines[0].split() == ["before", "after"]
    assert [line.split() for line in lines[1:]] == [
        ["float", "1", "1"],
        ["local", "memory", "2", "0"],
        ["instructions", "3", "1"],
        ["registers", "per", "thread", "82", "8"],
        ["stack", "bytes", "per", "thread", "256", "0"],
        ["spilled", "bytes", "0", "0"],
    ]
    assert mix._repr_html_().count("<tr>") == 7 and "<td>256</td>" in mix._repr_html_()


def test_without_a_disassembler_there_is_an_error():
    with pytest.raises(ValueError, match="install nvidia-cuda-nvdisasm"):
        InstructionMix({"x": MachineCode(8, 0, 0, [], None)})


SCALE = 3.0


@cuda.jit(device=True)
def scaled(value):
    return float32(value * float32(SCALE))


@cuda.jit
def with_branches(x, y, n):
    i = cuda.grid(1)
    if i < n and x[i] > float32(0) or i == 0:
        y[i] = scaled(x[i])


@cuda.jit
def without_branches(x, y, n):
    i = cuda.grid(1)
    y[i] = scaled(x[i]) if (i < n) & (x[i] > float32(0)) | (i == 0) else float32(0)


def make_sum(count):
    @cuda.jit
    def total(x, y):
        value = float32(0)
        for k in range(count):
            value += x[int32(cuda.grid(1) + k)]
        y[cuda.grid(1)] = value

    return total


def test_kernels_are_compiled_with_what_they_name(monkeypatch):
    functions = with_branches, without_branches, scaled, make_sum
    for function in functions:  # as those of a notebook
        monkeypatch.setattr(getattr(function, "py_func", function), "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], function.__name__, function, raising=False)
    for name, value in {"cuda": cuda, "float32": float32, "int32": int32, "SCALE": SCALE}.items():
        monkeypatch.setattr(sys.modules["__main__"], name, value, raising=False)
    signature = ("float32*", "float32*", "int32")
    mix = instruction_mix(
        {
            "and, or": (with_branches, signature),
            "&, |": (without_branches, signature),
            "4 loads": ("make_sum(4)", signature[:2]),
        },
        functions=[make_sum],
    )
    assert mix["and, or"]["branch"] > mix["&, |"]["branch"]
    assert mix["4 loads"]["global load"] == 4 and mix["4 loads"]["float"] == 4


def test_the_opcodes_of_large_kernels_have_classes():
    source = """
from moe_numba.align.large import make_large_kernel
from moe_numba.gate.one_token_per_warp import GateConfig, make_kernel as make_gate
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.grouped_gemm.wgmma.kernel import make_kernel as make_gemm
"""
    config = "GateConfig(256, 8, 4, 8, 0, True, 'sigmoid', 'float32', 'float32', 16, 16)"
    gate = ["float32*", "float32*", "float32*", "int32*", "int32", "int64", "int32", "float32", "float32"]
    align = ["int32*"] * 6 + ["int32"] * 6
    codes = compile_apart(
        source,
        {
            "gate": (f"make_gate({config})", gate, None, False),
            "align": ("make_large_kernel(512, 288, 8, False, False)", align, 512, False),
            "gemm": ("make_gemm(GemmConfig(subtile_m=16, mma_n=(16,), stages=11))[0]", SIGNATURE, THREADS, True),
        },
    )
    for name, counts in InstructionMix(codes).counts.items():
        assert counts.get("other", 0) == 0, (name, sorted({o.partition(".")[0] for o in codes[name].opcodes}))
    assert InstructionMix(codes)["gemm"]["tensor core"] and InstructionMix(codes)["gate"]["special function"]
