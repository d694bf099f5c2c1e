"""Exercises of the lesson "The experts of a layer"; the page checks answers with `exercises.<name>`."""

from functools import cache

import numpy as np

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, int32, int64

from moe_numba.course.grader import expect_equal, function_test
from moe_numba.course.lessons.moe_layer import answers
from moe_numba.course.lessons.moe_layer.sizes import TOPK
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict
from moe_numba.course.steps.score import count
from moe_numba.runtime.launch import launch

_random = np.random.default_rng(15)


# Formula: from which number of tokens on tensor cores are the limit

_LAYERS = [  # num_experts, topk, bytes of a weight, bytes per second, operations per second
    (256, 8, 1, 4.8e12, 1979e12),
    (128, 8, 2, 4.8e12, 989e12),
    (8, 2, 2, 2.0e12, 312e12),
]


def _tokens_that_fill(num_experts, topk, bytes_per_weight, bytes_per_second, operations_per_second):
    return num_experts * bytes_per_weight * operations_per_second / (2 * topk * bytes_per_second)


tokens_that_fill = Formula(
    "tokens that fill the tensor cores",
    "a function of the experts, topk, the bytes of a weight, and both rates that returns the number of tokens",
    own=_tokens_that_fill,
    test=function_test(_tokens_that_fill, _LAYERS, rtol=1e-6),
    praise="from there on computing takes longer than reading",
    hint="Let W be the number of weights of an expert. Reading takes num_experts * W * bytes_per_weight / "
    "bytes_per_second, and computing 2 * topk * tokens * W / operations_per_second: a multiplication with its addition "
    "counts as two operations. W cancels.",
)


# Build: the position of a row

_ROWS = 96


def _around_position(answer):
    @cuda.jit
    def around(experts, earlier, equal):
        i = int32(cuda.grid(1))
        first, second = answer(experts[i])
        earlier[i], equal[i] = first, second

    return around


@cache
def _experts():
    """Return experts of 128; some differ in high bits only, and the last lanes have no assignment."""
    experts = _random.choice(np.array([0, 1, 33, 65, 97, 127], np.int32), _ROWS)
    experts[:32] = 33  # all lanes of a warp
    experts[-5:] = 128
    return experts


def _positions(kernel):
    earlier, equal = np.full(_ROWS, -7, np.int32), np.full(_ROWS, -7, np.int32)
    kernel[1, _ROWS](_experts(), earlier, equal)
    return earlier, equal


def _test_position(answer):
    earlier, equal = _positions(_around_position(answer))
    lanes = _experts().reshape(-1, 32)
    same = lanes[:, :, None] == lanes[:, None]
    expect_equal("the number of lower lanes with the same expert", earlier, np.tril(same, -1).sum(2).ravel())
    expect_equal("the number of lanes with the same expert", equal, same.sum(2).ravel())


def _exchanges(counted):
    path = counted.critical_path
    return path.votes + path.matches + path.shuffles + path.reductions


position = Build(
    "position in a warp",
    "a function that returns how many lower lanes, and how many lanes in all, have the expert of this lane",
    own=answers.position,
    test=_test_position,
    profile=lambda answer: count(kernel := _around_position(answer), lambda _: _positions(kernel), answer),
    counter="",
    score=_exchanges,
    unit="exchanges between lanes",
    par=1,
    par_is_bound=True,
    forbidden={
        "barriers": "warps wait for each other",
        "shared_store_requests": "it writes shared memory, where lanes can exchange registers",
        "shared_atomic_requests": "it counts with atomics, whose order is not that of lanes",
        "global_load_requests": "it reads global memory",
    },
    over_par="Which instruction compares a value with those of all lanes at once?",
    hint="cuda.match_any_sync(FULL_MASK, expert) returns a mask of the lanes with the same value, and lanemask_lt() "
    "one of the lanes below this one. cuda.popc counts the bits of a word.",
    home=f"{__name__}:position",
)


# Build: SwiGLU, eight columns

_COLUMNS, _GATES = 96, 3  # of a row, and rows


