"""numba-cuda-mlir as the package's second compiler: the same kernels, translated and compiled without a change.

``MOE_NUMBA_COMPILER=mlir`` selects it; ``runtime.compile`` is the way in. Kernels and intrinsics stay what numba-cuda
makes of the package's source, so both compilers can be used in one process.

- ``types`` converts between the types of the two compilers;
- ``translate`` makes a copy of a kernel that refers to numba-cuda-mlir's names, with all that the kernel calls;
- ``builder`` lets the code generators of ``moe_numba.ptx``, which call llvmlite's IRBuilder, emit MLIR instead;
- ``corrections`` has what numba-cuda-mlir lacks or gets wrong;
- ``code`` makes PTX or LTO-IR.
"""
