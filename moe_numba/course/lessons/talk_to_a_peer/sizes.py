"""Sizes of the lesson "Talk to a peer": change them here. Records have RANKS, ROWS, ROW_BYTES and ROUNDS."""

RANKS = 2  # each sends to the next one, the last one to rank 0
ROWS, ROW_BYTES = 1024, 14336  # that a rank sends: 7168 elements of bfloat16 each
SLOTS = 8  # rows that fit into a ring
CHUNK = BATCH = 4  # rows per signal of a sender, and per credit of a receiver
CHANNELS = 64  # rings of a rank, each with a warp that sends and one that receives
ROUNDS = 200  # of a ping-pong, and repeated signals
PUSH_CTAS, PUSH_WARPS = (1, 2, 4, 8, 12, 24, 48), 8  # of the measured push rate

# What the simulator runs instead
SMALL_ROWS = SLOTS + BATCH + 2  # with fewer rows no launch uses the slot of a late credit again
SMALL_ROW_BYTES, SMALL_CHANNELS, SMALL_ROUNDS = 1024, 2, 3
SMALL_PUSH_ROWS, SMALL_PUSH_CTAS, SMALL_PUSH_WARPS = 8, (1, 2), 2

SEEDS = 12  # orders of threads and stores, of a message

# Words of 4 bytes in the buffer of a rank
FLAG, DATA = 0, 32  # of a message
TAIL, HEAD, RING = 0, 32, 64  # of a ring: each counter has a line of 128 bytes of its own
WORD_SLOTS = 4  # of the ring of single words

if RANKS not in (2, 4, 8):
    raise ValueError(f"RANKS is {RANKS}; it must be 2, 4 or 8")
for _bytes in (ROW_BYTES, SMALL_ROW_BYTES):
    if _bytes % 512:
        raise ValueError(f"ROW_BYTES is {_bytes}; it must be a multiple of 512: 16 bytes for each lane of a warp")
