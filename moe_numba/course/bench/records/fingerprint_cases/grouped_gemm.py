"""Calls of the grouped GEMMs, forward and backward."""

import torch


def grouped_gemm():
    import moe_numba
    from moe_numba.grouped_gemm.w4.packing import GATE_UP_TILE, PLAIN_TILE
    from moe_numba.grouped_gemm.w4.unpacking import unpack_mxfp4

    fp8, groups, n, k = torch.float8_e4m3fn, 2, 256, 256

    def call(scaling, average, rows="lengths", activated=False, gather=False, n=n, **options):
        dtype = torch.bfloat16 if scaling == "none" else fp8
        x, weight = torch.empty(64, k, dtype=dtype), torch.empty(groups, n, k, dtype=dtype)
        lengths = torch.empty(groups, dtype=torch.int32)
        if rows == "masked":
            x = x.view(groups, 32, k)
        given = {
            "lengths": (lengths, torch.empty(groups + 1, dtype=torch.int32)),
            "offsets": (None, None),
            "masked": (lengths, None),
        }[rows]
        scales = {
            "tensor": [torch.empty(groups)],
            "row": [torch.empty(x.shape[:-1]), torch.empty(groups, n)],
            "block": [torch.empty(*x.shape[:-1], k // 128), torch.empty(groups, n // 128, k // 128)],
            "none": [],
        }[scaling]
        name = {"tensor": "pertensor_fp8", "row": "rowwise_fp8", "block": "blockwise_fp8", "none": "bf16"}[scaling]
        function = getattr(moe_numba, f"group_gemm_{'silu_and_mul_' if activated else ''}{name}")
        function(
            x,
            weight,
            *given,
            *scales,
            num_seq_per_group_avg=average,
            offs=lengths if rows == "offsets" else None,
            gather_indices=torch.empty(64, dtype=torch.int32) if gather else None,
            **options,
        )

    def call_mxfp4(average, rows, activated=False):
        x = torch.empty(2, 32, k) if rows == "masked" else torch.empty(64, k)
        lengths, starts = torch.empty(groups, dtype=torch.int32), torch.empty(groups + 1, dtype=torch.int32)
        given = {"offsets": (None, None), "masked": (lengths, None)}.get(rows, (lengths, starts))
        options = dict(activation="swigluoai", bias=torch.empty(groups, n)) if activated else {}
        function = moe_numba.group_gemm_silu_and_mul_mxfp4 if activated else moe_numba.group_gemm_mxfp4
        function(
            x.bfloat16(),
            torch.empty(groups, n // 64, k // 64, *(GATE_UP_TILE if activated else PLAIN_TILE), dtype=torch.uint8),
            *given,
            num_seq_per_group_avg=average,
            offs=lengths if rows == "offsets" else None,
            gather_indices=torch.empty(64, dtype=torch.int32) if rows == "gather" else None,
            **options,
        )

    yield (
        "m_indices",
        lambda: moe_numba.group_gemm_bf16(
            torch.empty(64, k, dtype=torch.bfloat16),
            torch.empty(groups, n, k, dtype=torch.bfloat16),
            None,
            None,
            m_indices=torch.empty(64, dtype=torch.int32),
        ),
    )
    averages = (8, 32, 100, 1000)
    for average in averages:
        for scaling in ("tensor", "block", "none"):
            for rows in ("lengths", "offsets", "masked"):
                yield f"{scaling} {average} {rows}", lambda: call(scaling, average, rows)
            yield f"{scaling} {average} gather", lambda: call(scaling, average, gather=True)
        for scaling in ("tensor", "block"):
            yield f"silu {scaling} {average}", lambda: call(scaling, average, activated=True)
            yield f"silu {scaling} {average} gather", lambda: call(scaling, average, activated=True, gather=True)
    for average in averages:
        for rows in ("lengths", "offsets", "masked", "gather"):
            yield f"mxfp4 {average} {rows}", lambda: call_mxfp4(average, rows)
            if rows in ("lengths", "gather"):
                yield f"swigluoai mxfp4 {average} {rows}", lambda: call_mxfp4(average, rows, activated=True)
    for order, tile in ((None, PLAIN_TILE), ("interleaved", GATE_UP_TILE), ("stacked", GATE_UP_TILE)):
        packed = torch.empty(groups, n // 64, k // 64, *tile, dtype=torch.uint8)
        yield f"unpack mxfp4 {order or 'plain'}", lambda: unpack_mxfp4(packed, order)
    for rows in ("offsets", "masked"):
        yield f"silu block 1000 {rows}", lambda: call("block", 1000, rows, activated=True)
    # Outputs and epilogues. Where no options are named, rows are biased, weighted, scattered and added to.
    bias, weights, indices = torch.empty(groups, n), torch.empty(64), torch.empty(64, dtype=torch.int32)
    added = dict(bias=bias, row_weights=weights, scatter_indices=indices, out=torch.empty(9, n), accumulate=True)
    for average in (8, 1000):
        yield f"float32 {average}", lambda: call("none", average, out_dtype=torch.float32)
        yield f"bias {average}", lambda: call("none", average, bias=bias.bfloat16())
        for scaling in ("tensor", "row", "block", "none"):
            yield f"options {scaling} {average}", lambda: call(scaling, average, **added)
        yield f"row {average}", lambda: call("row", average)
        yield f"silu bf16 {average}", lambda: call("none", average, activated=True)
        yield f"silu bf16 {average} gather", lambda: call("none", average, activated=True, gather=True)
        options = dict(activation="swigluoai", bias=bias.bfloat16())
        yield f"swigluoai bf16 {average}", lambda: call("none", average, activated=True, **options)
        yield f"swigluoai tensor {average}", lambda: call("tensor", average, activated=True, activation="swigluoai")
        low = dict(x_low=torch.empty(64, 16).bfloat16(), weight_low=torch.empty(groups, n, 16).bfloat16())
        yield f"low rank {average}", lambda: call("none", average, **low)
        yield f"silu bf16 low rank {average}", lambda: call("none", average, activated=True, **low)
        yield f"silu partial {average}", lambda: call("tensor", average, activated=True, n=320)


def grouped_gemm_backward():
    from moe_numba import group_gemm_bf16, k_grouped_gemm_bf16
    from moe_numba.grouped_gemm.k_grouped.unused_rows import zero_unused_rows

    def sizes(rows):
        lengths, starts = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        return {"lengths": (lengths, starts, None), "offsets": (None, None, lengths), "masked": (lengths, None, None)}[
            rows
        ]

    def dgrad(average, rows):
        x, weight = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(2, 256, 256, dtype=torch.bfloat16)
        seqlens, cu_seqlens, offs = sizes(rows)
        group_gemm_bf16(x, weight.mT, seqlens, cu_seqlens, average, offs)

    def wgrad(rows, n=256, k=256, dtype=torch.float32, accumulate=False):
        a, b = torch.empty(64, n, dtype=torch.bfloat16), torch.empty(64, k, dtype=torch.bfloat16)
        k_grouped_gemm_bf16(a, b, *sizes(rows), out=torch.empty(2, n, k, dtype=dtype), accumulate=accumulate)

    for average in (8, 32, 100, 1000):
        yield f"MN-major weight {average}", lambda: dgrad(average, "lengths")
    for rows in ("lengths", "offsets"):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"k-grouped {rows} {str(dtype)[6:]}", lambda: wgrad(rows, dtype=dtype)
        yield f"k-grouped {rows} accumulate", lambda: wgrad(rows, accumulate=True)
    yield "k-grouped, small k", lambda: wgrad("offsets", k=64)
    yield "k-grouped, small n", lambda: wgrad("offsets", n=64)
    for rows in ("lengths", "offsets", "masked"):
        x = torch.empty(64, 256, dtype=torch.bfloat16)
        x = x.view(2, 32, 256) if rows == "masked" else x
        yield f"unused rows {rows}", lambda: zero_unused_rows(x, *sizes(rows))
