"""The simulator in a browser, under Pyodide: what stands for packages that have no build for WebAssembly.

`numba_names` stands for Numba, which kernels need for its types and its module `cuda`, and `greenlets` for greenlet.
`programs` runs the programs of the playground (`docs/playground`). `python -m moe_numba.simulator.browser` packs all
that the page loads.
"""

import sys


def install() -> None:
    """Let `import numba` and `import greenlet` find their replacements, where Python runs in a browser."""
    if sys.platform == "emscripten":
        from moe_numba.simulator.browser import greenlets, numba_names

        sys.modules.setdefault("greenlet", greenlets)
        numba_names.install()
