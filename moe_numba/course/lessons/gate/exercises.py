"""Exercises of notebook 01, on the gate."""

import ast
import textwrap
from numbers import Integral

import numpy as np

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, Wrong, case, expect_between, kernel_test
from moe_numba.course.steps.simulate import source_with_dependencies
from moe_numba.runtime.changed_source import source_of
from moe_numba.runtime.sass import compile_apart

FULL = 0xFFFFFFFF


@cuda.jit
def max_of_half_warps(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for r in range(4):
        value = max(value, cuda.shfl_xor_sync(FULL, value, 1 << r))
    out[lane] = value


_X = (np.arange(32) * 7 % 32).astype(np.float32)
_MAXIMA = _X.reshape(2, 16).max(axis=1).repeat(16)


def _sorts_as_floats(order_key):
    largest = np.finfo(np.float32).max
    floats = [-np.inf, -largest, -2, -1.5, -0.5, -1e-30, 0, 1e-30, 0.25, 0.5, 1, 2, largest, np.inf]
    keys = []
    for number, bits in zip(floats, np.array(floats, np.float32).view(np.int32).tolist(), strict=True):
        key = order_key(bits)
        with case(f"{number:g}, bits {bits}"):
            if not isinstance(key, Integral) or not -(1 << 31) <= key < 1 << 31:
                raise Wrong(f"the key is {key!r}, not an int32")
            if keys and key <= keys[-1]:
                raise Wrong(f"the key is {key}, not above {keys[-1]}, the key of the next lower number")
        keys.append(key)


@cuda.jit
def sort_four(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for i, j in ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)):
        swap = (key[j] > key[i]) | ((key[j] == key[i]) & (slot[j] < slot[i]))
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


def _sort_rows():
    keys = np.random.default_rng(0).integers(-2, 3, (32, 4)).astype(np.int32)  # few values, so that many are equal
    order = np.argsort(-keys, axis=1, kind="stable").astype(np.int32)
    slots = np.tile(np.arange(4, dtype=np.int32), (32, 1))
    return Run((1, 32), {"keys": keys, "slots": slots}, {"keys": np.take_along_axis(keys, order, 1), "slots": order})


_sorts = kernel_test(_sort_rows())


def _sorts_without_branches(kernel):
    _sorts(kernel)
    signature = "int32[,]", "int32[,]"
    compiled = compile_apart(source_with_dependencies([kernel]), {"": (kernel.__name__, signature, None, False)})
    if (branches := compiled[""].count("BRA", "BSSY", "BSYNC")) is None:
        raise Wrong("it sorts, but its machine code cannot be read: install nvidia-cuda-nvdisasm")
    expect_between("branch instructions", branches - 1, most=0)  # one is the endless loop behind the EXIT
    # The compiler removes some of the branches of this small network.
    tree = ast.parse(textwrap.dedent(source_of(kernel)))
    expect_between("`and` or `or`", sum(isinstance(node, ast.BoolOp) for node in ast.walk(tree)), most=0)


def better_groups(sums, with_ties):
    """Return how many groups are better than each; with ``with_ties`` the lower index is better of two equal groups."""
    better = lambda g, h: sums[h] > sums[g] or (with_ties and sums[h] == sums[g] and h < g)
    return [sum(better(g, h) for h in range(len(sums))) for g in range(len(sums))]


def _shows_the_missing_rule(sums):
    if np.shape(sums) != (8,) or not np.isfinite(sums).all():
        raise Wrong("eight finite numbers are needed, one for each group")
    if sum(count < 4 for count in better_groups(sums, with_ties=False)) == 4:
        raise Wrong("without the rule 4 groups are kept, as they should be: make the fourth and the fifth best equal")


EXERCISES = {
    1: Exercise(
        "a kernel that leaves in `out[lane]` the maximum of the lane's own half of the warp, after four shuffles",
        kernel_test(
            Run((1, 32), {"x": _X, "out": np.full(32, np.nan, np.float32)}, {"out": _MAXIMA}),
            at_most={"shuffles by each lane": 4, "shuffles that only some lanes execute": 0},
        ),
        "Which bit of the lane index tells the two halves apart? No shuffle may cross it.",
        max_of_half_warps,
    ),
    2: Exercise(
        "eight group scores of which a kernel without the rule for ties keeps more than 4",
        _shows_the_missing_rule,
        "Without the rule equal groups do not count as better than each other. Where must they be in the order?",
        "[9, 8, 7, 5, 5, 3, 2, 1]",
    ),
    3: Exercise(
        "a function of `bits`, the bits of a float32 as a signed 32-bit Python int, that returns an int32 which "
        "sorts as the float does",
        _sorts_as_floats,
        "bits >> 31 is 0 for a positive and -1 for a negative number: all bits set. Which bits of a negative float "
        "must be flipped, so that -2 sorts below -1 and its sign stays?",
        "lambda bits: bits ^ ((bits >> 31) & 0x7FFFFFFF)",
    ),
    4: Exercise(
        "a kernel without branches, `and` and `or` that sorts four (key, slot) pairs: larger keys first, of equal keys "
        "the lower slot",
        _sorts_without_branches,
        "Which operators evaluate both of their operands? Mind that they bind more tightly than comparisons.",
        sort_four,
    ),
}
