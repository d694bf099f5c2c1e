"""Exercises of the lesson "4-bit weights"; the page checks answers with `exercises.<name>`."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint8, uint32

from moe_numba.course.grader import Wrong, expect_equal
from moe_numba.course.lessons.w4_weights import answers, runs
from moe_numba.course.lessons.w4_weights.sizes import CODE_BYTES, TILE, TOKENS, X_BYTES
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.runtime.launch import launch

# Predict: bytes


_TRAFFIC = "Weights in bfloat16 would be read once, 16 bits. So this way is slower than not to quantise at all."
traffic = Predict("traffic", {"decoder_reads": 4.25, "decoder_writes": 16, "gemm_reads": 16}, _TRAFFIC)


# Build: the place of a code


def _is_place(answer):
    packed = {place: (row, column) for (row, column), place in _places().items()}
    for (row, column), place in _places().items():
        found = answer(row, column)
        if found is ...:
            raise Wrong("not answered yet: return a thread, a word and a bit")
        if tuple(found) != place:
            other = packed.get(tuple(found))
            has = f", where the code of row {other[0]}, column {other[1]} is" if other else ", which no code has"
            raise Wrong(f"row {row}, column {column}: the result is {tuple(found)}{has}")


def _places():
    """Return the place of each code as `runs.pack` has it: (row, column) -> (thread, word, bit)."""
    if not _found:
        index = np.arange(TILE * TILE).reshape(TILE, TILE)
        for bit in range(12):  # of the index of a code
            codes = torch.from_numpy((index >> bit & 1).astype(np.uint8))
            blocks = (codes[:, 0::2] | codes[:, 1::2] << 4)[None]
            packed = runs.pack(blocks, torch.full((1, TILE, TILE // 32), 127, dtype=torch.uint8))[0, 0, 0, :CODE_BYTES]
            nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten().numpy().astype(int)
            _nibbles[:] = _nibbles + (nibbles << bit)
        for nibble, code in enumerate(_nibbles):
            row, column = divmod(int(code), TILE)
            _found[row, column] = nibble // 32, nibble // 8 % 4, 4 * (nibble % 8)
    return dict(sorted(_found.items()))


_found: dict = {}
_nibbles = np.zeros(TILE * TILE, int)
_PLACE_HINT = (
    "Invert the sentence on registers: row = 16 w + l // 4 + 8 r, column = 16 s + 8 h + 2 (l % 4) + half. The thread "
    "is 32 w + l, the word is s, and the bit is 16 half + 4 (2 h + r)."
)
place = Formula(
    "place of a code",
    "a function of a row and a column",
    answers.place_of,
    _is_place,
    "all 4096 codes of a tile have their places",
    _PLACE_HINT,
)


# Build: decode a word


def _around_decode(answer):
    @cuda.jit
    def around(words, out):
        i = int32(cuda.blockIdx.x * 32 + cuda.threadIdx.x)
        a, b, c, d = answer(uint32(words[i]))
        out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3] = int32(a), int32(b), int32(c), int32(d)

    return around


def _words():
    """Return words: every code in every place, alone and beside random others."""
    random = np.random.default_rng(3)
    alone = [code << 4 * at for code, at in product(range(16), range(8))]
    full = random.integers(0, 1 << 32, 128)
    return np.array([*alone, *full], np.uint32)


def _decode(answer):
    words = _words()
    out = np.zeros(4 * len(words), np.int32)
    launch(_around_decode(answer), len(words) // 32, 32, torch.from_numpy(words.view(np.int32)), torch.from_numpy(out))
    code = (words[:, None] >> 4 * np.arange(8, dtype=np.uint32) & 15).astype(np.uint32)
    half = (code & 8) << 12 | (code & 7) << 6
    return out.view(np.uint32).reshape(-1, 4), half[:, :4] | half[:, 4:] << 16, words


def _test_decode(answer):
    found, right, words = _decode(answer)
    for word, each, wanted in zip(words, found, right):
        for i in range(4):
            if each[i] != wanted[i]:
                raise Wrong(f"word {word:#010x}: register {i} is {each[i]:#010x}, not {wanted[i]:#010x}")


_PASSED = "MOV", "IMAD.MOV", "S2R", "S2UR", "EXIT", "BRA", "NOP", "LDC", "ULDC", "LDG", "STG", "R2UR", "CS2R", "UMOV"
_AROUND = "LEA", "IADD3", "UIADD3", "VIADD", "ULEA", "USHF", "IADD"


def _decode_code(answer):
    """Return the instructions of a decoder by name, without those that load, store, and compute addresses."""
    with simulator.profile("H200") as profile:
        _decode(answer)
    opcodes = [code["opcode"] for code in profile.kernels[0].static.sass]
    apart = "IMAD.SHL", "IMAD.MOV"  # a shift, and a copy
    names = [next((name for name in apart if code.startswith(name)), code.split(".")[0]) for code in opcodes]
    return {name: names.count(name) for name in names if name not in _PASSED + _AROUND}, names


@cuda.jit(device=True)
def _undecoded(word):
    return word, word, word, word


@cache
def _multiplications_around():
    """Return how many multiplications compute indices, and do not decode."""
    return _decode_code(_undecoded)[0].get("IMAD", 0)


@dataclass(frozen=True)
class Decoder(Build):
    """A `Build` that is judged by the instructions that the compiler makes of it."""

    def judge(self, answer):
        """Return the state, a sentence and the number of instructions of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        counts, names = _decode_code(answer)
        if (own := counts.pop("IMAD", 0) - _multiplications_around()) > 0:
            counts["IMAD"] = own
        amount = sum(counts.values())
        text = f"{amount} instructions ({', '.join(f'{n} {name}' for name, n in counts.items())})"
        if looked := sum(names.count(name) for name in ("LDL", "STL", "LDS", "STS")) or names.count("LDG") > 1:
            return (
                REFUSED,
                f"the result is right, but it is looked up in memory ({int(looked)} accesses), not decoded",
                None,
            )
        if any(name.startswith(("F2", "I2F", "FMUL")) for name in names):
            return REFUSED, f"the result is right, but it is computed as a number: {text}", None
        if amount > self.par:
            return OVER_PAR, f"right, with {text}; par is {self.par}. {self.over_par}", amount
        return RIGHT, f"right, with {text}; par is {self.par}", amount


