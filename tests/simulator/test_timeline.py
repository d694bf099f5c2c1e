"""Timelines: spans of traces and of time stamps, Chrome's trace format, and the page that steps through them."""

import html.parser
import json
import re
from collections import Counter

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint64

from moe_numba import simulator
from moe_numba.ptx.cp_async import bulk_load
from moe_numba.ptx.intrinsic import simulated
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.simulator import Span, Track

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")


@cuda.jit
def sums(out, x, stamps):
    tile = cuda.shared.array(64, float32)
    i, warp = cuda.threadIdx.x, cuda.grid(1) // 32
    if i % 32 == 0:
        stamps[warp, 0] = globaltimer()
    tile[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    if i % 32 == 0:
        stamps[warp, 1] = globaltimer()
    v = cuda.shfl_xor_sync(0xFFFFFFFF, tile[63 - i], 1)
    if i == 0:
        cuda.atomic.add(out, 0, v)
        stamps[warp, 2] = globaltimer()


def trace(accesses=True, seed=0):
    """Return the events of a kernel of two blocks of two warps, and its time stamps."""
    stamps = np.zeros((4, 3), np.uint64)
    with simulator.seed(seed), simulator.trace(accesses) as events:
        sums[2, 64](np.zeros(1, np.float32), np.arange(128, dtype=np.float32), stamps)
    return events, stamps


PHASES = ["load", "sum"]
TRACKS = [f"block {warp // 2} warp {warp % 2}" for warp in range(4)]


# --- traces ---------------------------------------------------------------------------------------------------------


def test_a_trace_has_accesses_on_request():
    without = Counter(event.what for event in trace(accesses=False)[0])
    assert without == {"syncthreads": 128, "shfl_xor_sync": 128}
    events = trace()[0]
    accesses = {"global load": 128, "shared store": 128, "shared load": 128, "global store": 10, "global atomic": 2}
    assert Counter(event.what for event in events) == without | accesses
    load = next(event for event in events if event.what == "global load")
    index = load.details["index"]
    assert load.details == {"buffer": "x", "index": index, "bytes": 4, "value": index}


def test_accesses_do_not_change_the_order():
    plain = [event[:5] for event in trace(accesses=False, seed=4)[0]]
    assert [event[:5] for event in trace(seed=4)[0] if "sync" in event.what] == plain


def test_no_trace_means_no_cost_per_access():
    from moe_numba.simulator.core import memory

    counts = []
    record = simulated(lambda: counts.append(memory.watching), "")

    @cuda.jit
    def kernel():
        record()

    kernel[1, 1]()
    with simulator.trace():
        kernel[1, 1]()
    with simulator.trace(accesses=True):
        kernel[1, 1]()
    assert counts == [0, 0, 1] and memory.watching == 0


# --- spans ----------------------------------------------------------------------------------------------------------


def test_a_barrier_lasts_from_the_first_arrival_to_the_last():
    events, _ = trace()
    spans = simulator.trace_spans(events)
    assert list(dict.fromkeys(span.track for span in spans)) == [Track("simulated", track) for track in TRACKS]
    barriers = [span for span in spans if span.name == "syncthreads"]
    assert len(barriers) == 4 and {span.args["lanes"] for span in barriers} == {"0-31"}
    for first, second in (barriers[:2], barriers[2:]):
        assert first.end_ns == second.end_ns and sorted([first.duration_ns > 0, second.duration_ns > 0]) == [0, 1]


def test_lanes_that_do_the_same_are_one_span_in_program_order():
    names = [span.name for span in simulator.trace_spans(trace()[0]) if span.track.thread == "block 0 warp 0"]
    stores = ["global store"]
    first, second = [*stores, "global load", "shared store"], ["syncthreads", *stores, "shared load", "shfl_xor_sync"]
    assert names[:3] == first and names[-2:] == ["global atomic", "global store"]
    assert sorted(names[3:-2]) == sorted(second) and names[3] == "syncthreads"


def test_asynchronous_copies_and_mbarriers():
    @cuda.jit
    def kernel(x, out):
        buffer = cuda.shared.array(256, uint8, 128)
        barriers = cuda.shared.array(1, uint64)
        i = cuda.threadIdx.x
        if i == 0:
            mbarrier_init(barriers, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barriers, 0, 256)
            bulk_load(buffer, 0, x, 0, 128, barriers, 0)
            bulk_load(buffer, 128, x, 128, 128, barriers, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barriers, 0, 0)
        out[i] = buffer[i]

    out = np.zeros(64, np.uint8)
    with simulator.trace() as events:
        kernel[1, 64](simulator.pointer(np.arange(256, dtype=np.uint8)), out)
    spans = simulator.trace_spans(events)
    copies = [span for span in spans if span.kind == "copy"]
    assert [span.track.thread for span in copies] == ["block 0 warp 0 copies"] * 2
    assert all(span.args["bytes"] == 128 and "lands at step" in span.args["state"] for span in copies)
    waits = [span for span in spans if span.name == "mbarrier.wait"]
    assert waits and all(span.end_ns >= max(copy.end_ns for copy in copies) for span in waits)


def test_each_rank_is_a_process():
    with simulator.trace() as events, simulator.together():
        for _ in range(2):
            sums[1, 64](np.zeros(1, np.float32), np.zeros(64, np.float32), np.zeros((2, 3), np.uint64))
    assert {span.track.process for span in simulator.trace_spans(events)} == {"simulated rank 0", "simulated rank 1"}


def test_stamps_are_spans_between_them():
    _, stamps = trace()
    stamps[1, 2] = 0  # not written: warp 1 has no thread 0
    spans = simulator.measured_spans(stamps, PHASES, TRACKS, "GPU 1")
    assert [(span.name, span.track.thread) for span in spans][:3] == [
        ("load", "block 0 warp 0"), ("sum", "block 0 warp 0"), ("load", "block 0 warp 1"),
    ]  # fmt: skip
    assert spans[0] == Span("load", Track("GPU 1", TRACKS[0]), int(stamps[0, 0]), int(stamps[0, 1]) - int(stamps[0, 0]))


@pytest.mark.parametrize(
    "stamps, tracks, message",
    [
        (np.zeros((2, 4)), None, r"stamps has shape \(2, 4\), but 2 phases need \[tracks, 3\] stamps"),
        (np.zeros(3), None, r"stamps has shape \(3,\)"),
        (np.zeros((2, 3)), ["a"], "tracks has 1 names, but stamps has 2 rows"),
        (np.array([[5, 3, 9]]), None, "phase 'load' of track 'row 0' ends at 3 ns, before its start at 5 ns"),
    ],
)
def test_wrong_stamps_are_refused(stamps, tracks, message):
    with pytest.raises(ValueError, match=message):
        simulator.measured_spans(stamps, PHASES, tracks)


# --- Chrome's format ------------------------------------------------------------------------------------------------


def check_format(trace):
    """Raise a ValueError if a trace breaks a rule of the Trace Event Format, or spans of a thread do not nest."""

    def need(condition, event, rule):
        if not condition:
            raise ValueError(f"{rule}: {event}")

    named, by_thread = set(), {}
    for event in trace["traceEvents"]:
        need(event.get("ph") in ("X", "i", "M"), event, "unknown phase")
        need(type(event.get("pid")) is int and type(event.get("tid")) is int, event, "no process or thread")
        if event["ph"] == "M":
            value = {"thread_sort_index": "sort_index"}.get(event["name"], "name")
            need(value in event["args"], event, "metadata without a value")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        need(isinstance(event.get("name"), str), event, "no name")
        need(isinstance(event.get("ts"), (int, float)) and event["ts"] >= 0, event, "no time")
        if event["ph"] == "X":
            need(isinstance(event.get("dur"), (int, float)) and event["dur"] >= 0, event, "no duration")
            by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            need(event.get("s") in ("t", "p", "g"), event, "an instant without a scope")
        need(("process_name", event["pid"], 0) in named, event, "a process without a name")
        need(("thread_name", event["pid"], event["tid"]) in named, event, "a thread without a name")
    for events in by_thread.values():
        open_until = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-9:
                open_until.pop()
            end = event["ts"] + event["dur"]
            need(not open_until or end <= open_until[-1] + 1e-9, event, "overlaps another span of its thread")
            open_until.append(end)


@pytest.fixture
def written(tmp_path):
    events, stamps = trace()
    path = tmp_path / "trace.json"
    simulator.write_chrome_trace(path, events, simulator.measured_spans(stamps, PHASES, TRACKS, "GPU"))
    return path


def test_the_file_keeps_the_rules_and_has_both_timelines(written):
    trace = json.loads(written.read_text())
    check_format(trace)
    names = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"simulated": 1, "GPU": 2}
    spans = [e for e in trace["traceEvents"] if e["ph"] in "Xi"]
    assert {min(e["ts"] for e in spans if e["pid"] == pid) for pid in (1, 2)} == {0}
    assert {e["name"] for e in spans if e["pid"] == 2} == set(PHASES)


