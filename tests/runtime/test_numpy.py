"""numba-cuda works with NumPy 2.5, which removed a name that it uses."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import numpy as np
vars(np).pop("row_stack", None)
{first}
from numba import cuda, types
def kernel(out):
    out[0] = 1
cuda.compile_ptx(kernel, types.void(types.CPointer(types.int32)), cc=(9, 0, "a"))
"""


@pytest.mark.parametrize("first, error", [("import moe_numba", ""), ("", "no attribute 'row_stack'")])
def test_numba_cuda_compiles_without_numpys_row_stack(first, error):
    """Import moe_numba first, or Numba: the second fails for as long as `_restore_row_stack` is necessary."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(first=first)],
        capture_output=True,
        text=True,
        env={**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0"},
    )
    assert (done.returncode != 0) == bool(error) and error in done.stderr, done.stderr
