"""Sizes of the lesson "Alignment as published": change them here. Recorded times belong to those below."""

EXPERTS, TOPK, BLOCK = 256, 8, 16  # DeepSeek-V3, blocks of 16 rows
TOKENS = 4096  # of the times, and of what the simulator counts
THREADS = 1024  # of the main kernel's CTA
FULL = 0xFFFFFFFF  # all 32 lanes of a warp
LINE = 32  # int32 in a cache line of 128 bytes
SPREAD = (EXPERTS // LINE + 1) * LINE  # where the counters begin that have a cache line each, after EXPERTS + 1 starts

if EXPERTS & (EXPERTS - 1) or not 32 <= EXPERTS <= THREADS:
    raise ValueError(f"EXPERTS is {EXPERTS}; it must be a power of two (Blelloch's tree) from 32 to THREADS")
