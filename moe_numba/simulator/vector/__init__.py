"""Vector engine: runs the lanes of a block, or of a warp, as NumPy vectors; falls back to one greenlet per thread.

A race-free kernel computes the same results under every order of its threads. The vector engine is correct for such
kernels and detects all others: whatever it does not support, any error, deadlock or conflicting access to memory
raises an exception, after which memory is restored and the kernel runs with one greenlet per thread (`core.engine`).
"""
