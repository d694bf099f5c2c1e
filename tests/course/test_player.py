"""Players: frames, their pages, static strips, and the frames of shuffles from a simulator trace."""

import html
import json
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.figures import misplaced

from moe_numba import simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.draw.player import Arrow, Box, Frame, Label, Player
from moe_numba.course.draw.shared_memory import barrier_steps
from moe_numba.course.draw.warp_frames import shuffles

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def frames(count=3):
    return [
        Frame(f"moment <{k}>", [Box(10 + 20 * k, 10, 40, 20, f"{k} & 1", "active", f"g{k % 2}"), Arrow(0, 0, 30, 10)])
        for k in range(count)
    ]


class Page(HTMLParser):
    """Checks that tags are balanced, and collects the frames."""

    VOID = {"input", "meta"}

    def __init__(self):
        super().__init__()
        self.open, self.frames, self.text = [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        if "data-frame" in (attributes := dict(attributes)):
            self.frames.append(attributes.get("display") == "none")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data


def test_without_scripts_the_page_shows_the_last_frame():
    page = Page()
    page.feed(str(Player(frames(), 200, 60, "three & moments")))
    assert not page.open and page.frames == [True, True, False]
    assert "three & moments" in page.text and "moment <2>" in page.text and "2 & 1" in page.text


def test_the_page_needs_no_network():
    page = str(Player(frames(), 200, 60, "x"))
    assert "http" not in page and "src=" not in page and "@import" not in page


def test_two_players_of_a_page_have_their_own_names():
    a, b = (Player(frames(), 200, 60, "x")._repr_html_() for _ in range(2))
    assert a.split('id="')[1].split('"')[0] != b.split('id="')[1].split('"')[0]


@pytest.mark.parametrize(
    "made, message",
    [
        ([], "1 to 400 frames, not 0"),
        (frames(401), "1 to 400 frames, not 401"),
        ([Frame("", [Box(0, 0, 10, 10, kind="red")])], "kind is 'red'; it must be one of plain, active"),
        ([Frame("", [Box(180, 0, 40, 10)])], "outside the drawing of 200 x 60 pixels"),
    ],
)
def test_wrong_frames_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        Player(made, 200, 60, "x")


def test_a_player_can_be_sent_as_json():
    shapes = [Box(0, 0, 9, 9, "b", "done", "g"), Arrow(0, 0, 5, 5, "g"), Label(3, 3, "l", centred=True)]
    sent = Player([*frames(), Frame("last", shapes)], 200, 60, "x")
    received = Player.from_dict(json.loads(json.dumps(sent.as_dict())))
    assert received.as_dict() == sent.as_dict() and received.frames[-1].shapes == shapes


def test_a_strip_shows_the_chosen_frames():
    figure = Player(frames(), 300, 60, "three moments").strip([0, 2])
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "1. moment <0>" in words and "3. moment <2>" in words and "2. moment <1>" not in words
    assert not misplaced(figure)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to click in")
def test_buttons_keys_and_picks_in_a_browser(tmp_path):
    script = """
      const p = document.querySelector(".player"), seen = [], look = () => seen.push(+p.dataset.at);
      const click = (name) => { p.querySelector(`[name=${name}]`).click(); look(); };
      const key = (key) => { p.dispatchEvent(new KeyboardEvent("keydown", { key })); look(); };
      look(); click("next"); click("next"); click("next"); click("back"); click("first"); key("ArrowRight");
      key("ArrowRight"); key("ArrowLeft"); key("Home");
      const shown = [...p.querySelectorAll("[data-frame]")].map((f) => getComputedStyle(f).display !== "none");
      p.querySelector("[data-frame='0'] rect").dispatchEvent(new MouseEvent("click", { bubbles: true }));
      const marked = [...p.querySelectorAll(".marked")].map((s) => s.dataset.group);
      p.querySelector("[data-frame='0'] rect").dispatchEvent(new MouseEvent("click", { bubbles: true }));
      document.title = JSON.stringify({ seen, shown, marked, after: p.querySelectorAll(".marked").length,
        note: p.querySelector("p").textContent, count: p.querySelector(".controls span").textContent });
    """
    page = tmp_path / "page.html"
    page.write_text(f"{Player(frames(), 200, 60, 'x')}<script>{script}</script>")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(html.unescape(dom.split("<title>")[1].split("</title>")[0]))
    assert found["seen"] == [0, 1, 2, 2, 1, 0, 1, 2, 1, 0]
    assert found["shown"] == [True, False, False] and found["marked"] == ["g0", "g0"] and found["after"] == 0
    assert found["note"] == "moment <0>" and found["count"] == "1 / 3"


@cuda.jit
def largest(x, out):
    i = cuda.threadIdx.x
    value = x[i]
    for k in range(5):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 16 >> k))
    out[i] = value


