"""`numba.cuda.random`: generators that kernels call as plain Python functions.

Numba compiles these functions for the CPU. In its own simulator it does so in object mode, in which the states of
100,000 generators take minutes to initialise.
"""

import functools
import types
import warnings

import numpy as np

_COMPILE_FROM = 1000  # states; for fewer, the compiler takes longer than Python


def install():
    """Replace the compiled functions of `numba.cuda.random` by their Python originals."""
    with warnings.catch_warnings():  # about how Numba declares these functions
        warnings.simplefilter("ignore")
        from numba.cuda import random

    originals = {name: f.py_func for name, f in vars(random).items() if hasattr(f, "py_func")}
    vars(random).update(originals)
    in_python = random.init_xoroshiro128p_states_cpu

    def init_xoroshiro128p_states_cpu(states, seed, subsequence_start):
        function = in_python if len(states) < _COMPILE_FROM else compiled()
        with np.errstate(over="ignore"):
            function(states, seed, subsequence_start)

    @functools.cache
    def compiled():
        import numba

        names = dict(vars(random))
        for name, function in originals.items():
            names[name] = numba.njit(types.FunctionType(function.__code__, names, name))
        return names["init_xoroshiro128p_states_cpu"]

    random.init_xoroshiro128p_states_cpu = init_xoroshiro128p_states_cpu
