"""Threads, warps, blocks, memory and the scheduler."""
