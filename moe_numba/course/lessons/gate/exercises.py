"""Exercises of notebook 01, on the gate."""

import ast
import math
import textwrap

import numpy as np

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32

from moe_numba.course.exercises import Exercise
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


def _tree(kernel):
    return ast.parse(textwrap.dedent(source_of(kernel)))


def _names(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _has_shuffle_in_a_lane_branch(tree):
    """Return whether a shuffle is in a branch whose condition depends on the thread."""
    of_thread = lambda node: "threadIdx" in ast.unparse(node) or "laneid" in ast.unparse(node)
    tainted, known = set(), None
    while tainted != known:  # names that depend on the thread, also through others
        known = set(tainted)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AugAssign) and (of_thread(node.value) or _names(node.value) & tainted):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tainted |= set().union(*map(_names, targets))
    branches = (node for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While))
    diverging = (node for node in branches if of_thread(node.test) or _names(node.test) & tainted)
    parts = (part for node in diverging for field in (node.body, node.orelse) for part in np.atleast_1d(field))
    return any("shfl" in ast.unparse(part) for part in parts)


def _finds_both_maxima(kernel):
    x, out = (np.arange(32) * 7 % 32).astype(np.float32), np.full(32, np.nan, np.float32)
    with simulator.trace() as events:
        kernel[1, 32](x, out)
    wanted = x.reshape(2, 16).max(axis=1).repeat(16)
    if (wrong := np.flatnonzero(out != wanted)).size:
        lane, first = wrong[0], wrong[0] // 16 * 16
        return f"lane {lane} has {out[lane]:g}; the maximum of lanes {first} to {first + 15} is {wanted[lane]:g}"
    shuffles = [event for event in events if event.what.startswith("shfl")]
    halves = [0xFFFF << (event.lane // 16 * 16) for event in shuffles]
    crosses = any(event.details["mask"] & 0xFFFFFFFF & ~half for event, half in zip(shuffles, halves))
    if crosses and _has_shuffle_in_a_lane_branch(_tree(kernel)):
        return (
            "the result is right here, but a shuffle is in a branch that only some lanes take, and its mask names "
            "lanes that do not: on a GPU this is undefined. Let all 32 lanes execute the same shuffles"
        )
    rounds = sum(event.lane == 0 for event in shuffles)
    return None if rounds == 4 else f"the result is right after {rounds} shuffles; 16 lanes need 4"


def _sorts_as_floats(order_key):
    largest = np.finfo(np.float32).max
    floats = np.array(
        [-np.inf, -largest, -2, -1.5, -0.5, -1e-30, 0, 1e-30, 0.25, 0.5, 1, 2, largest, np.inf], np.float32
    )
    keys = []
    for bits in floats.view(np.int32).tolist():
        key = order_key(bits)
        if key is ...:
            return "not answered yet: return an int"
        if not isinstance(key, int | np.integer):
            return f"the key of bits {bits} is {key!r}, which is no integer"
        if not -(1 << 31) <= key < 1 << 31:
            return f"the key of bits {bits} is {key}, which is no int32"
        keys.append(int(key))
    for number in range(len(floats) - 1):
        a, b = floats[number : number + 2]
        if not keys[number] < keys[number + 1]:
            return f"{a:g} < {b:g}, but their keys are {keys[number]} and {keys[number + 1]}"
    return None


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


def _sorts_without_branches(kernel):
    generator = np.random.default_rng(0)
    keys = generator.integers(-2, 3, (32, 4)).astype(np.int32)  # few values, so that many are equal
    slots = np.tile(np.arange(4, dtype=np.int32), (32, 1))
    new_keys, new_slots = keys.copy(), slots.copy()
    kernel[1, 32](new_keys, new_slots)
    for row in range(32):
        wanted = sorted(zip(keys[row].tolist(), slots[row].tolist()), key=lambda pair: (-pair[0], pair[1]))
        found = list(zip(new_keys[row].tolist(), new_slots[row].tolist()))
        if found == wanted:
            continue
        if _compares_bits(_tree(kernel)):
            return "`|` and `&` bind more tightly than comparisons: put each comparison in parentheses"
        if sorted(found) == sorted(wanted) and [key for key, _ in found] == [key for key, _ in wanted]:
            return f"the keys are sorted, but of equal keys the lower slot must come first: {found}, not {wanted}"
        return f"the keys {keys[row].tolist()} become the (key, slot) pairs {found}, not {wanted}"
    signature = "int32[,]", "int32[,]"
    (code,) = compile_apart(
        source_with_dependencies([kernel]), {"": (kernel.__name__, signature, None, False)}
    ).values()
    if (branches := code.count("BRA", "BSSY", "BSYNC")) is None:
        return "it sorts, but its machine code cannot be read: install nvidia-cuda-nvdisasm"
    if branches > 1:  # one is the endless loop behind the EXIT
        return f"it sorts, but its machine code has {branches - 1} branch instructions"
    if any(isinstance(node, ast.BoolOp) for node in ast.walk(_tree(kernel))):
        return "it sorts, and the compiler removed the branches of this small network, but an `and` or `or` is left"
    return None


def _compares_bits(tree):
    """Return whether a comparison has an unparenthesised `|` or `&` as an operand: ``a > b | c < d``."""
    bits = lambda node: isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd)
    compares = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return any(bits(part) for node in compares for part in (node.left, *node.comparators))


def better_groups(sums, with_ties):
    """Return how many groups are better than each; with ``with_ties`` the lower index is better of two equal groups."""
    better = lambda g, h: sums[h] > sums[g] or (with_ties and sums[h] == sums[g] and h < g)
    return [sum(better(g, h) for h in range(len(sums))) for g in range(len(sums))]


def _shows_the_missing_rule(sums):
    sums = list(sums)
    if len(sums) != 8:
        return f"the answer has {len(sums)} numbers; one for each of 8 groups is needed"
    if not all(math.isfinite(value) for value in sums):
        return "a sum of two scores is finite: the answer needs eight finite numbers"
    kept = sum(count < 4 for count in better_groups(sums, with_ties=False))
    if kept == 4:
        return (
            "without the rule for ties 4 groups are kept, as they should be: make the fourth and the fifth best equal"
        )
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that leaves in `out[lane]` the maximum of the lane's own half of the warp, after four shuffles",
        _finds_both_maxima,
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
