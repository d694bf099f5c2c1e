"""Compilation before the first call: which calls a module makes, and that their kernels are compiled."""

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import moe_numba
from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.moe_layer import ExpertParallelMoE, Experts, MoELayer, warm_up
from moe_numba.runtime import compile_calls


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


FP8 = torch.float8_e4m3fn
ROWS = [  # options, ranks, functions that a layer with 3 tokens calls, rows of its experts, strides of their scales
    (dict(), 2, ["get_dispatch_layout"], 3, None),
    (dict(num_worst_tokens=1026), 2, ["get_dispatch_layout"], 1026, None),
    (dict(num_worst_tokens=6), 2, [], 6, None),
    (dict(low_latency_tokens=5), 1, [], 5, None),
    (dict(fp8_dispatch=True), 1, ["get_dispatch_layout", "per_token_cast_to_fp8"], 3, (1, 1)),
    (dict(fp8_dispatch=True, low_latency_tokens=5), 2, [], 10, (1, 10)),
]


@pytest.mark.parametrize("options, ranks, functions, rows, strides", ROWS)
def test_the_calls_of_distributed_experts(options, ranks, functions, rows, strides):
    """The experts compute received rows, whose number is not that of the tokens."""

    def work(transport):
        buffer = Buffer(transport, 1 << 20)
        experts = Experts(2, 128, 128, FP8, transport.device)
        layer = ExpertParallelMoE(buffer, experts, **options)
        assert warm_up.distributed_layers(layer) == [layer]
        found = warm_up.calls_of(layer, 3, topk=2, topk_ids_dtype=torch.int64)
        buffer.destroy()
        return found

    for calls in LocalGroup(ranks).run(work):
        assert [call.function for call in calls] == [*functions, "fused_experts"]
        given = dict(calls[-1].arguments)
        assert given["x"].shape == (rows, 128) and given["topk_ids"] == ((rows, 2), (2, 1), torch.int64)
        assert getattr(given.get("x_scale"), "stride", None) == strides


CALL = "import pickle, sys; calls = pickle.loads(bytes.fromhex(sys.argv[1])); [call() for call in calls]; print('made')"


def test_calls_can_be_made_in_a_process_that_has_imported_nothing(device):
    """As the processes that compile."""

    def work(transport):
        buffer = Buffer(transport, 1 << 20)
        layer = ExpertParallelMoE(buffer, Experts(2, 128, 128, FP8, transport.device), fp8_dispatch=True)
        calls = warm_up.calls_of(layer, 1, topk=2)
        buffer.destroy()
        return calls[:-1]

    (calls,) = LocalGroup(1).run(work)
    assert [call.function for call in calls] == ["get_dispatch_layout", "per_token_cast_to_fp8"]
    env = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "-c", CALL, pickle.dumps(calls).hex()]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == "made\n", done.stderr


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Let `warm_up` believe that it compiles; list the numbers of calls, or raise the error in ``fails``."""
    found = SimpleNamespace(sizes=[], fails=None)

    def compile_all(calls, processes, progress):
        if found.fails:
            raise found.fails
        found.sizes.append(len(calls))
        return 7

    monkeypatch.setattr(warm_up, "_compile", compile_all)
    monkeypatch.setattr(warm_up, "simulator", SimpleNamespace(ENABLED=False))
    monkeypatch.setenv("MOE_NUMBA_CACHE", str(tmp_path))
    return found


def warm_up_on_ranks(ranks, seen, **options):
    def work(transport):
        buffer = Buffer(transport, 1 << 20)
        experts = Experts(1, 64, 64, device=transport.device)
        for parameter in experts.parameters():
            parameter.data.zero_()
        layer = ExpertParallelMoE(buffer, experts, **options)
        layer.register_forward_hook(lambda _, given, out: seen.append((transport.rank, type(out), len(given))))
        total = moe_numba.warm_up(layer, [1, 2], topk=1, progress=False)
        buffer.destroy()
        return total

    return LocalGroup(ranks).run(work)


@pytest.mark.parametrize("options", [dict(num_worst_tokens=4), dict(low_latency_tokens=2), dict()])
def test_one_rank_compiles_and_all_call_the_layer(options, compiled):
    seen = []
    assert warm_up_on_ranks(2, seen, **options) == [7, 7]
    assert len(compiled.sizes) == 1, "the other rank compiles nothing"
    if not options:  # 1 to 4 received rows; the layouts of as many tokens
        assert compiled.sizes == [8]
    for rank in (0, 1):
        assert [kind for r, kind, _ in seen if r == rank].count(torch.Tensor) == 2, "without and with shared"


def test_an_error_of_the_rank_that_compiles_is_raised(compiled):
    compiled.fails = ValueError("no compiler")
    with pytest.raises(ValueError, match="no compiler"):
        warm_up_on_ranks(2, [], low_latency_tokens=2)


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
    with pytest.raises(TypeError, match="topk_ids_dtype is torch.float32"):
        moe_numba.warm_up(layer.experts, topk=2, topk_ids_dtype=torch.float32)


@pytest.mark.skipif(not simulator.ENABLED, reason="a GPU compiles")
def test_the_simulator_has_nothing_to_compile():
    assert moe_numba.warm_up(MoELayer(4, 64, 64, 2), [1, 2]) == 0


def test_cores_are_counted_on_systems_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert compile_calls.usable_cores() == os.cpu_count()


# Without ``if __name__ == "__main__"``: the processes must not run the caller's script.
COMPILE = """
import os
from functools import partial

from moe_numba.moe_layer import MoELayer
from moe_numba.moe_layer.warm_up import calls_of
from moe_numba.runtime.compile_calls import compile_calls
from moe_numba.runtime.device import H200

print("once")
calls = calls_of(MoELayer(8, 64, 64, 2), 1)
print(*compile_calls(calls, H200, processes=2))
for bad in calls[0]._replace(function="no_function"), partial(os._exit, 1):
    try:
        print(*compile_calls([bad] * 1000, H200))
    except Exception as error:
        print(type(error).__name__, str(error).partition(";")[0])
"""


def test_kernels_are_compiled_into_the_cache(tmp_path):
    """The gate, and two matrix-vector kernels; then a call that raises an error, and one that ends its process."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(COMPILE)
    env = os.environ | {"MOE_NUMBA_SIMULATE": "0", "MOE_NUMBA_CACHE": str(cache)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("once\n(") and done.stdout.count("once") == 1, done.stdout + done.stderr
    *_, compiled, refused, killed = done.stdout.splitlines()
    assert compiled.endswith("(3, 3)")
    assert refused == "KeyError 'no_function'" and killed == "RuntimeError a process that compiles kernels ended"
    assert len(list(cache.glob("*.cubin"))) == 3
