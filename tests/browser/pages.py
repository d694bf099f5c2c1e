"""Open every page of the site in headless Chromium and look for what is broken; see `make test-browser`.

Usage: pages.py SITE PYODIDE [--only TEXT] [--pictures FOLDER] [--chromium PATH]

Each page is opened as on a desktop and on a phone, and looked at in light and dark. Before it trusts the checks, the
program shows them the pages in `broken/`, of which each has one defect, the one that its name says.
"""

import argparse
import re
import sys
import tempfile
import urllib.parse
from collections import Counter
from pathlib import Path

from chromium import CHROMIUM, OPTIONS, WIDTHS, serve
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
INSPECT = (HERE / "inspect.js").read_text()
# Clicks through each player to its end: every step shows another frame.
STEP = """() => [...document.querySelectorAll(".player")].flatMap((player, number) => {
  const next = player.querySelector("button[name=next]"), frames = player.querySelectorAll("[data-frame]").length;
  const state = () => player.dataset.at + " " + [...player.querySelectorAll("[data-frame]")]
    .map((f) => f.getAttribute("display")).join("");
  if (!next) return [`player ${number} has no button`];
  const seen = new Set([state()]);
  for (let i = 1; i < frames; i++) { next.click(); seen.add(state()); }
  return frames > 1 && seen.size === frames ? [] : [`player ${number} shows ${seen.size} of ${frames} frames`];
})"""
LINKS = """() => [...document.querySelectorAll("a[href], area[href], link[href], iframe[src]")]
  .map((e) => e.href || e.src).filter((url) => !/^(javascript|mailto|data):/.test(url))"""
# What a search should show first: the lesson, or the functions.
FIRST_FOUND = {
    "gate": "course/01_gate",
    "align": "course/03_align",
    "dispatch": "course/12_dispatch",
    "wgmma": "course/06_hopper",
    "fp8": "api/",
}
FINISHED = "/^(Finished|Stopped|Python did not)/.test(document.querySelector('#status').textContent)"


class Site:
    """A folder of pages, its address, and the anchors of each page."""

    def __init__(self, folder, address):
        self.folder, self.address, self.anchors = Path(folder), address, {}

    def pages(self):
        """Return the paths of the pages; what the theme keeps in _static is no page."""
        paths = (path.relative_to(self.folder) for path in self.folder.rglob("*.html"))
        return sorted(str(path) for path in paths if path.parts[0] != "_static")

    def problem_of(self, url):
        """Return what is wrong with a link of a page, or None. Other sites are not asked."""
        if not url.startswith(f"{self.address}/"):
            return None if re.match(r"https?://[\w.-]+\.\w+", url) else f"{url} is no address"
        path, _, anchor = urllib.parse.unquote(url.removeprefix(f"{self.address}/")).partition("#")
        path = path.partition("?")[0]
        if path.endswith("/") or not path:
            path += "index.html"
        file = self.folder / path
        if not file.is_file():
            return f"{path} does not exist"
        if anchor.startswith("example="):
            program = file.parent / "examples" / f"{anchor.removeprefix('example=')}.py"
            return None if program.is_file() else f"{program.name} is no example"
        if anchor and file.suffix == ".html":
            if path not in self.anchors:
                self.anchors[path] = set(re.findall(r'\b(?:id|name)="([^"]+)"', file.read_text()))
            if anchor not in self.anchors[path]:
                return f"{path} has no #{anchor}"
        return None


class Listener:
    """Collects what goes wrong while a page loads."""

    def __init__(self, page, address):
        self.found, self.address, self.open = [], address, set()
        page.route(lambda url: not url.startswith(self.near), lambda route: route.fulfill(body=""))
        page.on("console", lambda message: message.type == "error" and self.add("console", message.text))
        page.on("pageerror", lambda error: self.add("console", str(error)))
        page.on("requestfailed", self.fail)
        page.on(
            "response", lambda answer: answer.status >= 400 and self.add("request", f"{answer.url}: {answer.status}")
        )
        page.on("request", self.start)
        page.on("requestfinished", lambda request: self.open.discard(request))
        page.on("requestfailed", lambda request: self.open.discard(request))

    def add(self, kind, text):
        if "Failed to load resource" not in text:  # the request itself is reported
            self.found.append((kind, text))

    def fail(self, request):
        if request.failure != "net::ERR_ABORTED":  # the next page was opened meanwhile
            self.add("request", f"{request.url}: {request.failure}")

    @property
    def near(self):
        return self.address, "data:", "blob:", "file:"

    def start(self, request):
        self.open.add(request)
        if not request.url.startswith(self.near):
            self.add("foreign", request.url)

    def take(self, page):
        """Wait for the answers to all requests; return what went wrong since the last call."""
        page.wait_for_load_state("networkidle")  # half a second without a request
        for _ in range(200):
            if not self.open:
                break
            page.wait_for_timeout(20)
        else:
            self.add("request", f"no answer from {[request.url for request in self.open]}")
            self.open.clear()
        found, self.found[:] = list(self.found), []
        return found


