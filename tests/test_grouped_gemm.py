"""The grouped GEMM: its arithmetic of tiles, its checker, and its kernel on small tiles, also wrong ones."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_kernels import changed

from moe_numba import simulator  # before numba: it chooses the engine
from moe_numba.runtime import device as devices

# isort: split
from moe_numba.grouped_gemm import (
    checks,
    configs,
    epilogue,
    gather,
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_blockwise_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    kernel,
    mainloop,
    producer,
    reference,
)
from moe_numba.grouped_gemm.constants import THREADS, Constants, Layout
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.schedule import host
from moe_numba.runtime.launch import address, current_stream, launcher
from moe_numba.runtime.tensor_map import encode_tensor_map
from moe_numba.runtime.validate import UnsupportedDeviceError

# Which tile comes next


@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=20).filter(any),
    most=st.sampled_from([8, 16, 144, 256]),
    parts=st.integers(1, 2),
    across=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_tiles_cover_each_row_once(lengths, most, parts, across):
    """Each (row, tile of weights) lies in one tile, no tile is empty, none is larger than allowed."""
    counts = [int(host.tiles_of(n, most * parts)) * across for n in lengths]
    first = [sum(counts[:g]) for g in range(len(lengths))]
    seen = set()
    for number in range(sum(counts)):
        g = int(host.group_of(first, 0, len(lengths), number))
        assert first[g] <= number < first[g] + counts[g]
        tiles = counts[g] // across
        part = int(host.part_of(lengths[g], tiles, parts))
        assert part % 8 == 0 and 0 < part <= most
        n = int(host.divide(number - first[g], tiles))
        begin = (number - first[g] - n * tiles) * part * parts
        rows = range(begin, min(begin + part * parts, lengths[g]))
        cells = {(g, row, n) for row in rows}
        assert cells and not cells & seen and n < across
        seen |= cells
    assert len(seen) == sum(lengths) * across


@pytest.mark.parametrize("scaling, groups, parts", [("tensor", 512, 1), ("block", 64, 2)])
def test_shared_memory_is_laid_out_without_overlap(scaling, groups, parts):
    constants = Constants(scaling=scaling, groups=groups, parts=parts, stages=3)
    layout = Layout(constants)
    ends = [
        (0, layout.staging_at),
        (layout.staging_at, layout.factors_at * 4),
        (layout.factors_at * 4, layout.full_at * 8),
        (layout.full_at * 8, layout.empty_at * 8),
        (layout.empty_at * 8, layout.sums_at * 4),
        (layout.sums_at * 4, layout.tiles_at * 4),
        (layout.tiles_at * 4, layout.bytes),
    ]
    assert all(start <= end for start, end in ends) and all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
    assert layout.stage_bytes % 1024 == 0 and layout.factor_pitch % 4 == 0
    assert layout.full_at * 2 >= layout.factors_at + 3 * layout.stage_factors
    assert layout.bytes >= 4 * (layout.tiles_at + groups + 1)


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "block", "none"])
def test_every_form_fits_a_blocks_shared_memory(scaling, activated):
    for average in (1, 16, 40, 64, 100, 300):
        constants = configs.form_for(scaling, "lengths", average, activated)
        assert Layout(constants._replace(gather=True)).bytes <= 227 * 1024, constants
        assert Layout(constants).bytes <= 227 * 1024, constants
        assert constants.sizes[0] == constants.tokens and list(constants.sizes) == sorted(constants.sizes, reverse=True)


# The kernel


def case(constants, lengths, n, k, device="cpu", seed=0):
    """Random inputs of a problem, and what must come out; rows beyond the groups' are there to be left alone."""
    torch.manual_seed(seed)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    capacity = 0
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    if constants.rows == "masked":
        capacity = int(lengths.max()) + 3
        starts = torch.arange(len(lengths), dtype=torch.int32) * capacity
    total = capacity * len(lengths) if capacity else int(lengths.sum()) or 4  # of an empty tensor TMA has no map
    dtype = FP8 if constants.dtype == "e4m3" else torch.bfloat16
    x = (torch.randn(total, k, device=device) * 0.5).to(dtype)
    weight = (torch.randn(len(lengths), n, k, device=device) * 0.5).to(dtype)
    x_scale = torch.rand(total, -(-k // 128), device=device) + 0.5
    weight_scale = torch.rand(len(lengths), -(-n // 128), -(-k // 128), device=device) + 0.5
    if constants.scaling == "block":
        right = reference.group_gemm_blockwise(x, weight, lengths, starts, x_scale, weight_scale)
    else:
        weight_scale = torch.rand(len(lengths), device=device) + 0.5
        factors = weight_scale if constants.scaling == "tensor" else None
        right = reference.group_gemm(x, weight, lengths, starts, factors)
    return SimpleNamespace(
        x=x,
        weight=weight,
        lengths=lengths.to(device),
        starts=starts.to(device),
        x_scale=x_scale,
        weight_scale=weight_scale,
        right=right,
        capacity=capacity,
        indices=None,
    )


def run(constants, given, blocks=2, seed=0):  # blocks: a multiple of constants.cluster
    """The kernel's output, poisoned before, with 4 rows behind it that nobody may touch."""
    made, shared_bytes = kernel.make_kernel(constants)
    indices, k = given.lengths if given.indices is None else given.indices, given.x.shape[1]
    total = len(given.x if given.indices is None else given.indices)
    n, line, device = given.weight.shape[1], 128 // given.x.element_size(), given.x.device
    y = torch.full((total + 4, n), float("nan"), dtype=torch.bfloat16, device=device)
    start = launcher(
        made,
        configs.SIGNATURE,
        device.index or 0,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=constants.cluster if constants.cluster > 1 else None,
    )
    lengths = given.lengths if constants.rows != "offsets" else (given.starts[:-1] + given.lengths)
    tensors = y, y, lengths, given.starts, given.x_scale, given.weight_scale
    with simulator.seed(seed):
        start(
            blocks,
            THREADS,
            current_stream(device.index or 0),
            encode_tensor_map(given.x, (Layout(constants).box_tokens, line), swizzle=128),
            encode_tensor_map(given.weight, (1, 128, line), swizzle=128),
            *map(address, tensors),
            len(given.lengths),
            total,
            given.capacity,
            n,
            k,
            address(given.x),
            address(indices),
            len(given.x),
            k * given.x.element_size(),
        )
    assert bool(y[total:].isnan().all()), "rows behind the output were written"
    return y[:total]


PATTERNS = {
    "empty groups": [0, 3, 0, 0, 9, 0],
    "one row": [1],
    "an exact tile, and one row more": [16, 17],
    "all in one group": [0, 70, 0],
    "no row is of a group": [0, 0],
}
FORMS = {
    "tensor": Constants(tokens=16, sizes=(16, 8), stages=3, groups=8),
    "tensor, two parts": Constants(tokens=16, parts=2, sizes=(16, 8), stages=2, groups=8),
    "block": Constants(scaling="block", tokens=16, sizes=(16,), stages=3, groups=8),
    "block, two parts": Constants(scaling="block", tokens=24, parts=2, sizes=(24, 8), stages=3, groups=8),
    "bf16": Constants(dtype="bf16", scaling="none", tokens=16, sizes=(16,), stages=3, groups=8),
    "tensor, two blocks": Constants(tokens=16, sizes=(16,), stages=3, groups=8, cluster=2),
    "block, two parts, two blocks": Constants(
        scaling="block", tokens=16, parts=2, sizes=(16,), stages=3, groups=8, cluster=2
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_groups_of_all_sizes(form, pattern, device):
    given = case(FORMS[form], PATTERNS[pattern], 128, 256 if form != "bf16" else 128, device)
    assert mismatch(run(FORMS[form], given), given.right) is None


@pytest.mark.parametrize("form", ["tensor", "block", "bf16", "block, two parts, two blocks"])
@pytest.mark.parametrize("n, k", [(64, 64), (192, 320), (256, 128), (384, 64)])
def test_sizes_that_are_no_multiples_of_a_tile(form, n, k, device):
    given = case(FORMS[form], [5, 0, 12], n, k, device)
    assert mismatch(run(FORMS[form], given, blocks=4), given.right) is None


@pytest.mark.parametrize("rows", ["offsets", "masked"])
def test_rows_given_otherwise(rows, device):
    constants = FORMS["tensor"]._replace(rows=rows)
    given = case(constants, [3, 0, 20], 128, 128, device)
    assert mismatch(run(constants, given), given.right) is None


def test_more_groups_than_threads_of_a_scan(device):
    constants = FORMS["tensor"]._replace(groups=400)
    given = case(constants, [1 if g in (0, 399) else 0 for g in range(400)], 64, 64, device)
    assert mismatch(run(constants, given, blocks=1), given.right) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_things_does_not_matter(seed, device):
    given = case(FORMS["block, two parts"], [30, 50], 128, 256, device)
    first = run(FORMS["block, two parts"], given, seed=0)
    assert mismatch(first, given.right) is None
    assert torch.equal(run(FORMS["block, two parts"], given, seed=seed), first)


@pytest.mark.parametrize("lengths, starts", [([-5, 3], [0, 0]), ([3, 1 << 30], [0, 3]), ([4, 4], [-7, 1 << 30])])
def test_nonsense_in_device_memory_stays_in_bounds(lengths, starts, device):
    given = case(FORMS["tensor"], [4, 4], 64, 64, device)
    given.lengths, given.starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in (lengths, starts))
    run(FORMS["tensor"], given)  # asserts that the rows behind the output are as they were


# Rows chosen by an index


def scattered(given):
    """The same problem, but x and its scales lie in another order, among rows that nobody wants."""
    count, rows = len(given.x), torch.randperm(len(given.x) + 5)[: len(given.x)].to(given.x.device)
    for name in ("x", "x_scale"):
        wide = torch.full((count + 5, getattr(given, name).shape[1]), float("nan"), device=rows.device)
        wide = wide.to(getattr(given, name).dtype)
        wide[rows] = getattr(given, name)
        setattr(given, name, wide)
    given.indices = rows.int()
    return given


GATHERED = {name: form._replace(gather=True, stages=3) for name, form in FORMS.items() if form.cluster == 1}


@pytest.mark.parametrize("form", GATHERED)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_are_found_by_their_index(form, pattern, device):
    given = scattered(case(GATHERED[form], PATTERNS[pattern], 128, 256 if form != "bf16" else 128, device))
    assert mismatch(run(GATHERED[form], given), given.right) is None


@pytest.mark.parametrize("form", ["tensor", "block, two parts", "bf16"])
@pytest.mark.parametrize("n, k", [(64, 64), (192, 320)])
def test_rows_are_found_whatever_the_sizes(form, n, k, device):
    given = scattered(case(GATHERED[form], [5, 0, 12, 40], n, k, device))
    assert mismatch(run(GATHERED[form], given, blocks=3), given.right) is None


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_order_in_which_rows_arrive_does_not_matter(seed, device):
    given = scattered(case(GATHERED["block, two parts"], [30, 50], 128, 640, device))
    first = run(GATHERED["block, two parts"], given)
    assert mismatch(first, given.right) is None
    assert torch.equal(run(GATHERED["block, two parts"], given, seed=seed), first)


def test_what_cannot_gather():
    with pytest.raises(ValueError, match="cluster is 2; with gather it must be 1"):
        kernel.make_kernel(GATHERED["tensor"]._replace(cluster=2))
    with pytest.raises(ValueError, match="stages is 2; with block scaling or gather it must be 3 or more"):
        kernel.make_kernel(GATHERED["tensor"]._replace(stages=2))


# The checks must be able to fail

RELEASE = "            if release:\n                give_back(bars, empty_at + stage)\n"
WRONG = {
    "a stage is read before it is full": (
        mainloop,
        "            mbarrier_wait_parity(bars, full_at + stage, parity)\n",
        "",
    ),
    "a stage is filled while it is read": (
        producer,
        "                mbarrier_wait_parity(bars, empty_at + stage, parity)\n                mbarrier_arrive_expect",
        "                mbarrier_arrive_expect",
    ),
    "too few bytes are expected": (producer, "full_at + stage, tma_bytes)", "full_at + stage, tma_bytes - 16)"),
    "a stage is given back before it was multiplied": (
        mainloop,
        f"product = wait(tile(a, b))\n{RELEASE}",
        f"product = tile(a, b)\n{RELEASE}            product = wait(product)\n",
    ),
    "a group's rows run on into the next": (epilogue, "int32(min(rows, part)), int32(rows", "part, int32(rows"),
    "the wrong group's weights": (producer, "int32(n * TILE_ROWS), g, bars", "int32(n * TILE_ROWS), int32(0), bars"),
    "the product of the last stage is left out": (
        mainloop,
        "for _ in range(k_blocks):",
        "for _ in range(k_blocks - 1):",
    ),
    "the chunks of the staging are not put back": (epilogue, "((chunk ^ (token & 7)) << 4)", "(chunk << 4)"),
    "a chunk is read before all four warps wrote it": (
        epilogue,
        "            put_first(smem, put, total, factor)\n            bar_sync(int32(2 + group), 128)\n",
        "            put_first(smem, put, total, factor)\n",
    ),
    "chosen rows are said to be there before they are": (gather, "    wait_for_all()\n", ""),
    "chosen rows are not fenced": (gather, "    fence_proxy_async_shared()\n", ""),
    "chosen rows are fenced before they are there": (
        gather,
        "    wait_for_all()\n    fence_proxy_async_shared()\n",
        "    fence_proxy_async_shared()\n    wait_for_all()\n",
    ),
    "a chosen row's chunks are not swizzled": (gather, "((chunk ^ t) << 4)", "(chunk << 4)"),
    "a row is that of another's index": (gather, "x, b, least", "x, a, least"),
    "an index beyond x is read": (gather, "index if index < height else int32(-1)", "index"),
}


ON_A_GPU = {  # the others would hang it, or come out right by luck
    "a group's rows run on into the next",
    "the wrong group's weights",
    "the product of the last stage is left out",
    "the chunks of the staging are not put back",
    "a chosen row's chunks are not swizzled",
    "a row is that of another's index",
}


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what in ON_A_GPU])
def test_wrong_kernels_are_rejected(what, monkeypatch, device):
    module, right, wrong = WRONG[what]
    made = changed(module, right, wrong)
    user = {epilogue: mainloop, gather: producer}.get(module, kernel)
    names = {mainloop: ["make_compute"], producer: ["make_load"], epilogue: ["make_write"]}
    for name in names.get(module, ["make_choose", "make_fetch", "land"]):
        monkeypatch.setattr(user, name, made[name])
    if module is gather:
        monkeypatch.setattr(kernel, "make_scale", producer.make_scale.__wrapped__)
    if module is epilogue:
        monkeypatch.setattr(kernel, "make_compute", mainloop.make_compute.__wrapped__)
    monkeypatch.setattr(kernel, "make_kernel", kernel.make_kernel.__wrapped__)
    given, form = case(FORMS["tensor"], [5, 11], 128, 768, device), FORMS["tensor"]
    if module is gather:
        given, form = scattered(given), GATHERED["tensor"]
        if "beyond x" in what:
            given.indices[3], given.right[3] = len(given.x), 0
    for seed in range(8):
        try:
            out = run(form, given, blocks=1, seed=seed)
        except (simulator.SimulatorError, AssertionError):
            return
        if mismatch(out, given.right):
            return
    pytest.fail(f"the check let a kernel pass in which {what}")


def test_the_checker_sees_what_is_wrong():
    right = torch.randn(6, 512, dtype=torch.float64)
    right[4:] = float("nan")
    good = right.bfloat16()
    assert mismatch(good, right) is None
    for change, says in [
        (lambda y: y[5].fill_(0), "row 5 is of no group"),
        (lambda y: y[2, 3:4].fill_(float("nan")), "row 2 is not written"),
        (lambda y: y[1].mul_(1.02), "row 1 is off by"),
        (lambda y: y.copy_((right * 1.002).bfloat16()), "all is off by"),
    ]:
        out = good.clone()
        change(out)
        assert says in mismatch(out, right)
    assert "shape" in mismatch(good[:3], right)


# The public functions


def inputs(lengths=(5, 0, 15), n=128, k=192, device="cpu"):
    """A small problem as a user has it: the arguments of the three functions, and what each must give."""
    torch.manual_seed(1)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), seqlens.cumsum(0).int()])
    x, weight = torch.randn(int(seqlens.sum()), k), torch.randn(len(lengths), n, k)
    (xq, xs), (wq, ws) = reference.quantise_rows(x), reference.quantise_blocks(weight)
    scale = torch.rand(len(lengths)) + 1
    every = {
        "pertensor": (xq, wq, seqlens, cu_seqlens, scale),
        "blockwise": (xq, wq, seqlens, cu_seqlens, xs, ws),
        "bf16": (x.bfloat16(), weight.bfloat16(), seqlens, cu_seqlens),
    }
    return {name: tuple(tensor.to(device) for tensor in arguments) for name, arguments in every.items()}


