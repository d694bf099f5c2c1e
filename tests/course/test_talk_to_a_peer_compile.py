"""What the compiler makes of the kernels of "Talk to a peer"."""

import ast
from pathlib import Path

import pytest

from moe_numba.runtime.sass import compile_apart, disassembler

pytestmark = pytest.mark.skipif(not disassembler(), reason="nvdisasm is missing: install the extra gpu")
NOTEBOOK = Path(__file__).parents[2] / "notebooks/11_talk_to_a_peer.py"
PEERS, WORDS, NUMBER = "uint64*", "int32*", "int32"
MESSAGE = [PEERS, WORDS, WORDS, WORDS] + [NUMBER] * 2
PING_PONG = [PEERS, WORDS] + [NUMBER] * 3
PUSH = [PEERS, WORDS, WORDS] + [NUMBER] * 3
SIGNALS = [PEERS, WORDS, WORDS] + [NUMBER] * 4
RING = [PEERS, WORDS, WORDS, WORDS] + [NUMBER] * 7
KERNELS = {  # expression, signature, threads
    "store into peer": ("store_into_peer", [PEERS, WORDS, NUMBER, NUMBER], 8),
    "tell everyone": ("tell_everyone", [PEERS, WORDS] + [NUMBER] * 3, 32),
    "message": ("make_message(publish, observe)", MESSAGE, 64),
    "ping-pong, relaxed": ("make_ping_pong(st_relaxed_sys_s32)", PING_PONG, 1),
    "ping-pong, release": ("make_ping_pong(st_release_sys_s32)", PING_PONG, 1),
    "report": ("report", [WORDS, NUMBER], 1),
    "ring of words": ("ring_of_words", [PEERS, WORDS, WORDS, WORDS] + [NUMBER] * 4, 1),
    "push: stores": ("push_stores", PUSH, 1024),
    "push: bulk": ("push_bulk", PUSH, 256),
    "ring": ("make_ring(send, receive)", RING, 32),
    "ring, senders first": ("make_ring(send, receive, False)", RING, 32),
    "signal per chunk": ("make_ring(make_send_chunks(4), receive)", RING, 32),
    "credits in batches": ("make_batched(4, 4)", RING, 32),
    "head there": ("make_ring(make_send_variant(True, False, False), receive_with_own_head)", RING, 32),
    "all lanes": ("make_ring(make_send_variant(False, True, False), receive)", RING, 32),
    "fence": ("make_ring(make_send_variant(False, False, True), receive)", RING, 32),
}
for _busy in ("NOBODY", "SAME_WARP", "SAME_SM", "OTHER_SMS"):
    _threads = 1024 if _busy in ("SAME_SM", "OTHER_SMS") else 32
    for _kind in ("relaxed", "release"):
        KERNELS[f"signal: {_kind}, {_busy}"] = (f"make_signals(st_{_kind}_sys_s32, {_busy})", SIGNALS, _threads)


def source():
    """Return the imports and functions of the page, and the lesson's answers."""
    kept = []
    for node in ast.parse(NOTEBOOK.read_text()).body:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} if isinstance(node, ast.Assign) else set()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef) or "have_read" in names:
            kept.append(node)
    answers = "publish, receive, ring_of_words, send, tell_everyone"
    lines = [
        f"from moe_numba.course.lessons.talk_to_a_peer.answers import {answers}",
        "from moe_numba.course.lessons.talk_to_a_peer.runs import NOBODY",
    ]
    return "\n\n".join([*lines, *map(ast.unparse, kept)])


@pytest.fixture(scope="module")
def codes():
    return compile_apart(source(), {name: (*request, True) for name, request in KERNELS.items()})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_spilled_and_nothing_is_called(name, codes):
    code = codes[name]
    assert code.spilled_bytes + code.stack_bytes + code.count("LDL", "STL") == 0
    divisions = 1 if name.startswith("push") else 0  # of a range with a step, once
    assert code.complaints == [] and code.count("CALL") == divisions
    assert code.registers <= (64 if KERNELS[name][2] == 1024 else 80)


def test_a_release_is_a_fence_and_a_store(codes):
    """A relaxed store needs no MEMBAR at system scope, a release does."""
    assert codes["ping-pong, release"].count("MEMBAR") > codes["ping-pong, relaxed"].count("MEMBAR")


@pytest.mark.parametrize("name", ["ring", "signal per chunk", "credits in batches"])
def test_rows_are_copied_by_16_bytes(name, codes):
    assert codes[name].count("LDG") + codes[name].count("LD") >= 2 and codes[name].count("STG") >= 4
