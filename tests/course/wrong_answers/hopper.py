"""Wrong answers to the exercises of notebook 05: (exercise, answer, what the message must match)."""

from moe_numba.course.lessons.hopper import exercises as hopper
from wrong_answers import changed

# 1: the stub has both of the first two mistakes
LESS_BYTES = "full, ahead % 2, 1024)", "full, ahead % 2, min(8, rows - 8 * ahead) * 128)"
PHASE_OF_BOX = "uint32(box // 2 % 2)", "uint32(box % 2)"
load_stub = changed(hopper.load_two_stages, LESS_BYTES, PHASE_OF_BOX)
less_bytes = changed(hopper.load_two_stages, LESS_BYTES)
phase_of_box = changed(hopper.load_two_stages, PHASE_OF_BOX)
phase_zero = changed(hopper.load_two_stages, ("uint32(box // 2 % 2)", "uint32(0)"))
phase_of_four = changed(hopper.load_two_stages, ("uint32(box // 2 % 2)", "uint32(box // 2)"))
no_elect = changed(hopper.load_two_stages, (" and elect_sync(FULL_MASK)", ""))
no_init_fence = changed(hopper.load_two_stages, ("        fence_mbarrier_init()\n", ""))
only_rows = changed(
    hopper.load_two_stages, ("range(thread, 1024, 64)", "range(thread, min(1024, 128 * rows - 1024 * box), 64)")
)
more_bytes = changed(hopper.load_two_stages, ("full, ahead % 2, 1024)", "full, ahead % 2, 2048)"))
no_wait = changed(
    hopper.load_two_stages, ("mbarrier_wait_parity(full, box % 2, uint32(box // 2 % 2))", "cuda.syncthreads()")
)
refills_early = changed(hopper.load_two_stages, ("            cuda.syncthreads()\n", ""))
one_place = changed(hopper.load_two_stages, ("out[1024 * box + i]", "out[i]"))

# 3: the stub has both of the first two mistakes
NO_FENCE = "        fence_proxy_async_shared()\n", ""
NO_LAST_BARRIER = "wait_until_read()\n        cuda.syncthreads()\n", "wait_until_read()\n"
store_stub = changed(hopper.add_one, NO_FENCE, NO_LAST_BARRIER)
no_fence = changed(hopper.add_one, NO_FENCE)
no_last_barrier = changed(hopper.add_one, NO_LAST_BARRIER)
fence_by_one = changed(
    hopper.add_one, NO_FENCE, ("            tma", "            fence_proxy_async_shared()\n            tma")
)
fence_after_barrier = changed(
    hopper.add_one,
    NO_FENCE,
    (
        "        cuda.syncthreads()\n        if",
        "        cuda.syncthreads()\n        fence_proxy_async_shared()\n        if",
    ),
)
no_first_barrier = changed(hopper.add_one, ("        cuda.syncthreads()\n        if", "        if"))
last_not_waited_for = changed(
    hopper.add_one,
    NO_LAST_BARRIER,
    ("            wait_until_read()\n", ""),
    ("range(tiles):\n", "range(tiles):\n        wait_until_read()\n        cuda.syncthreads()\n"),
)
no_wait_for_read = changed(hopper.add_one, ("            wait_until_read()\n", ""))

# 4: the stub has both of the first two mistakes
ONE_ARRIVAL = "2 + stage, 2)", "2 + stage, 1)"
ARRIVE = "            if lane == 0:\n                mbarrier_arrive(barriers, 2 + stage)\n"
READ = "            for i in range(thread, 1024, 64):\n                out[1024 * box + i] = smem[1024 * stage + i]\n"
SYNC = "            cuda.syncwarp()\n"
ARRIVE_EARLY = READ + SYNC + ARRIVE, ARRIVE + READ
role_stub = changed(hopper.copy_by_roles, ONE_ARRIVAL, ARRIVE_EARLY)
one_arrival = changed(hopper.copy_by_roles, ONE_ARRIVAL)
arrives_early = changed(hopper.copy_by_roles, ARRIVE_EARLY)
no_syncwarp = changed(hopper.copy_by_roles, (SYNC, ""))
block_barrier = changed(hopper.copy_by_roles, ("cuda.syncwarp()", "cuda.syncthreads()"))
one_warp_arrives = changed(
    hopper.copy_by_roles, ("if lane == 0:\n                mbar", "if thread == 0:\n                mbar")
)
all_lanes_expected = changed(hopper.copy_by_roles, ("2 + stage, 2)", "2 + stage, 64)"))
all_lanes_arrive = changed(hopper.copy_by_roles, (ARRIVE, "            mbarrier_arrive(barriers, 2 + stage)\n"))
producer_phase_zero = changed(hopper.copy_by_roles, ("uint32(1 - box // 2 % 2)", "uint32(box // 2 % 2)"))

