"""What docs/simulator_debug.md shows is what the debugger prints, and its programs run."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba import simulator

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/simulator_debug.md").read_text()
PROGRAM = re.search(r"^<!-- file: block_sums.py -->\n```python\n(.*?)^```", PAGE, re.M | re.S)[1]
TRANSCRIPT = re.search(r"^```console\n\$ .*? debug --no-races block_sums.py\n(.*?)^```", PAGE, re.M | re.S)[1]

RUN = """
import runpy, sys
from moe_numba import simulator
with simulator.debug(sys.stdin.read()) as session:
    runpy.run_path("block_sums.py", run_name="__main__")
print(session.transcript, end="")
"""


def printed(folder, program, text):
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"MOE_NUMBA_SEED": "0", "MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_session_prints_what_the_page_says(tmp_path):
    (tmp_path / "block_sums.py").write_text(PROGRAM)
    commands = "\n".join(re.findall(r"^\(sim\) (.*)$", TRANSCRIPT, re.M))
    output, transcript = printed(tmp_path, RUN, commands).split("\n", 1)
    assert output == "expected 128, got 8.0" and without_steps(transcript) == without_steps(TRANSCRIPT)


def without_steps(text):
    """Return a transcript without numbers of steps: versions of Python differ in the lines that they report."""
    return re.sub(r"step \d+( of \d+)?", "step", text)


def test_the_timeline_is_written(tmp_path):
    (program,) = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", PAGE, re.M | re.S)
    printed(tmp_path, program, "")
    spans = simulator.read_chrome_trace(tmp_path / "reverse.json")
    assert {"syncthreads", "shared store", "load", "store"} <= {span.name for span in spans}
    assert "<svg" in (tmp_path / "reverse.html").read_text()


def test_the_page_names_every_command_and_public_name():
    from moe_numba.simulator.debugger.shell import Shell

    names = {name.removeprefix("do_").replace("_", "-") for name in dir(Shell) if name.startswith("do_")}
    assert {name for name in names if not re.search(rf"`{name}\b", PAGE)} == set()
    public = ("trace", "measured_spans", "write_chrome_trace", "read_chrome_trace", "timeline", "debug")
    assert all(f"simulator.{name}" in PAGE for name in public)
    assert all(name in PAGE for name in inspect.signature(simulator.debug).parameters if name != "commands")
