"""Checks of repeated launches against those of a call that is made anew; ``tests/runtime/test_replay.py`` runs them.

Each check is a function of this module, in a process of its own without the simulator; see ``fake_driver.py``.
"""

import threading
import traceback
import weakref
from functools import partial

import torch
from test_moe_layer_formats import CASES, make_inputs, workspace_of

import moe_numba
from helpers import fake_driver
from helpers.fake_driver import launched_by
from helpers.placements import make_placement
from moe_numba import fused_experts, fused_moe, prepare
from moe_numba.quantise.reference import per_token_cast_to_fp8
from moe_numba.runtime import replay

TOKENS = 1, 5, 200  # matrix-vector kernels where they exist; gathered rows; rows in the order of the experts
ROUTED = "topk_weights", "topk_ids"
_record, recorded = replay.Replay._record, []
replay.Replay._record = lambda self, tensors: recorded.append(self) or _record(self, tensors)


def anew(call):
    """Return the launches of a call that repeats none."""
    replay._is_replayed = lambda: False
    try:
        return launched_by(call)
    finally:
        replay._is_replayed = lambda: True


def check(call):
    """Check that a call makes the same launches, word by word, as one that repeats none."""
    launched, expected = launched_by(call), anew(call)
    assert launched and launched == expected, f"launched {launched}\nexpected {expected}"
    return launched


def copies(given):
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}


def formats():
    """Return the arguments of a call of ``fused_experts`` by case."""
    for case in CASES:
        for tokens in TOKENS:
            yield (case, tokens), make_inputs(case, "cpu", tokens)
    given = make_inputs("MXFP4", "cpu")
    yield "no shared", given | dict(shared=None, topk_ids=given["topk_ids"].long())
    shape = torch.randn(4, 256, 256), torch.randn(4, 256, 128)
    scaled = dict(w13_scale=torch.ones(4, 2, 2), w2_scale=torch.ones(4, 2, 1))
    blocks = dict(w13=shape[0].to(torch.float8_e4m3fn), w2=shape[1].to(torch.float8_e4m3fn), **scaled)
    for tokens in TOKENS:
        rows = {name: given[name][:1].repeat(tokens, 1) for name in ROUTED}
        x = torch.randn(tokens, 256).bfloat16()
        yield ("block scales", tokens), blocks | rows | dict(x=x)
        values, scales = per_token_cast_to_fp8(x)
        yield ("block scales, x in FP8", tokens), blocks | rows | dict(x=values, x_scale=scales)


def test_other_addresses_and_streams():
    for name, given in formats():
        recorded.clear()
        for stream in (7, 7, 9, 0):
            fake_driver.STREAM_OF[0] = stream
            given = copies(given)
            out, workspace = torch.empty(given["x"].shape, dtype=torch.bfloat16), workspace_of(given)
            launched = check(partial(fused_experts, **given, out=out, workspace=workspace))
            assert {launch.config[-1] for launch in launched} == {stream}
        assert len(recorded) == 1, f"{name}: recorded {len(recorded)} times"
    fake_driver.STREAM_OF[0] = 7


def test_a_workspace_of_another_size_and_a_call_without():
    """Only the addresses of the intermediate results differ, and they are as far apart."""
    for name, given in formats():
        out, launches = torch.empty(given["x"].shape, dtype=torch.bfloat16), []
        few, many = workspace_of(given), workspace_of(given | dict(topk_ids=given["topk_ids"].repeat(3, 1)))
        for workspace in (few, many, None):
            call = partial(fused_experts, **given, out=out, workspace=workspace)
            launches.append(check(call) if workspace else launched_by(call))
        known = {t.data_ptr() for t in (*given.values(), out) if isinstance(t, torch.Tensor)}
        words = [
            [
                int.from_bytes(argument[:8], "little")
                for launch in of_call
                for argument in launch.arguments
                if len(argument) > 4
            ]
            for of_call in launches
        ]
        for other in words[1:]:
            distances = {b - a for a, b in zip(words[0], other, strict=True) if a != b}
            assert len(distances) == 1 and not known & {a for a, b in zip(words[0], other, strict=True) if a != b}, name


def test_outputs_that_are_inputs():
    given = make_inputs("gpt-oss", "cpu")
    plain = partial(fused_experts, workspace=workspace_of(given))
    for kept in (None, "x", "shared", None, "x"):
        for arguments in (given, copies(given)):
            out = torch.empty_like(given["x"]) if kept is None else arguments[kept]
            check(partial(plain, **arguments, out=out))
    same = given | dict(shared=given["x"])
    check(partial(plain, **same, out=torch.empty_like(given["x"])))


