"""Route tokens to experts with CuPy arrays, and sort the token slots by expert, without torch in the program.

Run it with ``python docs/examples/cupy_routing.py``. Without a GPU the kernels run in the simulator, on NumPy arrays.
"""

import moe_numba  # before Numba, if your program imports that too

if moe_numba.simulator.ENABLED:
    import numpy as xp
else:
    import cupy as xp

TOKENS, EXPERTS, TOPK, BLOCK_SIZE = 16, 64, 4, 8

logits = xp.random.RandomState(0).standard_normal((TOKENS, EXPERTS)).astype(xp.float32)
weights, ids = moe_numba.biased_grouped_topk(logits, None, TOPK, scoring="softmax")
print(type(weights).__module__, weights.shape, ids.dtype)

# The same with array functions alone: the largest probabilities of each token, divided by their sum.
scores = xp.exp(logits - logits.max(axis=1, keepdims=True))
largest = -xp.sort(-scores, axis=1)[:, :TOPK]
expected = largest / largest.sum(axis=1, keepdims=True)
difference = xp.linalg.norm(-xp.sort(-weights, axis=1) - expected) / xp.linalg.norm(expected)
print(f"relative difference of the weights from {xp.__name__}'s: {float(difference):.4f}")

sorted_slots, expert_of_block, count = moe_numba.moe_align_block_size(ids, BLOCK_SIZE, EXPERTS)
slots = sorted_slots[: int(count[0])]
real = slots < ids.size  # the others are padding
experts_of_slots = xp.repeat(expert_of_block[: len(slots) // BLOCK_SIZE], BLOCK_SIZE)
wrong = (ids.ravel()[slots[real]] != experts_of_slots[real]).sum()
fraction = int(wrong) / ids.size
assert fraction == 0
print(f"fraction of misplaced slots: {fraction:.4f}")
