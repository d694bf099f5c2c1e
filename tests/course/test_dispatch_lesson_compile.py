"""What the compiler makes of the kernels of "Dispatch" at the sizes whose times are recorded."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/12_dispatch.py"
P, I = "int32*", "int32"  # noqa: E741
RING = [P, P, "uint8*", I, P, P, P, P, P, P, "uint64*", P, P, I]
STEPS = {  # what a step adds to the one before, and its threads
    "our port of DeepEP's ring": ("clear=clear", 768),
    "head at the sender": ("head_at_sender=True", 768),
    "one warp per token": ("warp_per_token=True", 480),
    "TMA, packed slots": ("tma=True", 480),
    "a signalling warp": ("signal=signal", 512),
    "own rows without a ring": ("own_rows=True", 512),
    "receivers help": ("helping=True", 512),
    "balanced channels": ("take=take", 512),
    "FP8 rows": ("fp8=True", 512),
}
DIRECT = [P, P, "uint8*", I, P, P, "uint64*", P, P, I]
OTHERS = {
    "naive": ("kernel_of(Version(make_naive, kind='naive'))", [P, P, "uint64*", P, I], 1024),
    "direct writes": ("kernel_of(Version(make_direct, take=take, kind='direct'))", DIRECT, 480),
    "the check's copy": ("_read", [P, P, I], 512),
    "notify": ("notify", ["uint8*", P, I, I, "uint64*", P, I, I, I, P, P, P], 1024),
}
BULK = list(STEPS)[3:]
MOST_SPILLED = 64  # bytes of a thread of the 768, which can have 80 registers each


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = [
        node
        for node in ast.parse(NOTEBOOK.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
    ]
    answers = "from moe_numba.course.lessons.dispatch.answers import rows_of, signal, take, wait_for_space"
    of_runs = "from moe_numba.course.lessons.dispatch.runs import _read, kernel_of"
    return "\n\n".join([answers, of_runs, *map(ast.unparse, kept)])


@pytest.fixture(scope="module")
def codes():
    requests, switches = {}, []
    for name, (switch, threads) in STEPS.items():
        switches.append(switch)
        requests[name] = f"kernel_of(Version(make_dispatch, {', '.join(switches)}))", RING, threads, True
    others = {name: (text, signature, threads, True) for name, (text, signature, threads) in OTHERS.items()}
    return compile_apart(source(), requests | others)


@pytest.mark.parametrize("name", [*STEPS, *OTHERS])
def test_registers_suffice(name, codes):
    code = codes[name]
    most = MOST_SPILLED if name == "head at the sender" else 0
    assert code.complaints == [] and code.spilled_bytes <= most and code.stack_bytes <= most // 4
    threads = STEPS[name][1] if name in STEPS else OTHERS[name][2]
    assert code.registers * threads <= 65536


@pytest.mark.parametrize("name", STEPS)
def test_switches_that_are_off_leave_no_code(name, codes):
    code, bulk = codes[name], name in BULK
    assert bool(code.count("UBLKCP")) == bulk  # bulk copies
    assert bool(code.count("ATOMG", "ATOM")) == (name in ("balanced channels", "FP8 rows"))
    assert code.count("MEMBAR") > 0 and code.count("LDG.E.STRONG.SYS") > 0  # releases or fences, and polls
