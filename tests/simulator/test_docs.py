"""The programs of the simulator's pages print what the pages say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moe_numba import simulator

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("docs/simulator.md", "docs/moving_to_numba_cuda_mlir.md", "moe_numba/simulator/README.md")
}
PAGE = PAGES["docs/simulator.md"]
COMMANDS = [
    (name, *found)
    for name, page in PAGES.items()
    for found in re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", page, re.M | re.S)
]


def missing_lines(expected, printed):
    """Return the expected lines that are not printed; ``...`` stands for any text."""
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in expected.splitlines()]
    return [pattern for pattern in patterns if not re.search(f"^{pattern}$", printed, re.M)]


@pytest.mark.parametrize(
    "page, command, expected", COMMANDS, ids=[f"{page}: {command}" for page, command, _ in COMMANDS]
)
def test_commands_print_what_the_page_says(page, command, expected, tmp_path):
    for name, text in re.findall(r"^<!-- file: (.*?) -->\n```python\n(.*?)^```", PAGES[page], re.M | re.S):
        (tmp_path / name).write_text(text)
    program, *arguments = shlex.split(command)
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"] if program == "pytest" else [sys.executable]
    environment = os.environ | {"MOE_NUMBA_SEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert missing_lines(expected, done.stdout + done.stderr) == [], done.stdout + done.stderr


def test_the_program_with_several_gpus(tmp_path):
    (text,) = re.findall(r"^<!-- run -->\n```python\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "program.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    environment |= {"MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "6\n", done.stderr


def test_the_page_has_commands_and_their_check_rejects_other_output():
    assert {page for page, *_ in COMMANDS} == set(PAGES)
    assert missing_lines("6 failed in ...\n", "5 failed in 2 s\n") and not missing_lines(
        "6 failed in ...", "6 failed in 2 s"
    )


def test_the_page_names_every_option():
    source = (ROOT / "moe_numba/simulator/command.py").read_text()
    options = set(re.findall(r'add_argument\("(--[a-z-]+)"', source))
    assert options and options <= set(re.findall(r"`(--[a-z-]+)", PAGE))
