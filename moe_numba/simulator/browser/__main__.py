"""Pack the simulator and `moe_numba.ptx` for the browser: python -m moe_numba.simulator.browser moe_numba.zip.

Python in a browser takes longer to compile them than to start. So the file also holds their bytecode, if the Python
that runs this, or `python3.12`, is of the version that Pyodide has.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_PARTS = "__init__.py", "extras.py", "simulator", "ptx"
_FOLDER = "/lib/moe_numba"  # where the page unpacks the file
_PYTHON = 3, 12  # of Pyodide


def pack(path: Path) -> bool:
    """Write the zip file that the playground loads; return whether it holds bytecode."""
    files = [file for part in _PARTS for file in [_PACKAGE / part, *sorted((_PACKAGE / part).rglob("*.py"))]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            if file.is_file():
                copy = Path(folder, file.relative_to(_PACKAGE.parent))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        compiled = _compile(folder)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
            for file in sorted(Path(folder).rglob("*.py*")):
                # With one time of change, so that the same sources make the same file.
                name = zipfile.ZipInfo(str(file.relative_to(folder).as_posix()), (2000, 1, 1, 0, 0, 0))
                made.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    return compiled


def _compile(folder):
    """Write the bytecode of a folder's modules beside them; return whether a suitable Python was found."""
    python = sys.executable if sys.version_info[:2] == _PYTHON else shutil.which("python{}.{}".format(*_PYTHON))
    if python is None:
        return False
    command = [python, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", folder, "-p", _FOLDER]
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    return not subprocess.run([*command, folder], env=environment, capture_output=True).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m moe_numba.simulator.browser", description=__doc__.split(":")[0])
    parser.add_argument("path", type=Path, help="the zip file to write")
    if not pack(parser.parse_args().path):
        print("There is no python{}.{}, so the page compiles the simulator each time it is loaded.".format(*_PYTHON))