FUNCTIONS = {
    "pertensor": (group_gemm_pertensor_fp8, reference.group_gemm),
    "blockwise": (group_gemm_blockwise_fp8, reference.group_gemm_blockwise),
    "bf16": (group_gemm_bf16, reference.group_gemm),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("average", [None, 1, 16, 40, 64, 100, 300])
def test_every_form_gives_the_same(name, average, device):
    """The average number of rows chooses tiles, and changes nothing else."""
    function, right = FUNCTIONS[name]
    arguments = inputs(device=device)[name]
    assert mismatch(function(*arguments, num_seq_per_group_avg=average), right(*arguments)) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_by_ends_and_masked(name, device):
    function, right = FUNCTIONS[name]
    x, weight, seqlens, cu_seqlens, *scales = inputs(device=device)[name]
    expected = right(x, weight, seqlens, cu_seqlens, *scales)
    assert mismatch(function(x, weight, None, None, *scales, offs=cu_seqlens[1:].clone()), expected) is None
    wide = lambda rows: torch.stack(
        [
            torch.nn.functional.pad(rows[a : a + n].float(), (0, 0, 0, 16 - n))
            for a, n in zip(cu_seqlens.tolist(), seqlens.tolist(), strict=False)
        ]
    ).to(rows.dtype)
    if name == "blockwise":
        scales = [wide(scales[0]), scales[1]]
    out = torch.full((3, 16, 128), float("nan"), dtype=torch.bfloat16, device=device)
    assert function(wide(x), weight, seqlens, None, *scales, out=out) is out
    got = torch.cat([out[g, :n] for g, n in enumerate(seqlens.tolist())])
    assert mismatch(got, expected) is None
    assert all(bool(out[g, n:].isnan().all()) for g, n in enumerate(seqlens.tolist()))


ACTIVATED = {
    "pertensor": (group_gemm_silu_and_mul_pertensor_fp8, reference.group_gemm),
    "blockwise": (group_gemm_silu_and_mul_blockwise_fp8, reference.group_gemm_blockwise),
}


INDICES = {  # 20 rows of the 20 that x has
    "each twice": [i // 2 for i in range(20)],
    "in another order": [7 * i % 20 for i in range(20)],
    "all the same": [13] * 20,
    "some that x has not": [-1, 5, 20, 3, 19, 1 << 30, -(1 << 31), *range(13)],
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"{name}, activated" for name in ACTIVATED)])
@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("average", [1, 64, 300])
def test_an_index_spares_the_copy(name, indices, average, device):
    """Bit by bit what the function gives for rows that were put in order before."""
    name, _, activated = name.partition(", ")
    function = (ACTIVATED if activated else FUNCTIONS)[name][0]
    x, weight, seqlens, cu_seqlens, *scales = inputs(n=256, device=device)[name]
    indices, ordered = torch.tensor(INDICES[indices], dtype=torch.int32, device=device), list(scales)
    if name == "blockwise":
        ordered[0] = reference.gather(scales[0], indices)
    right = function(reference.gather(x, indices), weight, seqlens, cu_seqlens, *ordered, average)
    rows = (
        dict(seqlens=None, cu_seqlens=None, offs=cu_seqlens[1:].clone())
        if average == 64
        else dict(seqlens=seqlens, cu_seqlens=cu_seqlens)
    )
    scales = dict(zip(("x_scale", "w_scale") if len(scales) == 2 else ("y_scale",), scales, strict=False))
    out = function(x, weight, **rows, **scales, num_seq_per_group_avg=average, gather_indices=indices)
    for got, wanted in zip(out, right, strict=True) if activated else [(out, right)]:
        assert torch.equal(got.float(), wanted.float())


