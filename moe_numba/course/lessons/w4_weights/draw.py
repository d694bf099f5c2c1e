"""Figures of 4-bit weights: codes, the way to the tensor cores, a thread's word, bits of a bfloat16, ldmatrix."""

from moe_numba.course.draw.drawing import Drawing
from moe_numba.grouped_gemm.w4.reference import E2M1

__all__ = ["codes", "decoding", "ldmatrix", "path", "word"]
_KINDS = "blue", "green", "orange", "purple"  # of registers 0 to 3


def codes() -> Drawing:
    """Draw the numbers of e2m1 on a line, and what shares a scale."""
    drawing, left, unit = Drawing("e2m1: the numbers of four bits"), 24.0, 56.0
    drawing.line((left, 64), (left + 6 * unit, 64), width=1.4)
    for code, value in enumerate(E2M1):
        x = left + value * unit
        drawing.box(x - 2, 56, 4, 16, "blue")
        drawing.text(x, 48, f"{code:03b}", size=9, anchor="middle")
        drawing.text(x, 86, f"{value:g}", size=10, anchor="middle")
    drawing.note(8, 106, "Above: exponent and mantissa. A fourth bit is the sign.")
    drawing.text(8, 132, "a row of w", bold=True)
    for block in range(3):
        x = 8 + 124 * block
        drawing.box(x, 140, 120, 18, "sky", "32 codes: 16 bytes", size=9)
        drawing.box(x, 160, 16, 14, "orange")
        drawing.note(x + 20, 171, "scale: 1 byte")
    return drawing


def path() -> Drawing:
    """Draw where weights are 4 bits wide and where 16, for the first version and for the kernel that decodes."""
    drawing = Drawing("Where weights have 4 bits, and where 16")
    names = "memory", "shared memory", "registers", "tensor cores"
    for row, (title, wide) in enumerate((("dequantise first", (1, 4, 4, 4)), ("decode in the consumer", (1, 1, 4, 4)))):
        y = 44 + 92 * row
        drawing.text(8, y, title, bold=True)
        for i, (name, size) in enumerate(zip(names, wide)):
            x = 8 + 96 * i
            drawing.box(x, y + 8 + (4 - size) * 3.5, 84, 8 + 7 * size, "sky" if size == 1 else "orange", "", size=9)
            drawing.note(x, y + 56, name)
            if i < 3:
                drawing.line((x + 85, y + 26), (x + 95, y + 26), width=1.4)
        if row == 0:
            drawing.note(8, y + 68, "Memory holds the weights twice: codes, and bfloat16.")
    drawing.legend(218, (("sky", "codes, 4 bits"), ("orange", "bfloat16, 16 bits")))
    return drawing


def word() -> Drawing:
    """Draw the eight codes of a word and the four registers that they become."""
    drawing, side = Drawing("A word of a thread: eight codes, four registers"), 44.0
    drawing.note(8, 40, "bit 31")
    drawing.text(360, 40, "bit 0", size=10, kind="quiet", anchor="end")
    for nibble in range(8):
        x = 8 + side * (7 - nibble)
        drawing.box(x, 46, side - 3, 22, _KINDS[nibble % 4], f"code {nibble}", size=9)
    for register in range(4):
        y = 88 + 26 * register
        drawing.text(8, y + 14, f"register {register}", size=10)
        drawing.box(84, y, 88, 20, _KINDS[register], f"code {register + 4}", size=9)
        drawing.box(174, y, 88, 20, _KINDS[register], f"code {register}", size=9)
        h, r = divmod(register, 2)
        drawing.note(266, y + 14, f"columns {8 * h} on" + (", row + 8" if r else ""))
    drawing.note(84, 200, "high half: second column    low half: first column")
    return drawing


def decoding(code: int) -> Drawing:
    """Draw the bits of an e2m1 code in a bfloat16."""
    drawing, side, left = Drawing(f"The code {code:04b} in a bfloat16"), 22.0, 16.0
    bits = (code & 8) << 12 | (code & 7) << 6
    for bit in range(16):
        x = left + side * (15 - bit)
        own = {15: "orange", 8: "green", 7: "green", 6: "blue"}.get(bit, "pale")
        drawing.box(x, 56, side - 2, 24, own, str(bits >> bit & 1), size=11)
    for x, words in (
        (left + side / 2, "sign"),
        (left + 5 * side, "exponent, 8 bits"),
        (left + 12.5 * side, "mantissa, 7 bits"),
    ):
        drawing.text(x, 48, words, size=9, anchor="middle", kind="quiet")
    for n, (bit, kind) in enumerate(((15, "orange"), (8, "green"), (7, "green"), (6, "blue"))):
        x = left + side * (5 + 1.6 * n)
        drawing.box(x, 124, side - 2, 22, kind, str(code >> (3 - n) & 1), size=11)
        drawing.line((x + side / 2, 124), (left + side * (15 - bit) + side / 2, 82), width=1.2)
    value = E2M1[code & 7] * (-1 if code & 8 else 1)
    drawing.note(left, 164, f"The code is {value:g}, and the bfloat16 is {value:g} times 2 to the power of -126.")
    drawing.note(left, 178, "The other exponent bits are 0: both are subnormal, or neither is.")
    return drawing


def ldmatrix() -> Drawing:
    """Draw which lane passes the address of which chunk of the tokens, and where the chunks stand."""
    drawing, wide, tall = Drawing("ldmatrix: lane 8 i + r addresses chunk i of token r"), 42.0, 18.0
    for row in range(8):
        y = 50 + tall * row
        drawing.note(4, y + 12, f"token {row}")
        for at in range(8):
            chunk = at ^ row
            kind = _KINDS[chunk] if chunk < 4 else "pale"
            words = f"lane {8 * chunk + row}" if chunk < 4 else f"{chunk}"
            drawing.box(48 + wide * at, y, wide - 2, tall - 2, kind, words, size=8)
    drawing.note(8, 50 + 8 * tall + 14, "A colour: a chunk of 16 bytes, 8 elements of k, of all tokens, a matrix.")
    drawing.note(8, 50 + 8 * tall + 28, "Grey: chunks 4 to 7, which the second load takes.")
    return drawing
