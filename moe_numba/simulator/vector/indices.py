"""Elements of an array at the indices of lanes, which are int64. In a browser NumPy's own indices have 32 bits."""

import numpy as np


def _take_narrow(array, index):
    narrow = index.astype(np.intp)
    if (narrow != index).any():
        raise IndexError(f"an index outside an array of {len(array)} elements")
    return array.take(narrow)


# Returns the elements of an array, taken as flat, at an array of indices.
take = np.ndarray.take if np.intp(0).itemsize == 8 else _take_narrow