def test_fewer_rows_more_rows_and_rows_of_nothing(device):
    """As many rows come out as there are indices, however many rows x has, and wherever they lie."""
    x, weight, seqlens, cu_seqlens, scale = inputs(device=device)["pertensor"]
    arguments = weight, seqlens, cu_seqlens, scale
    indices = torch.arange(20, dtype=torch.int32, device=device) % 3
    wide = torch.cat([x, x], 1)[:3, : x.shape[1]]  # rows that lie further apart
    assert torch.equal(
        group_gemm_pertensor_fp8(wide, *arguments, gather_indices=indices),
        group_gemm_pertensor_fp8(x[indices.long()], *arguments),
    )
    assert not group_gemm_pertensor_fp8(x[:0].clone(), *arguments, gather_indices=indices).any()
    one, first = x[:1, :64].clone(), weight[..., :64].contiguous()
    assert torch.equal(
        group_gemm_pertensor_fp8(one, first, *arguments[1:], gather_indices=indices // 3),
        group_gemm_pertensor_fp8(one.expand(20, -1).contiguous(), first, *arguments[1:]),
    )
    assert group_gemm_pertensor_fp8(x, *arguments, gather_indices=indices[:0]).shape == (0, 128)


def activated_mismatch(y, scale, right):
    """What is wrong with activated results: FP8 has 3 bits behind the first, so half a step is a 16th of a number.

    Where gate or up is the small sum of large products, it is as wrong as those: of a block's largest 0.2 %.
    """
    wanted, its_scale = reference.quantise_rows(right)
    if not torch.allclose(scale, its_scale, rtol=0.01, atol=1e-9):
        return "a scale is wrong"
    wide = scale.repeat_interleave(128, 1)
    got = y.float() * wide
    step = wide * torch.clamp(right.abs() / wide, 2**-6) / 16
    if bool(((got - right).abs() > 1.2 * step + 0.01 * right.abs() + 2e-3 * 448 * wide).any()):
        return "an element is off by more than half a step"
    same = float((y.view(torch.uint8) == wanted.view(torch.uint8)).float().mean())
    return None if same > 0.95 else f"only {100 * same:.0f} % of the elements are the same"


@pytest.mark.parametrize("name", ACTIVATED)
@pytest.mark.parametrize("average", [1, 16, 40, 100])
def test_activation_behind_the_product(name, average, device):
    function, product = ACTIVATED[name]
    arguments = inputs((5, 0, 35), n=512, device=device)[name]
    right = reference.silu_and_mul(product(*arguments))
    y, scale = function(*arguments, num_seq_per_group_avg=average)
    assert y.dtype == FP8 and scale.shape == (40, 2)
    assert activated_mismatch(y, scale, right) is None
    for wrong in (right.roll(1, 0), right.roll(1, 1), reference.silu_and_mul(-product(*arguments))):
        assert activated_mismatch(y, scale, wrong)  # of another row, of another column, of other signs


def test_activation_wants_whole_blocks_and_its_outputs(device):
    arguments = inputs(n=128, device=device)["pertensor"]
    with pytest.raises(ValueError, match="weight's n is 128; of gate and up it must be a multiple of 256"):
        group_gemm_silu_and_mul_pertensor_fp8(*arguments)
    arguments = inputs(n=256, device=device)["pertensor"]
    out = torch.zeros(20, 128, device=device).to(FP8), torch.zeros(20, 1, device=device)
    assert group_gemm_silu_and_mul_pertensor_fp8(*arguments, out=out) is out and bool(out[1].all())
    with pytest.raises(ValueError, match="out's scale"):
        group_gemm_silu_and_mul_pertensor_fp8(*arguments, out=(out[0], torch.zeros(20, 2, device=device)))


def test_no_rows(device):
    x, weight, seqlens, cu_seqlens, scale = inputs((0, 0), device=device)["pertensor"]
    assert group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, scale).shape == (0, 128)


