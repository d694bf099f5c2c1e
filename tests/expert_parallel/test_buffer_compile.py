"""Machine code of notify, dispatch and combine at DeepSeek-V3's sizes; no GPU is needed."""

import pytest

from moe_numba.expert_parallel.rings import config
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
from moe_numba.runtime.device import shared_bytes_of
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.expert_parallel.rings.combine import make_combine
from moe_numba.expert_parallel.rings.dispatch_direct import make_dispatch_direct
from moe_numba.expert_parallel.rings.dispatch import make_dispatch
from moe_numba.expert_parallel.rings.notify import make_barrier, make_notify_dispatch
from moe_numba.expert_parallel.rings.channels import RingShape
from moe_numba.expert_parallel.rings.token_slot import TokenSlot
"""
WARPS, THREADS = 15, 512
ROWS = {"bf16": "3584, 0, 8", "fp8": "1792, 56, 8"}

# Compute capability -> warps of a CTA that have space for a row of 7168 elements.
WARPS_WITHOUT_TMA = {(7, 5): 4, (8, 0): 7, (8, 9): 6, (9, 0, "a"): 7}


def shape(ranks, slot, warps=WARPS, uses_tma=True):
    return f"RingShape({ranks}, {warps}, 4, TokenSlot({slot}), {uses_tma})"


@pytest.fixture(scope="module")
def reports():
    from moe_numba.expert_parallel.rings import combine, dispatch, dispatch_direct

    ring, combined = shape(8, ROWS["bf16"]), "3584, 8, has_src_idx=False"
    requests = {
        "dispatch": (f"make_dispatch({ring})", dispatch.signature(), THREADS, False),
        "direct": (f"make_dispatch_direct({ring})", dispatch_direct.signature(), 32 * WARPS, False),
    } | {
        f"combine {ranks}": (f"make_combine({shape(ranks, combined)}, 0)", combine.SIGNATURE, THREADS, False)
        for ranks in (2, 8)
    }
    return compile_apart(SOURCE, requests)


def test_instructions(reports):
    """Rows use bulk copies, and only the publisher warp issues system-scope fences."""
    report = reports["dispatch"]
    if report.opcodes is None:
        pytest.skip("there is no nvdisasm")
    assert reports["direct"].count("FENCE.VIEW.ASYNC") == 2
    assert report.count("UBLKCP") >= 5 and report.count("SYNCS.PHASECHK") >= 3
    assert reports["combine 8"].count("LDG.E.128") == 8, "four vectors of two rows are in flight at once"
    pair = reports["combine 2"]  # 7 vectors of 4 words: 0 and the peer's row are added to each word
    assert pair.count("LDG.E.128") == 7 and pair.count("HADD2", "HFMA2") >= 2 * 4 * 7, (
        "two rows are added in packed bfloat16"
    )
    for name in ("dispatch", "combine 8"):
        # One in the publisher warp, and three where a thread aborts, or finds that a peer has.
        assert reports[name].count("MEMBAR.ALL.SYS") == 4, name
        # Proxy fences between loads or stores and bulk copies; no other test detects a missing one.
        assert reports[name].count("FENCE.VIEW.ASYNC") == 5, name
        assert reports[name].count("LDL") == reports[name].count("STL") == 0, name


@pytest.mark.parametrize("arch", WARPS_WITHOUT_TMA, ids=lambda arch: "sm_" + "".join(map(str, arch)))
def test_nothing_spills_without_tma(arch):
    """Nor does a kernel need more shared memory than the GPU has."""
    from moe_numba.expert_parallel.rings import combine, dispatch, dispatch_direct, notify

    warps = WARPS_WITHOUT_TMA[arch]
    threads, fp8 = 32 * (warps + 1), shape(8, ROWS["fp8"], warps, False)
    combined = shape(8, "3584, 8, has_src_idx=False", warps, False)
    requests = {
        "dispatch": (f"make_dispatch({fp8})", dispatch.signature(), threads, False),
        "direct": (f"make_dispatch_direct({fp8})", dispatch_direct.signature(), 32 * warps, False),
        "combine": (f"make_combine({combined}, 2)", combine.SIGNATURE, threads, False),
    }
    if arch == (7, 5):
        requests["notify"] = "make_notify_dispatch(8, 512)", notify.NOTIFY_SIGNATURE, 512, False
        requests["barrier"] = "make_barrier(8)", notify.BARRIER_SIGNATURE, 512, False
    for name, report in compile_apart(SOURCE, requests, arch).items():
        assert report.spilled_bytes == report.stack_bytes == 0 and not report.complaints, name
        if name in ("dispatch", "combine") and report.opcodes is not None:
            assert report.count("LDG.E.128") >= 16, "16 vectors are in flight at once"
            assert report.count("UBLKCP") == 0, name
    for slot in (TokenSlot(1792, 56, 8), TokenSlot(3584, 8, has_src_idx=False)):
        assert RingShape(8, warps, 4, slot, False).shared_bytes <= shared_bytes_of(arch[:2])


def test_warps_without_tma(monkeypatch):
    """As many as have space for a row, at most seven."""
    monkeypatch.setattr(config, "_MAX_WARPS_WITHOUT_TMA", 7)
    for arch, warps in WARPS_WITHOUT_TMA.items():
        assert config.max_warps.__wrapped__(14336, config.GpuLimits(False, shared_bytes_of(arch[:2]))) == warps
    with pytest.raises(ValueError, match="x has rows of 40000 elements; in bfloat16 one must fit 65536 bytes"):
        config.max_warps(80000, config.GpuLimits(False, 65536))