decode = Decoder(
    "decode a word",
    "a function that returns the four registers of a word",
    own=answers.decode_word,
    test=_test_decode,
    profile=lambda answer: None,  # type: ignore[arg-type,return-value]
    counter="",
    par=16,
    most_alone=None,
    over_par="One shift moves both codes of a register at once, if the mask has bits in both halves.",
    hint="The sign of register 0 is in bits 3 and 19, and must go to bits 15 and 31: one shift by 12 for both, and a "
    "mask of 0x80008000. The other bits go 6 up, with a mask of 0x01C001C0. Register i has the same bits, 4 i further "
    "up.",
    seeds=1,
    home=f"{__name__}:decode",
)


# Build: the multiplication of a warp


def _around_multiply(answer):
    @cuda.jit
    def around(x, weights, out):
        smem = cuda.shared.array(2048, uint8, 1024)
        lane = int32(cuda.threadIdx.x)
        for i in range(lane, X_BYTES, 32):
            row, chunk = int32(i >> 7), int32(i >> 4 & 7)
            smem[uint32(1024 + 128 * row + ((chunk ^ row) << 4) + (i & 15))] = x[i]
        cuda.syncwarp()
        w = 16 * lane
        a = (
            *(uint32(weights[w]), uint32(weights[w + 1]), uint32(weights[w + 2]), uint32(weights[w + 3])),
            *(uint32(weights[w + 4]), uint32(weights[w + 5]), uint32(weights[w + 6]), uint32(weights[w + 7])),
            *(uint32(weights[w + 8]), uint32(weights[w + 9]), uint32(weights[w + 10]), uint32(weights[w + 11])),
            *(uint32(weights[w + 12]), uint32(weights[w + 13]), uint32(weights[w + 14]), uint32(weights[w + 15])),
        )
        acc = answer(_ACC, a, smem, int32(1024))
        out[4 * lane], out[4 * lane + 1], out[4 * lane + 2], out[4 * lane + 3] = acc

    return around