def test_alignments():
    """Other alignments, other launches: kernels with vector loads of scales, for example."""
    for _, given in formats():
        for moved in ("topk_ids", "w13_scale", "a1_scale", "x_scale"):
            if given.get(moved) is None:
                continue
            memory = torch.zeros(given[moved].numel() + 1, dtype=given[moved].dtype)
            other = given | {moved: memory[1:].view(given[moved].shape).copy_(given[moved])}
            out = torch.empty(given["x"].shape, dtype=torch.bfloat16)
            for arguments in (given, other, given, other):
                check(partial(fused_experts, **arguments, out=out, workspace=workspace_of(given)))


def test_refusals_of_later_calls():
    given = make_inputs("gpt-oss", "cpu")
    workspace, out = workspace_of(given), torch.empty_like(given["x"])
    good = given | dict(out=out, workspace=workspace)
    moved = torch.zeros(given["x"].numel() + 1, dtype=torch.bfloat16)[1:].view(given["x"].shape)
    freed = given["w2"].clone()
    freed.untyped_storage().resize_(0)
    bad = {
        "w13 requires grad": dict(w13=given["w13"].clone().requires_grad_()),
        "x is a negated view": dict(x=torch._neg_view(given["x"])),
        "out is a negated view": dict(out=torch._neg_view(out)),
        "out requires grad": dict(out=out.clone().requires_grad_()),
        "w2 has no memory": dict(w2=freed),
        "out overlaps w13": dict(out=given["w13"].view(-1)[: out.numel()].view(out.shape)),
        "x starts at address": dict(x=moved),
        "shared starts at address": dict(shared=moved),
        "out starts at address": dict(out=moved),
        "out is torch.bfloat16 (1, 64)": dict(out=torch.empty(1, 64, dtype=torch.bfloat16)),
        "topk_ids is on meta; it must be where x is": dict(topk_ids=given["topk_ids"].to("meta")),
        "workspace is for up to 1 tokens": dict(workspace=workspace_of(make_inputs("gpt-oss", "cpu", 1))),
        "workspace is int": dict(workspace=3),
        "alpha is True": dict(alpha=True),
        "limit is 0": dict(limit=0),
        "use_fast_accum is 1.0": dict(use_fast_accum=1.0),
    }
    for _ in range(2):
        check(partial(fused_experts, **good))
        for message, change in bad.items():
            fake_driver.launches.clear()
            try:
                fused_experts(**good | change)
            except (TypeError, ValueError) as error:
                assert message in str(error), (message, error)
            else:
                raise AssertionError(f"{message}: not refused")
            assert not fake_driver.launches, message


def moe_arguments(tokens=5, experts=16):
    draw = lambda *shape: torch.randn(shape).bfloat16()
    w13, w2 = draw(experts, 256, 128), draw(experts, 128, 128)
    return dict(x=draw(tokens, 128), router_logits=torch.randn(tokens, experts), correction_bias=None, w13=w13, w2=w2)


def test_the_gate_and_the_experts():
    for options in (dict(), dict(scoring="softmax"), dict(num_expert_group=4, topk_group=2), dict(topk=3)):
        for bias in (None, torch.randn(16)):
            for limit in (None, 3, 4, torch.tensor(3), torch.tensor([2], dtype=torch.int32)):
                for tokens in (5, 1):
                    recorded.clear()
                    for _ in range(2):
                        given = dict(topk=2) | moe_arguments(tokens) | options
                        given |= dict(correction_bias=bias, num_token_non_padded=limit)
                        workspace = moe_numba.ExpertsWorkspace(tokens, given["topk"], given["w13"], given["w2"])
                        check(partial(fused_moe, **given, out=torch.empty_like(given["x"]), workspace=workspace))
    for how, counts in (("round_robin", True), ("random", False)):
        given = moe_arguments(experts=25) | dict(topk=2, router_logits=torch.randn(5, 16))
        given |= dict(placement=make_placement(16, how=how, counts=counts), is_padding=torch.zeros(5, dtype=torch.bool))
        workspace = moe_numba.ExpertsWorkspace(5, 2, given["w13"], given["w2"])
        for _ in range(2):
            check(partial(fused_moe, **given, out=torch.empty_like(given["x"]), workspace=workspace))
    columns = torch.randn(5, 32)[:, 1:17]
    given = moe_arguments() | dict(router_logits=columns, topk=2)
    workspace = moe_numba.ExpertsWorkspace(5, 2, given["w13"], given["w2"])
    check(partial(fused_moe, **given, out=torch.empty_like(given["x"]), workspace=workspace))
    for change, message in (
        (dict(num_token_non_padded=-1), "num_token_non_padded is -1"),
        (dict(num_token_non_padded=1.5), "num_token_non_padded is float"),
        (dict(scoring="tanh"), "scoring is 'tanh'"),
        (dict(router_logits=columns.T), "router_logits has shape"),
    ):
        for tokens in (5, 0):
            cut = dict(x=given["x"][:tokens], router_logits=columns[:tokens])
            try:
                fused_moe(**given | cut | change)
            except (TypeError, ValueError) as error:
                assert message in str(error), (message, error)
            else:
                raise AssertionError(f"{message}: not refused with {tokens} tokens")


