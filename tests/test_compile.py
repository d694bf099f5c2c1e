"""Every kernel compiles for a Hopper GPU without one: registers, spills, and the instructions it must contain."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba.runtime.sass import disassembler

ROOT = Path(__file__).parents[1]
GATE = ("float32*", "int32*", "int32", "int64", "int32", "float32", "float32")  # after the logits and the bias

# Run in a process of its own, since Numba has either its compiler or its simulator.
COMPILE = """
import json, sys, tempfile, subprocess, importlib
from moe_numba.gate.kernel import Constants
from moe_numba.runtime.compile import compile_kernel
for module, factory, constants, signature, launch_bounds in json.load(sys.stdin):
    make = getattr(importlib.import_module(module), factory)
    constants = [Constants(*c) if isinstance(c, list) else c for c in constants]
    bounds = tuple(launch_bounds) if launch_bounds else None
    compiled = compile_kernel(make(*constants), tuple(signature), launch_bounds=bounds)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.code.code)
        file.flush()
        sass = subprocess.run([sys.argv[1], "-c", file.name], capture_output=True, text=True, check=True).stdout
    print(json.dumps({"log": compiled.log, "sass": sass}))
"""


def compile_all(kernels):
    """What ptxas said of each kernel, and its machine code."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, disassembler()],
        input=json.dumps(kernels),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Report(**json.loads(line)) for line in done.stdout.splitlines()]


