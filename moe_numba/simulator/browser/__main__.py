"""Pack the simulator and `moe_numba.ptx` for the browser: python -m moe_numba.simulator.browser moe_numba.zip."""

import argparse
import zipfile
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_PARTS = "__init__.py", "extras.py", "simulator", "ptx"


def pack(path: Path) -> None:
    """Write the zip file that the playground loads."""
    files = [file for part in _PARTS for file in [_PACKAGE / part, *sorted((_PACKAGE / part).rglob("*.py"))]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for file in files:
            if file.is_file():
                # With one time of change, so that the same sources make the same file.
                name = zipfile.ZipInfo(str(file.relative_to(_PACKAGE.parent).as_posix()), (2000, 1, 1, 0, 0, 0))
                made.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m moe_numba.simulator.browser", description=__doc__.split(":")[0])
    parser.add_argument("path", type=Path, help="the zip file to write")
    pack(parser.parse_args().path)