NEVER_COMPLETES = "^a matrix of 40 rows: threads wait for a phase that never completes .*load_two_stages"
MISUSED = "a barrier gets arrivals or bytes that it does not expect, or is used wrongly"
REFILLED = "^a stage is filled again while a consumer may still read it"
WAITS = "^a warp waits for a phase that never completes, or has missed one"
WRONG = [
    ("hopper-1", load_stub, NEVER_COMPLETES),
    ("hopper-1", phase_of_box, NEVER_COMPLETES),
    ("hopper-1", phase_zero, NEVER_COMPLETES),
    ("hopper-1", more_bytes, NEVER_COMPLETES + ".* waits for 0 of 1 arrivals and 1024 bytes"),
    ("hopper-1", less_bytes, f"^a matrix of 36 rows: {MISUSED} .*512 bytes more"),
    ("hopper-1", phase_of_four, f"^a matrix of 40 rows: {MISUSED} .* for phase bit 2, which is neither 0 nor 1"),
    ("hopper-1", no_elect, f"^a matrix of 40 rows: {MISUSED} .* already has all 1 arrivals"),
    ("hopper-1", no_init_fence, f"^a matrix of 40 rows: {MISUSED} .* has not called fence_mbarrier_init"),
    ("hopper-1", only_rows, "^a matrix of 36 rows: .* byte 0 of row 4 of box 4 is not written; it must be 0"),
    ("hopper-1", no_wait, "a stage is read before its copy has completed"),
    ("hopper-1", refills_early, "or filled again before it has been read"),
    ("hopper-1", one_place, "with the thread order of seed 0, byte 0 of row 0 of box 0 is 80, not 0"),
    ("hopper-2", lambda row, chunk: ..., "not answered yet"),
    ("hopper-2", lambda row, chunk: chunk, "chunk 0 of rows 0 and 2 is in the same banks, 0 to 3"),
    ("hopper-2", lambda row, chunk: chunk ^ row % 4, "chunk 0 of rows 0 and 4 is in the same banks, 0 to 3"),
    ("hopper-2", lambda row, chunk: chunk ^ row % 8, "chunk 0 of row 4 goes to place 4; a row has the places 0 to 3"),
    ("hopper-2", lambda row, chunk: row // 2 % 4, "row 0: chunks 0 and 1 both go to place 0"),
    ("hopper-3", store_stub, "^TMA reads bytes that the thread which wrote them has not fenced"),
    ("hopper-3", no_fence, "^TMA reads bytes that the thread which wrote them has not fenced"),
    ("hopper-3", fence_by_one, "^TMA reads bytes that the thread which wrote them has not fenced"),
    ("hopper-3", fence_after_barrier, "^TMA reads bytes that the thread which wrote them has not fenced"),
    ("hopper-3", no_last_barrier, "^TMA reads the tile while a thread may write it"),
    ("hopper-3", no_first_barrier, "^TMA reads "),
    ("hopper-3", last_not_waited_for, "^TMA reads the tile .* ends, while in the shared array"),
    ("hopper-3", no_wait_for_read, "^TMA reads the tile while a thread may write it .*make_bulk_wait_group_read"),
    ("hopper-4", role_stub, REFILLED),
    ("hopper-4", arrives_early, REFILLED),
    ("hopper-4", no_syncwarp, REFILLED),
    ("hopper-4", one_arrival, f"{REFILLED}|{WAITS}"),
    ("hopper-4", block_barrier, "not all threads reach the barrier"),
    ("hopper-4", one_warp_arrives, WAITS),
    ("hopper-4", all_lanes_expected, WAITS),
    ("hopper-4", all_lanes_arrive, WAITS),
    ("hopper-4", producer_phase_zero, f"{WAITS}.* waits for 1 of 1 arrivals"),
]
