"""What `doctor` and the README say of each GPU is what the plans choose there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba import doctor
from moe_numba.__main__ import main
from moe_numba.course.pages import gpu_support, readme
from moe_numba.course.pages.topics import TOPICS
from moe_numba.runtime.device import gpu_like

ROOT = Path(__file__).parents[2]

# Calls each function in the simulator of an architecture; prints what its launches have.
PLANS = """
import json, torch, moe_numba
from moe_numba.expert_parallel import Buffer, get_dispatch_layout, per_token_cast_to_fp8
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.ptx import conversions
from moe_numba.runtime import launch
from moe_numba.runtime.compile import TENSOR_MAP

launches, kind = [], launch._SimulatedLauncher
new, start = kind.__init__, kind.__call__

def make(self, kernel, signature, options):
    new(self, kernel, signature, options)
    self.has = dict(options, tma=TENSOR_MAP in signature)

def record(self, *arguments):
    launches.append(self.has)
    start(self, *arguments)

def launches_of(call):
    launches.clear()
    try:
        call()
    except moe_numba.UnsupportedDeviceError as error:
        return str(error)
    return [{name: bool(given[name]) for name in ("cluster", "dependent", "tma")} for given in launches]

kind.__init__, kind.__call__ = make, record
x, bias, bf16 = torch.randn(9, 64), torch.randn(64), torch.bfloat16
ids = torch.zeros(2, 4, dtype=torch.int32)
groups = dict(num_expert_group=8, topk_group=4)
x_rows, weight = torch.ones(2, 64, dtype=bf16), torch.ones(1, 64, 64, dtype=bf16)
rows = torch.tensor([2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
functions = {
    "gate": lambda: moe_numba.biased_grouped_topk(x, bias, 4, **groups),
    "alignment": lambda: moe_numba.moe_align_block_size(ids, 16, 64),
    "shared-expert fusion": lambda: moe_numba.fuse_routing(torch.ones(2, 4), ids, 64),
    "dispatch layout": lambda: get_dispatch_layout(ids.long(), 64, 2),
    "grouped GEMM": lambda: moe_numba.group_gemm_bf16(x_rows, weight, *rows),
    "4-bit grouped GEMM": lambda: moe_numba.group_gemm_mxfp4(
        x_rows, torch.zeros(1, 1, 1, 2176, dtype=torch.uint8), *rows
    ),
    "k-grouped GEMM": lambda: moe_numba.k_grouped_gemm_bf16(x_rows, x_rows, *rows),
    "grouped GEMM with SwiGLU": lambda: moe_numba.group_gemm_silu_and_mul_bf16(
        x_rows, weight, *rows, activation="swigluoai"
    ),
    "experts of a layer": lambda: moe_numba.fused_experts(
        x_rows, weight.repeat(1, 2, 1), weight, torch.ones(2, 4), ids
    ),
}
found = {name: launches_of(call) for name, call in functions.items()}
launches_of_tokens = {
    tokens: launches_of(lambda: moe_numba.biased_grouped_topk_align(x[:tokens], bias, 4, 16, **groups))
    for tokens in (1, 8, 9)
}
found["fused gate and alignment"] = [tokens for tokens, made in launches_of_tokens.items() if len(made) == 1]
found["FP8 casts"] = conversions.cvt_rn_satfinite_e4m3x2_f32 is not conversions._e4m3x2_by_integers
per_token_cast_to_fp8(torch.ones(1, 128))
uses_tma = []
LocalGroup(1).run(lambda transport: uses_tma.append(RankState(transport, 1 << 16, 1.0).limits.uses_tma))
found["dispatch and combine"] = uses_tma[0]


def low_latency(transport):
    buffer = Buffer(transport, 0, low_latency_mode=True)
    plan, call = buffer.low_latency(1, 8, 1, 1, num_sms=1), (torch.zeros(1, 8).bfloat16(), torch.zeros(1, 1).long())
    chosen = launches_of(lambda: plan.dispatch(*call))
    plan.close()
    buffer.destroy()
    return chosen


found["low-latency mode"] = LocalGroup(1).run(low_latency)[0]
print(json.dumps(found))
"""


def plans(arch):
    """What the launches of each function have on a GPU of an architecture; the error of one that it lacks."""
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1", "MOE_NUMBA_ARCH": "{}{}".format(*arch)}
    done = subprocess.run([sys.executable, "-c", PLANS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def differences(table, chosen):
    """Name the functions whose rows in the table differ from what the plans choose."""
    wrong, paths = [], {row.name: (row.runs, row.path) for row in table}
    for name in ("gate", "alignment", "shared-expert fusion", "low-latency mode"):
        assert len(chosen[name]) == 1
        if ("without" not in paths[name][1]) != chosen[name][0]["dependent"]:
            wrong.append(name)
    if f"one launch up to {max(chosen['fused gate and alignment'])} tokens" not in paths["fused gate and alignment"][1]:
        wrong.append("fused gate and alignment")
    (launched,) = chosen["dispatch layout"]
    if ("one cluster" in paths["dispatch layout"][1]) != launched["cluster"]:
        wrong.append("dispatch layout")
    if ("integer" not in paths["FP8 casts"][1]) != chosen["FP8 casts"]:
        wrong.append("FP8 casts")
    if ("instead of TMA" not in paths["dispatch and combine"][1]) != chosen["dispatch and combine"]:
        wrong.append("dispatch and combine")
    for name in (name for name in chosen if name.startswith("grouped GEMM")):
        (runs, path), refused = paths[name], isinstance(chosen[name], str)
        if runs == refused or (runs and ("wgmma" in path) != chosen[name][0]["tma"]):
            wrong.append(name)
    runs, path = paths["grouped GEMM"]
    refused = isinstance(chosen["grouped GEMM"], str)
    layer, launches = paths["experts of a layer"][1], chosen["experts of a layer"]
    if ("needs" in layer) != isinstance(launches, str) or not (
        isinstance(launches, str) or ("without" not in layer) == launches[0]["dependent"]
    ):
        wrong.append("experts of a layer")
    if refused and path.partition("(")[2].rstrip(")") not in chosen["grouped GEMM"]:  # the instruction that it lacks
        wrong.append("grouped GEMM")
    runs, path = paths["4-bit grouped GEMM"]
    if runs == isinstance(chosen["4-bit grouped GEMM"], str):
        wrong.append("4-bit grouped GEMM")
    runs, path = paths["k-grouped GEMM"]
    refused = isinstance(chosen["k-grouped GEMM"], str)
    if (
        runs == refused
        or ("wgmma" in path.partition(":")[0]) != runs
        or (runs and not chosen["k-grouped GEMM"][0]["tma"])
    ):
        wrong.append("k-grouped GEMM")
    assert paths.keys() == chosen.keys()
    assert all(runs for name, (runs, _) in paths.items() if "grouped GEMM" not in name)
    return wrong


@pytest.mark.parametrize("arch", gpu_support.ARCHITECTURES, ids="{0[0]}{0[1]}".format)
def test_functions_take_the_paths_of_the_table(arch):
    chosen = plans(arch)
    assert differences(gpu_support.functions(gpu_like(arch)), chosen) == []
    if arch == (8, 0):  # the tables of other GPUs are wrong here
        assert "grouped GEMM" in differences(gpu_support.functions(gpu_like((7, 5))), chosen)
        assert "FP8 casts" in differences(gpu_support.functions(gpu_like((8, 9))), chosen)
        other = gpu_support.functions(gpu_like((9, 0)))
        other = [row._replace(path=row.path.replace("8 tokens", "9 tokens")) for row in other]
        assert len(differences(other, chosen)) == len(chosen)


def test_older_gpus_run_nothing():
    rows = gpu_support.functions(gpu_like((7, 0)))
    assert {row.path for row in rows} == {"needs compute capability 7.5"}
    assert not any(row.runs for row in rows + gpu_support.notebooks(gpu_like((7, 0))))


def test_paths_by_architecture():
    rows = gpu_support.by_name(gpu_support.functions)
    assert rows["dispatch layout"] == "7.5 to 8.9: one CTA instead of a cluster<br>9.0 and newer: one cluster of 8 CTAs"
    assert "8.0 to 8.9, 10.0 and newer: mma.sync" in rows["grouped GEMM"] and "<br>9.0: TMA" in rows["grouped GEMM"]
    notebooks = gpu_support.by_name(gpu_support.notebooks)
    assert "00_start_here, 01_gate_prompt, 03_align_published, 14_low_latency" in notebooks


def test_the_readme_has_the_table():
    block = readme.blocks()["docs/gpus.md"]["gpus"]
    assert block in (ROOT / "docs/gpus.md").read_text(), "run `python -m moe_numba readme`"


def test_doctor_prints_the_tables_of_an_architecture(capsys):
    assert main(["doctor", "--arch", "86"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("compute capability 8.6\n") and printed.splitlines() == doctor.describe(
        doctor.tables((8, 6), (8, 6))
    )
    capsys.readouterr(), main(["doctor", "--arch", "86", "--json"])
    assert json.loads(capsys.readouterr().out) == doctor.tables((8, 6), (8, 6))
    assert "\ngrouped GEMM              yes   mma.sync and cp.async\n" in printed
    assert main(["doctor", "--arch", "81"]) == 2
    assert "--arch is 81; it must be one of 75, 80, 86" in capsys.readouterr().err


def test_doctor_of_an_h200_that_takes_older_paths():
    """No kernel has wgmma, not even as code for 9.0 on a newer GPU."""
    rows = {row["name"]: row for row in doctor.tables((8, 0), (9, 0))["functions"]}
    assert rows["grouped GEMM"]["runs"] and rows["grouped GEMM"]["path"].startswith("mma.sync")
    rows = {row["name"]: row for row in doctor.tables((9, 0), (10, 0))["notebooks"]}
    assert not rows["06_hopper_gemm"]["runs"]


# Notebooks


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.notebook)
def test_notebooks_about_hopper_say_so(topic):
    source = (ROOT / "notebooks" / f"{topic.notebook}.py").read_text()
    assert ('\nos.environ["MOE_NUMBA_ONLY"] = "90"' in source) == topic.hopper


CHOOSE = """
import ctypes, os
from types import SimpleNamespace

class Nvml:
    nvmlInit_v2 = nvmlShutdown = lambda *_: 0
    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0
    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        return 0
    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = {}

load = ctypes.CDLL
ctypes.CDLL = lambda name, *more, **options: Nvml() if "nvidia-ml" in str(name) else load(name, *more, **options)
from moe_numba import simulator
from moe_numba.simulator import capability
print(simulator.ENABLED, capability.SIMULATED, simulator.REASON)
"""


@pytest.mark.parametrize(
    "gpu, arch, only, printed",
    [
        ((9, 0), "", "", "False (9, 0) a GPU was found"),
        ((9, 0), "", "90", "False (9, 0) a GPU was found"),
        ((8, 0), "", "", "False (9, 0) a GPU was found"),
        ((8, 0), "", "90", "True (9, 0) the kernels need compute capability 9.0, and the GPU has 8.0"),
        ((10, 0), "", "90", "True (9, 0) the kernels need compute capability 9.0, and the GPU has 10.0"),
        ((9, 0), "80", "90", "True (9, 0) the kernels need compute capability 9.0, and the GPU has 8.0"),
        ((9, 0), "80", "", "False (8, 0) a GPU was found"),
        ((10, 0), "90", "90", "True (9, 0) the kernels need compute capability 9.0, and the GPU has 10.0"),
    ],
)
def test_notebooks_about_one_architecture_are_simulated_on_others(gpu, arch, only, printed):
    given = {"MOE_NUMBA_ARCH": arch, "MOE_NUMBA_ONLY": only}
    environment = {name: value for name, value in os.environ.items() if "SIM" not in name} | given
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", CHOOSE.format(gpu)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout == printed + "\n", done.stderr[-2000:]