X, WEIGHT, SEQLENS, CU_SEQLENS, SCALE = inputs()["pertensor"]
BAD = {
    "x is torch.float32": dict(x=X.float()),
    "weight is torch.float32": dict(weight=WEIGHT.float()),
    "x has shape (192,)": dict(x=X[0]),
    "x has 128 columns": dict(x=X[:, :128]),
    "weight's n is 96": dict(weight=WEIGHT[:, :96]),
    "weight's k is 32": dict(x=X[:, :32], weight=WEIGHT[:, :, :32]),
    "weight has 0 groups": dict(weight=WEIGHT[:0], y_scale=SCALE[:0]),
    "seqlens is torch.int64": dict(seqlens=SEQLENS.long()),
    "seqlens has shape (2,)": dict(seqlens=SEQLENS[:2]),
    "cu_seqlens has shape (3,)": dict(cu_seqlens=CU_SEQLENS[:3]),
    "y_scale is torch.float64": dict(y_scale=SCALE.double()),
    "y_scale has shape (1,)": dict(y_scale=SCALE[:1]),
    "num_seq_per_group_avg is -1": dict(num_seq_per_group_avg=-1),
    "offs is given": dict(offs=CU_SEQLENS[1:].clone()),
    "x is masked": dict(x=X[:18].view(3, 6, 192)),
    "seqlens is NoneType": dict(seqlens=None),
    "gather_indices is torch.int64": dict(gather_indices=torch.arange(20)),
    "gather_indices has shape (4, 5)": dict(gather_indices=torch.zeros(4, 5, dtype=torch.int32)),
    "gather_indices is given": dict(x=X[:18].view(3, 6, 192), cu_seqlens=None, gather_indices=SEQLENS),
    "out's y is torch.bfloat16 (20, 128)": dict(gather_indices=SEQLENS, out=torch.zeros(20, 128, dtype=torch.bfloat16)),
    "out's y is torch.float32": dict(out=torch.zeros(20, 128)),
    "out's y starts at address": dict(out=torch.zeros(20 * 128 + 1, dtype=torch.bfloat16)[1:].view(20, 128)),
}


