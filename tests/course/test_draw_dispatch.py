"""The pictures of rings: what is recorded and drawn agrees with a dispatch."""

import base64
import io
import json

import pytest
from helpers.figures import labelled, said, values_of
from PIL import Image

from moe_numba import simulator
from moe_numba.course.articles.deepep.buffer_layout import DeepEPConfig
from moe_numba.course.draw import dispatch
from moe_numba.course.draw.ring_trace import Moment, Ring, play, replay

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="what is drawn is played in the simulator")

EXAMPLE = [
    [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]],
    [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]],
]
PLAYS = {
    "rings of 2": dict(ring=2, chunk=1, channels=2),
    "rings of 3, chunks of 2": dict(ring=3, chunk=2, channels=2, warps=2, seed=3),
    "four channels": dict(ring=4, chunk=2, channels=4, seed=1),
}


@pytest.fixture(scope="module", params=PLAYS.values(), ids=PLAYS)
def played(request):
    return play(EXAMPLE, **request.param)


@pytest.mark.parametrize(
    "example, channels", [(EXAMPLE, 4), (EXAMPLE, 8), (EXAMPLE, 1), ([EXAMPLE[0][:5], []], 2), ([[[1, 1]] * 8] * 2, 4)]
)
def test_the_order_of_rows(example, channels):
    figure = dispatch.row_order(example, channels)
    wanted = [f"{s}.{t}" for r in range(2) for s in range(2) for t, to in enumerate(example[s]) if to[r]]
    assert values_of(figure, "row") == wanted


@pytest.mark.parametrize("ranks, channels, ring", [(2, 4, 4), (3, 4, 256), (1, 1, 8)])
def test_the_queues_of_a_buffer(ranks, channels, ring):
    figure = dispatch.queues(DeepEPConfig(ranks, channels, ring, 2, 32, 2, 0, 6, 2))
    assert len(labelled(figure, "slot")) == ranks * channels * min(ring, 8)
    assert len(labelled(figure, "section")) == 6
    assert {"rank_prefix", "start", "end", "head", "tail"} <= set(said(figure))


def test_what_is_played_is_a_dispatch(played):
    rows = [[[s, t] for s in range(2) for t, to in enumerate(EXAMPLE[s]) if to[r]] for r in range(2)]
    assert played["received"] == rows and json.loads(json.dumps(played)) == played
    most = {}
    for moment, now in replay(played):
        ring = now[moment.rank, moment.source, moment.channel]
        assert 0 <= ring.tail - ring.head <= played["ring"]
        if moment.what == "row":
            assert EXAMPLE[moment.source][moment.token][moment.rank], "the token goes there"
            assert ring.state(moment.value) == "written"
        most[moment.rank, moment.source, moment.channel] = ring.tail, ring.head, ring.start, ring.end
    assert len(most) == 4 * played["channels"]
    for (rank, source, channel), (tail, head, start, end) in most.items():
        share = len(EXAMPLE[source]) // played["channels"]
        counts = [sum(to[rank] for to in EXAMPLE[source][c * share : (c + 1) * share]) for c in range(channel + 1)]
        assert tail == head == counts[-1] and (-start - 1, -end - 1) == (sum(counts[:-1]), sum(counts))


def test_a_seed_plays_the_same_again():
    first, again, other = (play(EXAMPLE, ring=2, chunk=1, channels=1, seed=seed)["moments"] for seed in (3, 3, 4))
    assert first == again != other


def test_a_ring_in_words():
    ring = Ring(3)
    ring.take(Moment("row", 0, 1, 0, 0, 7))
    assert [ring.state(i) for i in range(3)] == ["written", "free", "free"] and ring.slots == [7, None, None]
    ring.take(Moment("tail", 0, 1, 0, 1))
    assert ring.state(0) == "full"
    ring.take(Moment("head", 0, 1, 0, 1))
    assert ring.state(0) == "free"
    assert dispatch.describe(Moment("start", 0, 1, 2, -5)) == "rank 1, channel 2: start -5 at rank 0 encodes 4"
    assert "token 7 is written into slot 0 at rank 0" in dispatch.describe(Moment("row", 0, 1, 0, 0, 7))


def test_the_timeline(played):
    if played["channels"] > 2:
        with pytest.raises(ValueError, match="number of rings is 16"):
            dispatch.timeline(played)
        return
    figure = dispatch.timeline(played)
    assert len(labelled(figure, "tail")) == len(labelled(figure, "head")) == 8
    assert len(labelled(figure, "row")) == sum(map(len, played["received"]))


def test_the_film_has_a_picture_for_each_moment():
    film = play([rows[:2] for rows in EXAMPLE], ring=2, chunk=1, channels=1)
    html = dispatch.animation(film)
    image = Image.open(io.BytesIO(base64.b64decode(html.split("base64,")[1].split('"')[0])))
    assert image.format == "GIF" and 1 < image.n_frames <= len(film["moments"]), "pictures that are alike are one"
    assert len(html) < 500_000


def test_each_row_is_traced_once():
    played = play([[[1, 0]], [[0, 1]]], channels=1)
    assert played["received"] == [[[0, 0]], [[1, 0]]]
    assert sum(moment[0] == "row" for moment in played["moments"]) == 2