@cuda.jit
def shift(x, out):
    out[cuda.threadIdx.x] = cuda.shfl_up_sync(0xFFFFFFFF, x[cuda.threadIdx.x], 3)


def traced(kernel, threads=32):
    with simulator.trace() as events:
        kernel[1, threads](np.arange(threads, dtype=np.int32), np.zeros(threads, np.int32))
    return events


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
@pytest.mark.parametrize("threads, warp", [(32, 0), (64, 1)])
def test_frames_of_a_butterfly(threads, warp):
    made, width, height = shuffles(traced(largest, threads), warp, lanes=8)
    assert len(made) == 5 and Player(made, width, height, "x")
    received = [
        [int(s.text) - 32 * warp for s in frame.shapes if isinstance(s, Box) and s.kind == "active"] for frame in made
    ]
    assert received[0] == [lane ^ 16 for lane in range(8)]
    arrows = [[(s.x1, s.x2) for s in frame.shapes if isinstance(s, Arrow)] for frame in made]
    assert [len(a) for a in arrows] == [0, 0, 8, 8, 8]  # lanes at distances 16 and 8 are not shown
    sources = [[s.text for s in frame.shapes if isinstance(s, Label)][-1] for frame in made]
    assert sources == ["23", "15", "3", "5", "6"]  # of lane 7


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_lanes_without_a_source_keep_their_value():
    ((frame,), *_) = shuffles(traced(shift), lanes=6)
    kinds = [s.kind for s in frame.shapes if isinstance(s, Box) and s.y > 60]
    assert kinds == ["plain"] * 3 + ["active"] * 3


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_traces_without_shuffles_are_refused():
    with pytest.raises(ValueError, match="the trace has no shuffle of warp 3"):
        shuffles(traced(shift), warp=3)
    with pytest.raises(ValueError, match="lanes is 17; 1 to 16"):
        shuffles(traced(shift), lanes=17)


@cuda.jit
def sweeps(x, out):
    tile = cuda.shared.array(4, int32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    if i < 2:
        tile[2 * i + 1] += tile[2 * i]
    cuda.syncthreads()
    if i == 3:
        tile[3] = 0
    cuda.syncthreads()
    if i == 0:
        left = tile[1]
        tile[1] = tile[3]
        tile[3] += left
    cuda.syncthreads()
    out[i] = tile[i]


def shared_frames(length=4, **options):
    with simulator.trace(**options) as events:
        sweeps[1, 4](np.array([3, 1, 7, 2], np.int32), np.zeros(4, np.int32))
    return barrier_steps(events, length)


def row(frame, y):
    return [s.text for s in frame.shapes if isinstance(s, Box) and (s.y > 60) == (y > 60)]


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_frames_of_a_shared_array_end_at_barriers():
    made, width, height = shared_frames(accesses=True)
    assert Player(made, width, height, "x").frames == made
    assert [row(frame, 0) for frame in made] == [["3", "1", "7", "2"], ["3", "4", "7", "9"], ["3", "4", "7", "0"]]
    assert [row(frame, 99) for frame in made] == [["3", "4", "7", "9"], ["3", "4", "7", "0"], ["3", "0", "7", "4"]]
    stored = [[s.group for s in f.shapes if isinstance(s, Box) and s.kind == "active"] for f in made]
    assert stored == [["element 1", "element 3"], ["element 3"], ["element 1", "element 3"]]
    moves = [
        [(round((s.x1 - 88) / 56), round((s.x2 - 88) / 56)) for s in f.shapes if isinstance(s, Arrow)] for f in made
    ]
    assert moves == [[(0, 1), (2, 3)], [], [(1, 3), (3, 1)]]
    assert made[1].note == "Elements 3 change."


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_only_the_first_elements_are_shown():
    made, *_ = shared_frames(2, accesses=True)
    assert [row(frame, 99) for frame in made] == [["3", "4"], ["3", "0"]]
    assert [[s for s in f.shapes if isinstance(s, Arrow)] for f in made][1] == []


@pytest.mark.skipif(not simulator.ENABLED, reason="it draws simulator traces")
def test_traces_without_accesses_are_refused():
    with pytest.raises(ValueError, match="is it a trace of accesses"):
        shared_frames()
    with pytest.raises(ValueError, match="length is 17; 1 to 16"):
        shared_frames(17, accesses=True)