_ACC = tuple(np.float32(v) for v in (1, 2, 3, 4))


def _multiply(kernel):
    generator = torch.Generator().manual_seed(6)
    integers = lambda *shape: torch.randint(-8, 9, shape, generator=generator).bfloat16()
    x, w = integers(TOKENS, TILE), integers(16, TILE)
    lane, register = torch.arange(32)[:, None, None], torch.arange(16)[None, :, None]
    half = torch.arange(2)[None, None]
    row = lane // 4 + 8 * (register % 2)
    column = 16 * (register // 4) + 8 * (register // 2 % 2) + 2 * (lane % 4) + half
    weights = w[row, column].contiguous().view(torch.int32).flatten()
    out = torch.full((128,), float("nan"))
    launch(kernel, 1, 32, x.view(torch.uint8).flatten(), weights, out)
    lane, i = np.mgrid[:32, :4]
    right = (w.float() @ x.float().T).numpy()[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] + np.array(_ACC)
    return out.numpy().reshape(32, 4), right.astype(np.float32)


def _test_multiply(answer):
    found, right = _multiply(_around_multiply(answer))
    for i in range(4):
        name = f"accumulator {i} of the lanes (row l // 4{' + 8' * (i // 2)}, token 2 (l % 4){' + 1' * (i % 2)})"
        expect_equal(name, found[:, i], right[:, i])


multiply = Build(
    "multiplication of a warp",
    "a function that adds the product of 16 rows, 8 tokens and 64 elements of k",
    own=answers.multiply_by_warp,
    test=_test_multiply,
    profile=lambda answer: count(kernel := _around_multiply(answer), lambda _: _multiply(kernel), answer),
    counter="shared_load_requests",
    unit="loads from shared memory",
    par=2,
    par_is_bound=True,
    forbidden={
        "shuffles": "lanes pass each other what ldmatrix distributes",
        "shared_store_requests": "it writes shared memory, where tokens lie in place",
    },
    most_alone=None,
    over_par="One ldmatrix loads four chunks of all eight tokens.",
    hint="Lane 8 i + r passes the index at + 128 r + 16 (i ^ r). Chunk i + 4 of the same row is 64 bytes away: i ^ 4 "
    "flips one bit, so the index of the second load is that of the first, with ^ 64.",
    home=f"{__name__}:multiply",
)


# Diagnose: wrong columns


def colleagues_pack(blocks, scales):
    """Pack weights as `runs.pack`, with registers 0 and 1 exchanged with registers 2 and 3."""
    packed = runs.pack(blocks, scales)
    codes = packed[..., :CODE_BYTES].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # bytes: two nibbles, of r 0 and 1
    return torch.cat([codes, packed[..., CODE_BYTES:]], -1)


_COLUMNS = (
    "Columns c and c + 8 of 16 are exchanged. Register 2 h + r has the columns from 8 h on, so registers 0 and 1 are "
    "exchanged with 2 and 3. The two codes of a register are neighbours (c ^ 1), a neighbouring thread has columns 2 "
    "further on, and another word those 16 further on."
)
columns = Choose(
    "wrong weights",
    {
        "A": "the two codes of a register are exchanged",
        "B": "registers 0 and 1 are exchanged with 2 and 3",
        "C": "each thread has the codes of its neighbour",
        "D": "the four words of a thread are in another order",
    },
    "B",
    _COLUMNS,
)