def test_spans_that_overlap_get_threads_of_their_own(tmp_path):
    track, path = Track("GPU", "copies"), tmp_path / "trace.json"
    spans = [Span("a", track, 0, 10), Span("b", track, 5, 10), Span("c", track, 10, 2), Span("d", track, 12)]
    simulator.write_chrome_trace(path, measured=spans)
    check_format(json.loads(path.read_text()))
    assert sorted(simulator.read_chrome_trace(path)) == spans


BREAKS = {
    "unknown phase": lambda e: e.update(ph="Q"),
    "no time": lambda e: e.pop("ts"),
    "no duration": lambda e: e.update(dur=-1),
    "no process or thread": lambda e: e.pop("tid"),
    "a process without a name": lambda e: e.update(pid=99),
    "a thread without a name": lambda e: e.update(tid=99),
    "no name": lambda e: e.pop("name"),
    "overlaps another span": lambda e: e.update(dur=e["dur"] + 0.5),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_the_check_rejects_a_malformed_file(written, rule):
    trace = json.loads(written.read_text())
    BREAKS[rule](next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "load"))
    with pytest.raises(ValueError, match=rule):
        check_format(trace)


def test_a_file_is_read_back(written):
    events, stamps = trace()
    spans = simulator.read_chrome_trace(written)
    simulated = [span for span in spans if span.track.process == "simulated"]
    original = simulator.trace_spans(events)
    assert Counter(span.name for span in simulated) == Counter(span.name for span in original)
    assert {span.track.process for span in spans} == {"simulated", "GPU"}
    loads = [span.duration_ns for span in spans if span.name == "load"]
    assert loads == (stamps[:, 1] - stamps[:, 0]).tolist()


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json holds no trace of write_chrome_trace"):
        simulator.read_chrome_trace(path)


