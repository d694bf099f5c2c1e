"""GPUs other than Hopper: kernels give right results in the simulator, and refuse what a GPU lacks."""

import os
import subprocess
import sys

import pytest
import torch

from moe_numba import simulator
from moe_numba.ptx import conversions, warp
from moe_numba.ptx.capability import needed_by
from moe_numba.runtime import device as devices
from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.runtime.sass import resources
from moe_numba.simulator import capability


def test_spills_are_found():
    log = "ptxas info : 8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\nptxas info : Used 80 registers"
    assert resources(log) == {"registers": 80, "stack_bytes": 8, "spilled_bytes": 12}


SCRIPT = """
import torch, moe_numba
from moe_numba.align import reference as align
from moe_numba.expert_parallel import per_token_cast_back, per_token_cast_to_fp8
from moe_numba.expert_parallel import reference as ranks
from moe_numba.quantise import reference
from moe_numba.gate import reference as gate
from moe_numba.align.with_gate import biased_grouped_topk_align
from moe_numba.moe_layer import reference as layer

torch.manual_seed(0)
x, bias = torch.randn(9, 64), torch.randn(64)
groups = dict(num_expert_group=8, topk_group=4)
for tokens in (2, 9):  # one launch, and two
    weights, ids, *aligned = biased_grouped_topk_align(x[:tokens], bias, 4, 16, **groups)
    assert gate.mismatch(weights, ids, x[:tokens], bias, 4, **groups) is None
    assert align.mismatch(*aligned, ids, 16, 64) is None
many = torch.randint(0, 2000, (5, 8), dtype=torch.int32)
assert align.mismatch(*moe_numba.moe_align_block_size(many, 16, 2000), many, 16, 2000) is None
layout = moe_numba.get_dispatch_layout(ids.long(), 64, 2)
assert all(map(torch.equal, layout, ranks.dispatch_layout(ids.long(), 2, 64)))
values, scales = per_token_cast_to_fp8(x.repeat(1, 4))
right = reference.per_token_cast_to_fp8(x.repeat(1, 4))
assert torch.equal(values.view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(scales, right[1])
assert torch.equal(per_token_cast_back(values, scales), reference.per_token_cast_back(values, scales))
moe_numba.fuse_routing(weights, ids, 64)
for given in (ids, torch.randint(-1, 65, (1100, 8))):
    grouped = moe_numba.group_by_expert(given, 64)
    assert all(map(torch.equal, grouped, layer.group_by_expert(given, 64)))
rows = x.repeat(5, 1).bfloat16()
sums = moe_numba.weighted_sum(rows, grouped[3][:9, :4].contiguous(), weights)
assert torch.equal(sums, layer.weighted_sum(rows, grouped[3][:9, :4], weights))
activated, wanted = moe_numba.silu_and_mul(rows), layer.silu_and_mul(rows)
torch.testing.assert_close(activated, wanted.bfloat16(), rtol=2**-7, atol=0)
print("all right")
"""


def run(code, arch, **environment):
    """Run code in the simulator of a GPU of this architecture."""
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1", "MOE_NUMBA_ARCH": arch} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("arch", ["75", "80", "89"])
def test_functions_run_in_the_simulator_of_older_gpus(arch):
    done = run(SCRIPT, arch)
    assert done.stdout == "all right\n", done.stderr[-2000:]


IN_A_KERNEL = """
from moe_numba import simulator
from numba import cuda
from moe_numba.ptx.{} as instruction

def kernel():
    instruction()

simulator.run(cuda.jit(kernel), 1, 1, [])
"""
INSTRUCTIONS = {
    "the simulated GPU has 7.5": ("75", IN_A_KERNEL.format("cp_async import cp_async_commit_group")),
    "``fence.proxy.async`` needs compute capability 9.0": ("89", IN_A_KERNEL.format("fence import fence_proxy_async")),
    "MOE_NUMBA_ARCH is '81'; it must be one of 75, 80": ("81", "import moe_numba.ptx.warp"),
}


@pytest.mark.parametrize("sentence", INSTRUCTIONS)
def test_the_simulator_refuses_newer_instructions(sentence):
    done = run(INSTRUCTIONS[sentence][1], INSTRUCTIONS[sentence][0])
    assert done.returncode == 1 and sentence in done.stderr
    assert run(INSTRUCTIONS[sentence][1], "90").returncode == 0


