"""Compilation before the first call: which calls a module makes, and that their kernels are compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_numba
from moe_numba import simulator
from moe_numba.moe_layer import MoELayer, warm_up

ROOT = Path(__file__).parents[2]


def test_the_calls_of_a_layer_are_those_of_its_forward_pass(device, monkeypatch):
    layer = MoELayer(8, 64, 64, 2, has_correction_bias=True, scoring="sigmoid").to(device).requires_grad_(False)
    (call,) = warm_up.calls_of(layer, 5)
    arguments = dict(call.arguments)
    assert call.function == "fused_moe" and arguments["x"] == ((5, 64), (64, 1), torch.bfloat16)
    assert arguments["router_logits"].shape == (5, 8) and arguments["topk"] == 2
    made = []
    monkeypatch.setattr(warm_up, "public_function", lambda name: lambda **given: made.append(given))
    call()
    (given,) = made
    assert {name: value.shape for name, value in given.items() if isinstance(value, torch.Tensor)} == {
        name: value.shape for name, value in call.arguments if isinstance(value, warm_up.Empty)
    }
    assert set(warm_up.calls_of(layer, 5)) == {call} != set(warm_up.calls_of(layer, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_the_calls_of_experts(dtype, device):
    experts = MoELayer(4, 128, 128, 2, dtype=dtype).to(device).requires_grad_(False).experts
    (call,) = warm_up.calls_of(experts, 3, topk=2)
    assert call.function == "fused_experts" and dict(call.arguments)["x"].shape == (3, 128)
    if simulator.ENABLED:
        call()


def test_the_calls_of_a_model(device):
    transformers = pytest.importorskip("moe_numba.integrations.transformers")
    from helpers.tiny_models import make_model

    transformers.register()
    model = make_model("DeepseekV3", device)
    model.set_experts_implementation("moe_numba")
    assert [call.function for call in warm_up.calls_of(model, 3)] == ["fused_experts"]
    transformers.fuse_routers(model)
    calls = warm_up.calls_of(model, 3)
    assert [call.function for call in calls] == ["biased_grouped_topk", "fused_experts"], "layers of equal sizes once"
    assert dict(calls[1].arguments)["topk_ids"] == ((3, 2), (2, 1), torch.int64)


def test_what_cannot_be_warmed_up_is_refused(device):
    layer = MoELayer(4, 64, 64, 2).to(device).requires_grad_(False)
    for arguments, message in (
        ((torch.zeros(2),), "module is Tensor; it must be"),
        ((torch.nn.Linear(2, 2),), "module is a Linear without experts"),
        ((layer, [1, 0]), r"tokens\[1\] is 0; it must be 1 or more"),
        ((layer, [1.5]), r"tokens\[0\] is 1.5; it must be an int"),
        ((layer.experts, [1]), "topk is None; it is required for Experts"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            moe_numba.warm_up(*arguments)
    with pytest.raises(ValueError, match="processes is 0"):
        moe_numba.warm_up(layer, processes=0)


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU compiles")
def test_the_simulator_has_nothing_to_compile():
    assert moe_numba.warm_up(MoELayer(4, 64, 64, 2), [1, 2]) == 0


# Without ``if __name__ == "__main__"``: the processes must not run the caller's script.
COMPILE = """
from moe_numba.moe_layer import MoELayer
from moe_numba.moe_layer.warm_up import calls_of
from moe_numba.runtime.compile_calls import compile_calls
from moe_numba.runtime.device import H200

print("once")
calls = calls_of(MoELayer(8, 64, 64, 2), 1)
print(*compile_calls(calls, H200, processes=2))
"""


def test_kernels_are_compiled_into_the_cache(tmp_path):
    """The gate, and the two matrix-vector kernels of a token."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(COMPILE)
    env = os.environ | {"MOE_NUMBA_SIMULATE": "0", "MOE_NUMBA_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("once\n(") and done.stdout.count("once") == 1, done.stdout + done.stderr
    assert done.stdout.endswith("(3, 3)\n")
    assert len(list(cache.glob("*.cubin"))) == 3
