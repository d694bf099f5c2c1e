"""What the compiler makes of the grouped GEMM's kernels; no GPU is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_compile import _disassembler

ROOT = Path(__file__).parents[1]

# Run in a process of its own, since Numba has either its compiler or its simulator.
COMPILE = """
import json, subprocess, sys, tempfile
from moe_numba.grouped_gemm.constants import THREADS, Constants
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.program import compile_program
SIGNATURE = ("tensormap", "tensormap", "int32*", "float32*", *("int32*",) * 2, *("float32*",) * 2, *("int32",) * 5)
for given in json.load(sys.stdin):
    given["sizes"] = tuple(given["sizes"])
    kernel, shared_bytes = make_kernel(Constants(**given))
    code, log = compile_program(kernel, SIGNATURE, THREADS)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.code)
        file.flush()
        sass = subprocess.run([sys.argv[1], "-c", file.name], capture_output=True, text=True, check=True).stdout
    print(json.dumps({"log": log, "sass": sass, "shared_bytes": shared_bytes}))
"""

FORMS = {
    "decode": dict(tokens=16, sizes=[16], stages=11),
    "prefill": dict(tokens=144, parts=2, sizes=[144, 128], stages=4),
    "decode, blocks": dict(scaling="block", tokens=16, sizes=[16], stages=11),
    "prefill, blocks": dict(scaling="block", tokens=128, parts=2, sizes=[128], stages=4),
    "two blocks": dict(tokens=136, parts=2, sizes=[136], stages=4, cluster=2),
    "activated": dict(activated=True, tokens=128, sizes=[128], stages=4),
    "activated, blocks": dict(activated=True, scaling="block", tokens=64, sizes=[64], stages=5),
    "bf16": dict(dtype="bf16", scaling="none", tokens=256, sizes=[256], stages=4),
}
SHARED_BYTES = 227 * 1024  # that a block of a Hopper GPU may have


@pytest.fixture(scope="module")
def reports():
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, _disassembler()],
        input=json.dumps(list(FORMS.values())),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(FORMS, map(json.loads, done.stdout.splitlines()), strict=True))


def opcodes(report):
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", report["sass"])


@pytest.mark.parametrize("form", FORMS)
def test_hoppers_instructions_are_used(form, reports):
    found = opcodes(reports[form])
    multiplication = "HGMMA" if form == "bf16" else "QGMMA"
    for wanted in (multiplication, "UTMALDG", "SYNCS", "USETMAXREG", "STSM"):  # and no call, which would stop them all
        assert any(o.split(".")[0] == wanted for o in found), wanted
    assert not any(o.split(".")[0] == "CALL" for o in found)


@pytest.mark.parametrize("form", FORMS)
def test_the_compiler_gave_nothing_up(form, reports):
    """It says so where it ignores setmaxnreg, or lets a multiplication end before it starts the next instruction."""
    assert "Potential Performance Loss" not in reports[form]["log"]
    assert reports[form]["shared_bytes"] <= SHARED_BYTES


@pytest.mark.parametrize("form", FORMS)
def test_the_multiplying_warps_do_not_spill(form, reports):
    """Of what the compiler puts into local memory, nothing lies between the first multiplication and the last."""
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", reports[form]["log"])))
    if "blocks" not in form:
        assert spilled == 0
    found = opcodes(reports[form])
    places = [i for i, o in enumerate(found) if o.split(".")[0] in ("QGMMA", "HGMMA")]
    assert not {"LDL", "STL"} & {o.split(".")[0] for o in found[places[0] : places[-1]]}
