"""All lessons on communication take the rate of a link from one place, also when lesson 11 records it anew."""

from moe_numba.course.bench import link, records
from moe_numba.course.lessons.combine import runs as combine
from moe_numba.course.lessons.dispatch import model as dispatch
from moe_numba.course.lessons.low_latency import model as low_latency
from moe_numba.course.lessons.talk_to_a_peer import runs as peer


def best_rates():
    return [
        peer.link_gbps(),
        max(dispatch.push_gbps(2).values()),
        max(combine.push_rates().values()),
        low_latency.push_gbps(),
    ]


def test_lessons_have_one_lower_bound(monkeypatch):
    assert len({*best_rates()}) == 1
    size = dict(rows=1024, row_bytes=14336, rounds=100)
    row = lambda step, us: dict(step=step, config={"ranks": 2}, size=size, kernel_us={"median": us})
    rows = [row("push: stores, 8 CTAs", 160.0), row(f"signal: st.release, {link.OTHER_WARPS}", 90.0)]
    found = records.recorded
    monkeypatch.setattr(
        records, "recorded", lambda topic, *gpu: {"rows": rows} if topic == link.RECORD else found(topic, *gpu)
    )
    assert best_rates() == [367.0] * 4
    assert dispatch.release_us() == 0.9