@pytest.mark.parametrize("says", BAD)
def test_what_is_refused_and_how(says, device):
    arguments = dict(x=X, weight=WEIGHT, seqlens=SEQLENS, cu_seqlens=CU_SEQLENS, y_scale=SCALE) | BAD[says]
    arguments = {n: v.to(device) if isinstance(v, torch.Tensor) and n != "out" else v for n, v in arguments.items()}
    if says.startswith("out's y starts"):  # .to() would align it
        arguments["out"] = torch.zeros(20 * 128 + 1, dtype=torch.bfloat16, device=device)[1:].view(20, 128)
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        group_gemm_pertensor_fp8(**arguments)


# On a GPU: large


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "lengths, n, k",
    [  # hpc-ops' own cases, and DeepSeek-V3's two products with uneven groups
        ([8, 16, 32, 64, 128, 256, 384, 512], 4096, 7168),
        ([30] * 128, 1024, 4096),
        ([30] * 256, 4096, 4096),
        ([0, 1, 300, 257, 7, 0, 64, 144, 145, 288, 289, 16], 4096, 7168),
        ([700, 0, 33, 255, 256, 1], 7168, 2048),
        ([1] * 512, 512, 512),
    ],
)
def test_large_sizes(name, lengths, n, k):
    """Checked for some of the groups, and as a whole for what is written."""
    if name == "bf16" and len(lengths) > 200:
        pytest.skip("too much memory for the reference")
    function, right = FUNCTIONS[name]
    torch.manual_seed(2)
    groups, device = len(lengths), "cuda"
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32, device=device), seqlens.cumsum(0).int()])
    dtype = torch.bfloat16 if name == "bf16" else FP8
    x = (torch.randn(sum(lengths), k, device=device) * 0.5).to(dtype)
    weight = torch.empty(groups, n, k, dtype=dtype, device=device)
    for g in range(groups):
        weight[g] = (torch.randn(n, k, device=device) * 0.5).to(dtype)
    scales = {
        "bf16": (),
        "pertensor": (torch.rand(groups, device=device) + 0.5,),
        "blockwise": (
            torch.rand(len(x), k // 128, device=device) + 0.5,
            torch.rand(groups, n // 128, k // 128, device=device) + 0.5,
        ),
    }[name]
    whole = torch.full((len(x) + 64, n), float("nan"), dtype=torch.bfloat16, device=device)
    out = whole[: len(x)]
    for average in (None, 300):
        out.fill_(float("nan"))
        function(x, weight, seqlens, cu_seqlens, *scales, num_seq_per_group_avg=average, out=out)
        first = out.clone()
        assert not bool(out.isnan().any()) and bool(whole[len(x) :].isnan().all())
        for g in sorted({0, groups // 2, groups - 1, lengths.index(max(lengths))}):
            one, rows = slice(g, g + 1), slice(int(cu_seqlens[g]), int(cu_seqlens[g + 1]))
            here = {
                "bf16": (),
                "pertensor": [s[one] for s in scales],
                "blockwise": [scales[0][rows], scales[1][one]] if len(scales) > 1 else [],
            }[name]
            expected = right(x[rows], weight[one], seqlens[one], torch.zeros(2, dtype=torch.int32), *here)
            assert mismatch(out[rows], expected) is None, (g, average)
        for _ in range(20):
            function(x, weight, seqlens, cu_seqlens, *scales, num_seq_per_group_avg=average, out=out)
            assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "groups, rows, n, k, repeats",
    [(1, 8192, 8192, 8192, 200), (32, 2048, 4096, 7168, 1000), (32, 8192, 7168, 2048, 500)],
)
def test_every_call_gives_the_same_bits(groups, rows, n, k, repeats):
    from moe_numba.course.bench.topics import grouped_gemm as topic

    p = topic.problem(topic.random_weight(groups, n, k), topic.lengths_of(groups, rows))
    arguments = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale
    right = reference.group_gemm(*arguments)
    first = group_gemm_pertensor_fp8(*arguments)
    assert mismatch(first, right) is None
    for i in range(repeats):
        p.out.fill_(float("nan"))
        group_gemm_pertensor_fp8(*arguments, out=p.out)
        assert torch.equal(p.out, first), f"call {i}: {int((p.out != first).sum())} elements differ"


@pytest.mark.gpu
def test_a_graph_follows_the_lengths():
    """The lengths are read on the GPU: one captured call serves whatever they are when it is replayed."""
    x, weight, seqlens, cu_seqlens, scale = inputs((5, 0, 15), 256, 512, "cuda")["pertensor"]
    out = torch.empty(20, 256, dtype=torch.bfloat16, device="cuda")
    call = lambda: group_gemm_pertensor_fp8(x, weight, seqlens, cu_seqlens, scale, out=out)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ((20, 0, 0), (0, 1, 2), (7, 7, 6)):
        seqlens.copy_(torch.tensor(lengths))
        cu_seqlens[1:].copy_(torch.tensor(lengths).cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        assert mismatch(out, reference.group_gemm(x, weight, seqlens, cu_seqlens, scale)) is None


@pytest.mark.parametrize("capability, allowed", [((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_only_hopper_has_these_instructions(capability, allowed, monkeypatch):
    monkeypatch.setattr(checks, "simulator", SimpleNamespace(ENABLED=False))
    monkeypatch.setattr(devices, "gpu_of", lambda device: devices.GPU("some GPU", capability, 132, 0))
    if allowed:
        return checks.require_hopper("cuda")
    with pytest.raises(UnsupportedDeviceError, match=rf"some GPU has compute capability {capability[0]}.0; 9.0 is"):
        checks.require_hopper("cuda")


# Tuning


@pytest.mark.parametrize("scaling, activated", [("tensor", False), ("block", False), ("tensor", True)])
def test_the_tuner_tries_forms_that_fit(scaling, activated, monkeypatch, capsys, device):
    from moe_numba.course.bench import tune_grouped_gemm as tuner

    every = tuner.candidates(scaling, activated)
    assert len(every) >= 12 and all(Layout(c).bytes <= tuner.SHARED_BYTES for c in every.values())
    monkeypatch.setattr(tuner, "TILES", [(16, 1, (16,)), (8, 2, (8,))])
    monkeypatch.setattr(tuner, "ACTIVATED_TILES", [(16, 1, (16,))])
    shapes = {"small": dict(n=256, k=128)}
    found = tuner.tune(scaling, activated, [9], shapes, groups=2, device=device)
    assert list(found) == [("small", 9)] and (simulator.ENABLED or len(found["small", 9]) >= 2)
    assert capsys.readouterr().out.count("\n") == 1  # no form was found wrong
    monkeypatch.setattr(tuner.reference, "mismatch", lambda out, right: "it is wrong")
    monkeypatch.setattr(tuner.reference, "silu_and_mul", lambda gate_up: gate_up.chunk(2, dim=1)[0].float())
    tuner.tune(scaling, activated, [9], shapes, groups=2, device=device)
    assert f"16: {'relative error' if activated else 'it is wrong'}" in capsys.readouterr().out


# Scalings


@pytest.mark.parametrize("k", [128, 320])
def test_quantised_inputs_stand_for_the_numbers(k):
    x, weight = torch.randn(5, k), torch.randn(2, 192, k)
    for values, scale, whole in [(*reference.quantise_rows(x), x), (*reference.quantise_blocks(weight), weight)]:
        wide = scale.repeat_interleave(128, -1)[..., :k]
        if whole is weight:
            wide = wide.repeat_interleave(128, 1)[:, :192]
        assert values.dtype == FP8 and float(values.float().abs().max()) == 448
        # Half a step is a 16th of a number, or of the smallest normal one, 2^-6.
        assert bool(((values.float() * wide - whole).abs() <= wide * torch.clamp(whole.abs() / wide, 2**-6) / 16).all())