def look(page, listener, site, name):
    """Open a page; return its problems as {(kind, text)}, in light and dark."""
    playground = name.endswith("playground/index.html")
    page.emulate_media(color_scheme="light")
    page.goto(f"{site.address}/{name}{'?pyodide=/pyodide' if playground else ''}", wait_until="load")
    if playground:
        page.wait_for_function(FINISHED, timeout=120_000)
    problems = {("link", text) for text in map(site.problem_of, set(page.evaluate(LINKS))) if text}
    problems |= {("player", text) for text in page.evaluate(STEP)}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        problems |= {(kind, text) for kind, text in page.evaluate(INSPECT)}
    return problems | set(listener.take(page))


def check_the_checks(page, listener, site):
    """Return the broken pages in which the checks do not find the one defect that the page's name says."""
    failed = []
    for name in site.pages():
        expected = name.removesuffix(".html").partition("-")[0]
        kinds = {kind for kind, _ in look(page, listener, site, name)}
        if kinds != (set() if expected == "sound" else {expected}):
            failed.append(f"broken/{name}: found {sorted(kinds)}")
    return failed


def check_search(page, listener, site):
    """Search words, from the server and from the disk; return what does not work, or comes in the wrong order."""
    failed = []
    for base in (site.address, site.folder.resolve().as_uri()):
        for word, first in FIRST_FOUND.items():
            page.goto(f"{base}/search.html?q={word}")
            try:
                found = page.wait_for_selector("#search-results li a", timeout=20_000).get_attribute("href")
                if not found.startswith(first):
                    failed.append(f"search for {word}: {found} comes first, not {first}")
            except Exception as error:
                failed.append(f"search from {base.partition(':')[0]} for {word}: {str(error).splitlines()[0]}")
    listener.take(page)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("pyodide", type=Path)
    parser.add_argument("--only", default="", help="part of a page's path")
    parser.add_argument("--pictures", type=Path, help="save a screenshot of each page here, in each of the four ways")
    parser.add_argument("--chromium", default=CHROMIUM)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for path in options.site.iterdir():
            Path(folder, path.name).symlink_to(path.resolve())
        Path(folder, "pyodide").symlink_to(options.pyodide.resolve())
        browser = playwright.chromium.launch(executable_path=options.chromium, args=OPTIONS)
        site, broken = Site(options.site, serve(folder)), Site(HERE / "broken", serve(HERE / "broken"))
        failed, counts = [], Counter()
        for device, (width, height) in WIDTHS.items():
            context = browser.new_context(viewport={"width": width, "height": height})
            page = context.new_page()
            failed += check_the_checks(page, Listener(page, broken.address), broken)
            page.close()
            page = context.new_page()
            listener = Listener(page, site.address)
            for name in site.pages():
                if options.only not in name:
                    continue
                problems = look(page, listener, site, name)
                counts[device] += 1
                for kind, text in sorted(problems):
                    print(f"{device} {name}: {kind}: {text}", flush=True)
                    failed.append(name)
                if options.pictures:
                    take_pictures(page, options.pictures, device, name)
            failed += check_search(page, listener, site)
            context.close()
    names = [text for text in failed if "broken/" in text or text.startswith("search")]
    print(*names, sep="\n")
    print(f"{dict(counts)} pages in light and dark; {len(failed)} problems")
    return int(bool(failed))


def take_pictures(page, folder, device, name):
    """Save a screenshot of the first screens of a page, in light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=folder / f"{name.replace('/', '-')}-{device}-{scheme}.png")


if __name__ == "__main__":
    sys.exit(main())
