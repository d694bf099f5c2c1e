"""``unpack_mxfp4`` against the reference of packed weights: all codes and scales, orders of rows, and bytes moved."""

import pytest
import torch
from helpers.wrong_kernels import changed_maker, is_rejected

from moe_numba import simulator
from moe_numba.grouped_gemm.w4 import dequantize, unpacking
from moe_numba.grouped_gemm.w4.packing import MAX_SCALE, MIN_SCALE, MX_BLOCK, NAN_SCALE, pack_mxfp4
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4
from moe_numba.grouped_gemm.w4.unpacking import THREADS, unpack_mxfp4
from moe_numba.moe_layer.reference_mxfp4 import unpack, unpack_gate_up
from moe_numba.runtime.sass import compile_apart

ORDERS = None, "interleaved", "stacked"
SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="counts in the simulator")
GUARD = 64  # elements beside the output


def weights(groups, n, k, scales=MAX_SCALE + 1, seed=0):
    """Random codes, each of them in each block, and random scales."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.rand(groups, n, k // MX_BLOCK, MX_BLOCK, generator=random).argsort(-1) % 16
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, torch.randint(0, scales, (groups, n, k // MX_BLOCK), generator=random).to(torch.uint8)


def bits(tensor):
    """Return the bits of a tensor in bfloat16, in which all NaN are the same."""
    tensor = tensor.bfloat16()
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor).view(torch.int16)


def mismatch(packed, gate_up, call=unpack_mxfp4):
    """Return None, or what is wrong with the decoded weights; elements beside the output must remain as they were."""
    if gate_up is None:
        wanted = torch.stack([unpack(weight) for weight in packed])
    else:
        wanted = torch.stack([unpack_gate_up(weight, gate_up == "interleaved") for weight in packed])
    memory = torch.full((wanted.numel() + 2 * GUARD,), 7.0, dtype=torch.bfloat16, device=packed.device)
    out, guards = memory[GUARD:-GUARD].view(wanted.shape), (memory[:GUARD], memory[-GUARD:])
    before = [guard.clone() for guard in guards]
    assert call(packed, gate_up, out) is out
    if not torch.equal(bits(out), bits(wanted)):
        return f"{int((bits(out) != bits(wanted)).sum())} weights are wrong"
    return None if all(map(torch.equal, guards, before)) else "elements beside the output were written"


@pytest.mark.parametrize("gate_up", ORDERS)
def test_every_code_with_every_scale(gate_up, device):
    """A row has a scale of its own, the last rows NaN."""
    blocks, _ = weights(1, 192, 64)
    scales = torch.arange(192).clamp(max=MAX_SCALE + 1).view(1, 192, 1).repeat(1, 1, 2).to(torch.uint8)
    scales[scales > MAX_SCALE] = NAN_SCALE
    assert mismatch(pack_mxfp4(blocks.to(device), scales.to(device), gate_up), gate_up) is None


@pytest.mark.parametrize("n, k", ((32, 32), (96, 160)))
def test_sizes_that_packing_pads(n, k, device):
    """The numbers are those of the checkpoint, too, and padded ones zero."""
    blocks, scales = (t.to(device) for t in weights(3, n, k))
    packed = pack_mxfp4(blocks, scales)
    assert mismatch(packed, None) is None
    y = unpack_mxfp4(packed)
    assert y.shape == (3, -(-n // 64) * 64, -(-k // 64) * 64) and not y[:, n:].any() and not y[:, :, k:].any()
    is_zero = (scales < MIN_SCALE).repeat_interleave(MX_BLOCK, 2)
    assert torch.equal(y[:, :n, :k].double(), dequantise_mxfp4(blocks, scales).masked_fill(is_zero, 0))


@pytest.mark.parametrize("gate_up", ORDERS[1:])
def test_gate_and_up_of_several_experts(gate_up, device):
    blocks, scales = (t.to(device) for t in weights(3, 128, 96, MAX_SCALE))
    assert mismatch(pack_mxfp4(blocks, scales, gate_up), gate_up) is None
    other = ORDERS[3 - ORDERS.index(gate_up)]  # whatever the order of the rows that were packed
    assert mismatch(pack_mxfp4(blocks, scales, gate_up), other) is None


def test_a_fake_tensor_has_the_shape(device):
    packed = torch.empty(2, 4, 3, 136, 16, dtype=torch.uint8, device="meta")
    assert unpack_mxfp4(packed, "stacked").shape == (2, 256, 192)


@SIMULATED
@pytest.mark.parametrize("gate_up", ORDERS)
def test_lines_are_written_whole(gate_up):
    """Each byte is moved once, a store of a warp writes four lines of 128 bytes, and no access has bank conflicts."""
    packed = pack_mxfp4(*weights(2, 128, 192), gate_up)
    memory = torch.empty(2 * 128 * 192 + 64, dtype=torch.bfloat16)  # the CPU's allocator does not align to lines
    out = memory[-memory.data_ptr() % 128 // 2 :][: 2 * 128 * 192].view(2, 128, 192)
    with simulator.profile() as p:
        unpack_mxfp4(packed, gate_up, out)
    (result,) = p.kernels
    found = {}
    for line in result.lines:
        for (space, operation, size), accesses in line.accesses.items():
            found.setdefault((space, operation, size), []).append(accesses)
    total = lambda key, counter: sum(getattr(accesses, counter) for accesses in found[key])
    stores, tiles = ("global", "store", 16), packed[..., 0].numel() if gate_up is None else packed[..., 0, 0].numel()
    assert tiles == 12 and total(stores, "requests") == 16 * tiles and total(stores, "lanes") == 512 * tiles
    assert total(stores, "wavefronts") == 4 * total(stores, "requests")
    assert 32 * total(stores, "sectors") == 2 * 4096 * tiles
    assert 32 * sum(total(key, "sectors") for key in found if key[:2] == ("global", "load")) == packed.numel()
    shared = [key for key in found if key[0] == "shared"]
    assert {key[1] for key in shared} == {"load", "stmatrix"}
    assert all(total(key, "wavefronts") == total(key, "ideal_wavefronts") for key in shared)


def test_the_machine_code():
    requests = {
        str(order): (f"unpacking.make_unpack_kernel({order!r})", unpacking.SIGNATURE, THREADS, True) for order in ORDERS
    }
    for report in compile_apart("from moe_numba.grouped_gemm.w4 import unpacking", requests).values():
        assert report.spilled_bytes == 0 and report.stack_bytes == 0 and report.registers <= 40
        assert report.count("STG.E.128") == 4 and report.count("STSM.16.M88.4") == 4 and report.count("LDS.128") == 4


WRONG = {
    "rows of gate come after those of up": (unpacking, "(row >> 3) * to_other", "(1 - (row >> 3)) * to_other"),
    "vectors are loaded without the XOR": (unpacking, "4 * ((lane & 7) ^ (row & 7))", "4 * (lane & 7)"),
    "the second half of a row is the first": (unpacking, "int32(at ^ 16)", "int32(at ^ 8)"),
    "an expert's rows go to the next one": (unpacking, "* warp + group * to_other", "* warp + (group + 1) * to_other"),
    "numbers are at the scale of decoding": (unpacking, "127 + RESULT_EXPONENT << 7", "127 << 7"),
    "a thread's second row has the first one's scale": (dequantize, "mul_rn_bf16x2_high(", "mul_rn_bf16x2_low("),
}


@SIMULATED
@pytest.mark.parametrize("what", WRONG)
def test_wrong_kernels_are_rejected(what, device, monkeypatch):
    packed = pack_mxfp4(*weights(2, 128, 64), "stacked")
    make = changed_maker(unpacking, "make_unpack_kernel", *WRONG[what])
    monkeypatch.setattr(unpacking, "make_unpack_kernel", make)

    def attempt(seed):
        with simulator.seed(seed), simulator.races():
            return mismatch(packed, "stacked")

    assert is_rejected(attempt, seeds=2), f"the check accepts a kernel in which {what}"


@SIMULATED
def test_the_right_kernel_has_no_races(device):
    packed = pack_mxfp4(*weights(2, 128, 64), "stacked")
    with simulator.races():
        assert mismatch(packed, "stacked") is None