def test_nothing_to_write_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the trace has no events"):
        simulator.write_chrome_trace(tmp_path / "trace.json", [])
    with pytest.raises(TypeError, match="takes the events of simulator.trace.. or Spans, not int"):
        simulator.write_chrome_trace(tmp_path / "trace.json", [3])


# --- the page -------------------------------------------------------------------------------------------------------


class Markup(html.parser.HTMLParser):
    """Collects the tags of a page, and checks that they are closed in order."""

    EMPTY = {"meta", "input"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.ids = Counter(), [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.ids += [value for name, value in attributes if name == "id"]
        self.open += [tag] * (tag not in self.EMPTY)

    def handle_startendtag(self, tag, attributes):
        self.tags[tag] += 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page():
    events, stamps = trace()
    return simulator.timeline(events, simulator.measured_spans(stamps, PHASES, TRACKS))


def test_the_page_is_complete_and_needs_no_network(tmp_path):
    page().save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    markup = Markup(text)
    assert markup.tags["svg"] == 2 and markup.tags["button"] == 4
    texts = json.loads(re.search(r'<script type="application/json">(.*?)</script>', text, re.S)[1])
    assert markup.tags["g"] == len(texts) == len(re.findall(r"data-k=.\d", text)) > 30
    assert not re.search(r"https?://|src=|@import", text)
    assert "prefers-color-scheme: dark" in text and "ArrowLeft" in text
    assert any(text.startswith("syncthreads (simulated, block 0 warp ") for text in texts)
    assert any(re.fullmatch(r"load \(measured, block 0 warp 0, [\d,]+ to [\d,]+ ns\)", text) for text in texts)


def test_two_timelines_of_one_notebook_do_not_share_ids():
    timeline = page()
    assert Markup(timeline._repr_html_()).ids != Markup(timeline._repr_html_()).ids


def test_the_text_of_spans_is_escaped():
    name = "</script><b>"
    text = str(simulator.timeline(measured=[Span(name, Track("<i>", "&"), 0, 5)]))
    assert name not in text and "<i>" not in text and Markup(text).tags["b"] == 0


def test_without_a_script_everything_is_visible():
    text = re.sub(r"<script.*?</script>", "", str(page()), flags=re.S)
    assert ' class="later"' not in text and 'class="controls"' in text and ".controls { display: none" in text


@pytest.mark.parametrize(
    "spans, message",
    [
        ([], "the timeline has no events"),
        ([Span("a", Track("p", str(i)), i, 1) for i in range(300)], "in 200 rows, not 300 in 300"),
        ([Span("a", Track("p", "t"), i, 1) for i in range(5000)], "at most 4000 spans in 200 rows, not 5000 in 1"),
    ],
)
def test_too_much_and_nothing_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        simulator.timeline(measured=spans)


def test_a_saved_trace_can_be_shown_again(written):
    spans = simulator.read_chrome_trace(written)
    simulated = [span for span in spans if span.track.process == "simulated"]
    text = str(simulator.timeline(simulated, [span for span in spans if span.track.process == "GPU"]))
    assert Markup(text).tags["svg"] == 2


def test_tracks_of_a_file_keep_their_names(tmp_path):
    tracks = [("gpu", "warp 0 (producer)"), ("gpu", "warp 0 (consumer)"), ("gpu", "warp 9")]
    spans = [simulator.Span("work", simulator.Track(*track), 0.0, 10.0) for track in tracks]
    simulator.write_chrome_trace(tmp_path / "trace.json", spans[:2], spans[2:] + spans[:1])
    found = simulator.read_chrome_trace(tmp_path / "trace.json")
    assert [tuple(span.track) for span in found] == [*tracks[:2], tracks[2], tracks[0]]