@pytest.mark.parametrize(
    "ptx, needed",
    [
        ("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", (7, 5)),
        ("redux.sync.max.s32 $0, $2, $1;", (8, 0)),
        ("cp.async.cg.shared.global [$0], [$1], 16, $2;", (8, 0)),
        ("cp.async.bulk.commit_group;", (9, 0)),
        ("mbarrier.init.shared::cta.b64 [$0], $1;", (8, 0)),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", (9, 0)),
        ("cvt.rn.bf16x2.f32 $0, $1, $2;", (8, 0)),
        ("cvt.rn.satfinite.e4m3x2.f32 h, $1, $2;", (8, 9)),
        ("griddepcontrol.wait;", (9, 0)),
    ],
)
def test_what_instructions_need(ptx, needed):
    assert needed_by(ptx) == needed


# Integer instructions in place of conversions, and shuffles in place of redux.sync

if simulator.ENABLED:

    def test_conversions_by_integers():
        """All e4m3, the midpoints between them, their neighbours, and numbers out of range."""
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        numbers = codes[codes == codes].unique()
        middle = (numbers[1:] + numbers[:-1]) / 2
        inf = torch.tensor(float("inf"))
        numbers = torch.cat([numbers, middle, middle.nextafter(inf), middle.nextafter(-inf)])
        more = torch.tensor([449.0, 465.0, 1e9, float("inf"), float("nan"), 1e-9, 2.0**-10, 1 / 3, -0.0])
        for value in torch.cat([numbers, more, -more]).numpy():
            for name in ("cvt_rn_satfinite_e4m3x2_f32", "cvt_rn_bf16x2_f32"):
                by_integers = {"e": conversions._e4m3x2_by_integers, "b": conversions._bf16x2_by_integers}
                fallback = by_integers["e" if "e4m3" in name else "b"]
                assert fallback(value, -value) == getattr(conversions, name)(value, -value), (name, value)
        for pair in range(1 << 16):
            right = conversions.e4m3x2_as_floats(pair)
            for given, want in zip(conversions._floats_by_integers(pair), right, strict=True):
                assert given.tobytes() == want.tobytes() or (given != given and want != want)

    def test_reductions_by_shuffles():
        from numba import cuda, int32

        def kernel(values, out):
            lane = int32(cuda.threadIdx.x)
            out[lane] = warp._max_by_shuffles(warp.FULL_MASK, values[lane])
            out[32 + lane] = warp._sum_by_shuffles(warp.FULL_MASK, values[lane])

        values, out = torch.randint(-(1 << 31), (1 << 31) - 1, (32,), dtype=torch.int32), torch.zeros(64).int()
        simulator.run(cuda.jit(kernel), 1, 32, [values.numpy(), out.numpy()])
        assert (out[:32] == values.max()).all() and (out[32:] == values.sum(dtype=torch.int32)).all()


def test_plans_see_the_requested_architecture(monkeypatch):
    """On an H200 with MOE_NUMBA_ARCH=80: sm_80's shared memory, PTX for sm_80, machine code for sm_90."""
    properties = type("Properties", (), {})()
    for name, value in dict(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132).items():
        setattr(properties, name, value)
    properties.shared_memory_per_block_optin = 227 * 1024
    monkeypatch.setattr(devices, "simulator", type("Off", (), {"ENABLED": False}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for text, seen in (("", (9, 0)), ("80", (8, 0)), ("75", (7, 5)), ("89", (8, 9))):
        monkeypatch.setenv(capability.VARIABLE, text)
        gpu = devices.gpu_of.__wrapped__(0)
        assert gpu.capability == seen and gpu.shared_bytes == devices.shared_bytes_of(seen)
        assert gpu.arch == ((9, 0, "a") if not text else seen) and gpu.hardware_arch[:2] == (9, 0)
        assert gpu.has_clusters == (not text)
    monkeypatch.setenv(capability.VARIABLE, "120")
    with pytest.raises(UnsupportedDeviceError, match="MOE_NUMBA_ARCH asks for compute capability 12.0; NVIDIA H200"):
        devices.gpu_of.__wrapped__(0)