def gemm_arguments(kind, rows=24, groups=3, n=256, k=256):
    """Return a public function of the grouped GEMM, and the arguments of a call; the rows of x are gathered."""
    lengths = torch.full((groups,), rows // groups, dtype=torch.int32)
    starts = torch.arange(0, rows + 1, rows // groups, dtype=torch.int32)
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(groups, n, k).bfloat16()
    given = dict(x=x, weight=weight, seqlens=lengths, cu_seqlens=starts)
    if kind == "bf16":
        return moe_numba.group_gemm_bf16, given | dict(gather_indices=torch.arange(rows, dtype=torch.int32))
    given |= dict(x=x.to(torch.float8_e4m3fn), weight=weight.to(torch.float8_e4m3fn))
    if kind == "one scale per group":
        return moe_numba.group_gemm_pertensor_fp8, given | dict(y_scale=torch.ones(groups))
    given |= dict(x_scale=torch.ones(rows, k // 128), w_scale=torch.ones(groups, n // 128, k // 128))
    if kind == "rows of many groups":
        del given["seqlens"], given["cu_seqlens"]
        given |= dict(seqlens=None, cu_seqlens=None, m_indices=torch.arange(groups).repeat_interleave(8).int())
    return moe_numba.group_gemm_blockwise_fp8, given


def test_the_grouped_gemm():
    for kind in ("bf16", "one scale per group", "block scales", "rows of many groups"):
        recorded.clear()
        for stream in (7, 9):
            fake_driver.STREAM_OF[0] = stream
            function, given = gemm_arguments(kind)
            out = torch.empty(24, 256, dtype=torch.bfloat16)
            assert check(partial(function, **given, out=out))[-1].config[-1] == stream
        assert len(recorded) == 1, kind
        moved = torch.zeros(given["x"].numel() + 1, dtype=given["x"].dtype)[1:].view(given["x"].shape)
        for _ in range(2):
            try:
                function(**given | dict(x=moved), out=out)
            except ValueError as error:
                assert "x starts at address" in str(error), error
            else:
                raise AssertionError("an x that TMA cannot read was not refused")
    fake_driver.STREAM_OF[0] = 7


def test_prepared_calls():
    for name, given in formats():
        out, workspace = torch.empty(given["x"].shape, dtype=torch.bfloat16), workspace_of(given)
        call = partial(fused_experts, **given, out=out, workspace=workspace)
        expected = anew(call)
        prepared = prepare(fused_experts, **given, out=out, workspace=workspace)
        assert launched_by(prepared) == expected == launched_by(call), name
        fake_driver.STREAM_OF[0] = 9
        moved = [launch._replace(config=(*launch.config[:-1], 9)) for launch in expected]
        assert launched_by(prepared) == moved
        fake_driver.STREAM_OF[0] = 7


def test_threads():
    """Each thread has buffers of its own."""
    given, found = make_inputs("gpt-oss", "cpu"), []
    workspace, out = workspace_of(given), torch.empty_like(given["x"])
    call = partial(fused_experts, **given, out=out, workspace=workspace)
    expected = check(call)
    thread = threading.Thread(target=lambda: found.append(launched_by(call)))
    thread.start()
    thread.join()
    assert found == [expected] and launched_by(call) == expected


def test_no_tensor_is_kept():
    given = make_inputs("gpt-oss", "cpu")
    for _ in range(2):
        fused_experts(**given)
    seen = [weakref.ref(t) for t in given.values() if isinstance(t, torch.Tensor)]
    given.clear()
    assert all(ref() is None for ref in seen)


def test_errors_of_the_driver():
    given = make_inputs("gpt-oss", "cpu", 3)
    recorded.clear()
    fused_experts(**given)
    sequences = [s for r in recorded for _, s in r._recorded.values()]
    for sequence in sequences:
        sequence._start = lambda *_: 1
    try:
        fused_experts(**given)
    except RuntimeError as error:
        assert "CUDA_ERROR_INVALID_VALUE" in str(error) and "launch of" in str(error), error
    else:
        raise AssertionError("an error was not raised")


CHECKS = {
    name.removeprefix("test_"): f for name, f in list(globals().items()) if name.startswith("test_") and callable(f)
}

if __name__ == "__main__":
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        try:
            function()
        except Exception:
            traceback.print_exc()
        else:
            print(name, flush=True)