def _around_activate(answer):
    @cuda.jit
    def around(gate_up, out, words):
        row, word = int32(cuda.blockIdx.x), int32(4 * cuda.threadIdx.x)
        if word < words:
            answer(gate_up, out, row, word, words)

    return around


@cache
def _gate_up():
    generator = torch.Generator().manual_seed(2)
    return (3 * torch.randn(_GATES, 2 * _COLUMNS, generator=generator)).bfloat16()


def _activate(kernel):
    out = torch.full((_GATES, _COLUMNS // 2), -7, dtype=torch.int32)
    launch(kernel, _GATES, 32, _gate_up().view(torch.int32), out, _COLUMNS // 2)
    return out.view(torch.bfloat16).float()


def _test_activate(answer):
    gate, up = _gate_up().double().chunk(2, dim=1)
    right = torch.nn.functional.silu(gate) * up
    expect_equal("silu(gate) * up, row by row", _activate(_around_activate(answer)), right, rtol=0.01)


activate_eight = Build(
    "SwiGLU of eight columns",
    "a function that computes eight columns of silu(gate) * up by 16-byte accesses",
    own=answers.activate_eight,
    test=_test_activate,
    profile=lambda answer: count(kernel := _around_activate(answer), lambda _: _activate(kernel), answer),
    counter="global_load_requests",
    unit="loads",
    par=2,
    par_is_bound=True,
    forbidden={"barriers": "threads wait for each other"},
    limits={"global_store_requests": (1, "it stores its result in pieces")},
    over_par="A load of 16 bytes has eight bfloat16.",
    hint="load_nc_u32x4(gate_up, at) returns four words of gate; those of up lie `words` words further. activate_pair "
    "computes a word of the result from one of each.",
    home=f"{__name__}:activate_eight",
)


# Build: the weighted sum, eight columns

_TOKENS, _TOPK, _HIDDEN = 3, 4, 160


def _around_sum(answer):
    @cuda.jit
    def around(rows, inverse, weights, out, words, topk):
        token, word = int32(cuda.blockIdx.x), int32(4 * cuda.threadIdx.x)
        if word < words:
            answer(rows, inverse, weights, out, words, topk, token, word)

    return around


@cache
def _to_sum():
    """Return rows, the row of each assignment (one is missing) and weights; large terms cancel: the order counts."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(_TOKENS * _TOPK, _HIDDEN, generator=generator).bfloat16()
    inverse = torch.randperm(_TOKENS * _TOPK, generator=generator).int().view(_TOKENS, _TOPK)
    weights = torch.rand(_TOKENS, _TOPK, generator=generator)
    rows[inverse[:, 1].long()] = -rows[inverse[:, 0].long()]
    weights[:, :2] = 2.0**20
    inverse[2, 3] = -1
    return rows, inverse, weights


def _sum(kernel):
    rows, inverse, weights = _to_sum()
    out = torch.full((_TOKENS, _HIDDEN // 2), -7, dtype=torch.int32)
    flat = inverse.flatten(), weights.flatten()
    launch(kernel, _TOKENS, 32, rows.view(torch.int32), *flat, out, _HIDDEN // 2, _TOPK)
    return out.view(torch.bfloat16).float()


def _test_sum(answer):
    rows, inverse, weights = _to_sum()
    total = torch.zeros(_TOKENS, _HIDDEN)
    for k in range(_TOPK):
        valid = (inverse[:, k] >= 0)[:, None]
        terms = rows[inverse[:, k].clamp(min=0).long()].float() * weights[:, k, None]
        total += torch.where(valid, terms, 0)
    found = _sum(_around_sum(answer))
    expect_equal("the sums, token by token", found, total.bfloat16().float(), rtol=0.01)


sum_eight = Build(
    "weighted sum of eight columns",
    "a function that adds eight columns of a token's rows, in the order of k, by 16-byte accesses",
    own=answers.sum_eight,
    test=_test_sum,
    profile=lambda answer: count(kernel := _around_sum(answer), lambda _: _sum(kernel), answer),
    counter="global_load_requests",
    unit="loads",
    par=3 * _TOPK,
    forbidden={"barriers": "threads wait for each other", "global_atomic_requests": "it adds in no fixed order"},
    limits={"global_store_requests": (1, "it stores its result in pieces")},
    over_par="Per k: the row's number, the weight, and one load of the row.",
    hint="Keep eight float32 sums. For each k with a row, load four words, and add weight * low(word) and weight * "
    "high(word) to two of the sums by cuda.fma. At the end cvt_rn_bf16x2_f32(high, low) rounds two of them to a word.",
    home=f"{__name__}:sum_eight",
)


# Build: a warp's dot product

_WORDS, _WARPS = 160, 2


def _around_dot(answer):
    @cuda.jit
    def around(x, w, out, words):
        at = int64(cuda.threadIdx.x >> 5) * words
        out[cuda.threadIdx.x] = answer(x, (_WARPS - 1) * words - at, w, at, words)  # the last of x, the first of w

    return around


@cache
def _vectors():
    """Return vectors x and w, one for each warp: integers whose products float32 holds exactly, and bfloat16 not."""
    generator = torch.Generator().manual_seed(4)
    integers = lambda: torch.randint(-127, 128, (_WARPS, 2 * _WORDS), generator=generator).bfloat16()
    return integers(), integers()


def _dot(kernel):
    (x, w), out = _vectors(), torch.full((32 * _WARPS,), float("nan"))
    launch(kernel, 1, 32 * _WARPS, x.view(torch.int32), w.view(torch.int32), out, _WORDS)
    return out


def _test_dot(answer):
    x, w = _vectors()
    right = (w.double() * x.flip(0).double()).sum(1).float().repeat_interleave(32)
    expect_equal("the dot product, by lane", _dot(_around_dot(answer)), right)


dot = Build(
    "a warp's dot product",
    "a function that returns the dot product of two bfloat16 vectors to all lanes of a warp",
    own=answers.dot,
    test=_test_dot,
    profile=lambda answer: count(kernel := _around_dot(answer), lambda _: _dot(kernel), answer),
    counter="global_load_requests",
    unit="loads",
    par=2 * -(-_WORDS // 128),
    par_is_bound=True,
    forbidden={
        "barriers": "warps wait for each other",
        "shared_store_requests": "it writes shared memory, where lanes can exchange registers",
    },
    limits={
        "shuffles": (5, "it exchanges more often than halving needs"),
        "global_load_requests": (4 * -(-_WORDS // 32), "the lanes do not divide the words among them"),
    },
    needs=(("shuffles", "reductions"), "no lane learns what the others have added"),
    over_par="How many bytes can a lane load at once?",
    hint="Lane l takes words 4 l to 4 l + 3, and then every 128th. After the loop, five cuda.shfl_xor_sync at "
    "distances 16, 8, 4, 2 and 1 add the lanes' sums.",
    home=f"{__name__}:dot",
)


# Predict, choose

traffic = Predict(
    "bytes of torch's weighted sum",
    {"gather": 2, "multiplication": 3, "reduction": 2 + 2 / TOPK},
    "The gather reads and writes R. The multiplication reads R and writes a float32 result, 2 R, because the weights "
    f"are float32. The reduction reads that, and writes one row for each {TOPK}, in float32, which you may neglect. "
    f"One kernel could do with {1 + 1 / TOPK:g} R",
    within={"reduction": 2 / TOPK},
)

unstable = Choose(
    "an unstable sort",
    {
        "A": "the check of the layer's output finds it",
        "B": "only a check of the indices finds it",
        "C": "nothing finds it, since all orders are right",
    },
    "B",
    "Each row is computed correctly wherever it lies, and inverse_indices lead to it. But the rows of an expert lie in "
    "the order in which threads arrived, so buffers differ from run to run, and so does everything that depends on "
    "the place of a row, such as a quantisation of blocks of rows, or a test that compares bits.",
)