class Report:
    def __init__(self, log, sass):
        self.registers = int(re.search(r"Used (\d+) registers", log)[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
        self.stack = int(re.search(r"(\d+) bytes stack frame", log)[1])
        self.instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass)

    def count(self, prefix):
        return sum(i == prefix or i.startswith(prefix + ".") for i in self.instructions)


def gate(factory, experts, groups, kept, topk, dtype="float32", word_bytes=16, bounds=None):
    module = {"make_kernel": "kernel", "make_throughput_kernel": "kernel_4tokens"}[factory]
    constants = [experts, groups, kept, topk, 0, True, "sigmoid", dtype, "float32", word_bytes, word_bytes]
    x = "float32*" if dtype == "float32" else "uint16*"
    return [f"moe_numba.gate.{module}", factory, [constants], [x, "float32*", *GATE], bounds]


ROUTERS = {
    "deepseek_v3": gate("make_kernel", 256, 8, 4, 8),
    "deepseek_v3_bfloat16": gate("make_kernel", 256, 8, 4, 8, "bfloat16"),
    "deepseek_v3_float16": gate("make_kernel", 256, 8, 4, 8, "float16"),
    "kimi_k2": gate("make_kernel", 384, 1, 1, 8),
    "widest": gate("make_kernel", 1024, 1, 1, 32),
    "sixteen_groups": gate("make_kernel", 512, 16, 8, 16),
    "many": gate("make_throughput_kernel", 256, 8, 4, 8, bounds=(128, 6)),
    "many_bfloat16": gate("make_throughput_kernel", 256, 8, 4, 8, "bfloat16", bounds=(128, 6)),
}
DYNAMIC = [
    "moe_numba.gate.kernel_generic",
    "make_dynamic_kernel",
    [],
    ["float32*", "float32*", *GATE, *["int32"] * 6],
    None,
]


ALIGN = [*["int32*"] * 5, *["int32"] * 6]
CONSTANTS = [256, 8, 4, 8, 0, True, "sigmoid", "float32", "float32", 16, 16]
FUSED = ["float32*", "float32*", *GATE, *["int32*"] * 4, *["int32"] * 6]


def fused(factory, *constants, bounds):
    return ["moe_numba.gate_align", factory, [tuple(CONSTANTS), False, *constants, False, False], FUSED, bounds]


ALIGNERS = {
    "tiny": ["moe_numba.align.kernel_small", "make_tiny_kernel", [True, False, False], ALIGN, [1024, 1]],
    "few": ["moe_numba.align.kernel_medium", "make_few_kernel", [512, 8, 288, False, False], ALIGN, [512, 1]],
    "few_8192": ["moe_numba.align.kernel_medium", "make_few_kernel", [1024, 8, 8224, True, True], ALIGN, [1024, 1]],
    "many_slots": [
        *("moe_numba.align.kernel_large", "make_many_kernel", [512, 288, 8, False, False]),
        *(["int32*", *ALIGN], [512, 1]),
    ],
    "many_slots_8192": [
        *("moe_numba.align.kernel_large", "make_many_kernel", [512, 8224, 8, True, True]),
        *(["int32*", *ALIGN], [512, 1]),
    ],
    "fused_tiny": fused("make_tiny_kernel", True, bounds=[1024, 1]),
    "fused_cluster": fused("make_cluster_kernel", 288, bounds=[256, 1]),
}

APPENDED = ["float32*", "int32*", "float32*", "int32*", *["int32"] * 5, "uint32", "uint32", "float32"]
SHARED = {
    f"shared_{policy}": ["moe_numba.shared_experts.kernel", "make_fuse_kernel", [policy], APPENDED, [128, 1]]
    for policy in ("all", "round_robin", "random")
}


@pytest.fixture(scope="module")
def reports():
    every = {**ROUTERS, "dynamic": DYNAMIC, **ALIGNERS, **SHARED}
    return dict(zip(every, compile_all(list(every.values())), strict=True))


@pytest.mark.parametrize("name", ["tiny", "few", "many_slots", "fused_tiny", "fused_cluster"])
def test_alignment_stays_in_registers_and_in_its_kinds_of_memory(name, reports):
    """Neither a stack, nor loads and stores that have to find out which memory they are for."""
    report = reports[name]
    assert report.spilled == report.stack == report.count("LDL") == report.count("STL") == report.count("LD") == 0
    assert report.count("ST") == (8 if name == "fused_cluster" else 0)  # to eight blocks' shared memory
    assert report.registers <= {"many_slots": 128}.get(name, 64)


@pytest.mark.parametrize("name", ["few_8192", "many_slots_8192"])
def test_alignment_compiles_for_most_experts(name, reports):
    assert reports[name].spilled == 0


@pytest.mark.parametrize("name, batch", [("few", 8), ("many_slots", 8), ("fused_cluster", 2)])
def test_a_count_is_one_instruction_that_asks_for_no_answer(name, batch, reports):
    assert reports[name].count("ATOMS.POPC.INC.32") == batch


def test_counts_are_handed_over_without_fences(reports):
    report = reports["many_slots"]
    assert report.count("LDG.E.128.STRONG.GPU") >= 8 and report.count("STG.E.64.STRONG.GPU")
    assert report.count("MEMBAR") == 0


def test_a_cluster_meets_twice(reports):
    report = reports["fused_cluster"]
    assert report.count("UCGABAR_ARV") == report.count("UCGABAR_WAIT") == 2
    assert report.count("REDUX.MAX.S32") == 8 and report.count("WARPSYNC.COLLECTIVE") == 0


@pytest.mark.parametrize("name", ROUTERS)
def test_everything_stays_in_registers(name, reports):
    report = reports[name]
    assert report.spilled == report.stack == report.count("LDL") == report.count("STL") == 0
    assert report.registers <= {"widest": 168, "many": 84, "many_bfloat16": 84}.get(name, 128)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_bfloat16", "deepseek_v3_float16", "kimi_k2", "many"])
def test_rows_are_read_16_bytes_at_a_time(name, reports):
    assert reports[name].count("LDG.E.128.CONSTANT") >= 2


def test_a_pick_is_one_reduction(reports):
    assert reports["deepseek_v3"].count("REDUX.MAX.S32") == 8
    assert reports["kimi_k2"].count("REDUX.MAX.S32") == 8


def test_the_warp_is_known_to_be_whole(reports):
    """Where the compiler is unsure it adds a second copy of each reduction for a warp that has parted."""
    assert reports["deepseek_v3"].count("WARPSYNC.COLLECTIVE") == 0


def test_the_deal_goes_through_shared_memory_16_bytes_at_a_time(reports):
    for name in ("many", "many_bfloat16"):
        assert reports[name].count("STS.128") == reports[name].count("LDS.128") == 16


def test_special_operations_are_the_fast_ones(reports):
    for name in ("deepseek_v3", "many"):
        assert reports[name].count("MUFU.EX2") and reports[name].count("MUFU.RCP")


def test_dependent_launch_is_in_every_kernel(reports):
    """griddepcontrol.wait and .launch_dependents, by the names that the machine code has for them."""
    for report in reports.values():
        assert report.count("ACQBULK") == report.count("PREEXIT") == 1


def test_the_dynamic_kernel_compiles(reports):
    assert reports["dynamic"].spilled == 0


@pytest.mark.parametrize("name", SHARED)
def test_appending_shared_experts_is_a_small_kernel(name, reports):
    assert reports[name].spilled == 0 and reports[name].registers <= 32


def test_a_kernel_that_spills_is_seen():
    """The check above can fail: squeezed into 32 registers, the same kernel spills."""
    (report,) = compile_all([gate("make_kernel", 1024, 1, 1, 8, bounds=(1024, 2))])
    assert report.spilled > 0 and report.registers <= 32
