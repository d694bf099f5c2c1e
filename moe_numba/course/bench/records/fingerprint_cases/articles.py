"""Launches of the ports of the articles' kernels."""

import torch


def articles():
    from moe_numba.course.deepep_port import dispatch_layout, launch
    from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig
    from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import launch as group_gemm
    from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.group_gemm import HpcOpsConfig

    new = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype)

    def calls(r, to_fp8):
        ranks, tokens, rows = len(r.buffers), 4, 4
        config = DeepEPConfig(ranks, row_bytes=7168, scales=56) if to_fp8 else DeepEPConfig(ranks)
        combine_config = DeepEPConfig(ranks, chunk=4, biases=2)
        x = new(tokens, 7168, dtype=torch.float8_e4m3fn if to_fp8 else torch.bfloat16)
        x = (x, new(tokens, 56, dtype=torch.float32)) if to_fp8 else x
        is_in, prefix = new(tokens, ranks, dtype=torch.bool), new(ranks, ranks)
        layout = new(ranks), new(256), is_in
        weights = new(tokens, 8, dtype=torch.float32)
        given = prefix, new(ranks, 12), rows, new(tokens, 8, dtype=torch.int64), weights
        y = new(rows, 7168, dtype=torch.bfloat16)
        handle = launch.Handle(prefix, new(ranks, 12), new(ranks, 12), new(rows), is_in, new(tokens, ranks))
        yield "notify_dispatch", lambda: launch.notify_dispatch(r, config, layout, new(1), new(256 // ranks))
        yield "cached_notify_dispatch", lambda: launch.cached_notify_dispatch(r, config, prefix)
        yield "dispatch", lambda: launch.dispatch(r, config, x, is_in, *given)
        yield "cached_notify_combine", lambda: launch.cached_notify_combine(r, combine_config, handle)
        yield "combine", lambda: launch.combine(r, combine_config, y, handle, weights, (y, y))

    for ranks in (2, 4, 8):
        r = launch.Rank(0, new(ranks, dtype=torch.uint64), new(ranks, dtype=torch.uint64), new(8))
        for to_fp8 in (False, True):
            for name, call in calls(r, to_fp8):
                yield f"deepep {name} {ranks} {'fp8' if to_fp8 else 'bf16'}", call
    ids = new(4, 8, dtype=torch.int64)
    yield "deepep layout", lambda: dispatch_layout.get_dispatch_layout(ids, 256, 8)
    for tokens in (16, 32, 64, 128):
        for schedule in ("vertical", "horizontal"):
            for whole_x in (False, True):
                stages = 6 if tokens == 128 else 8  # of 27 to 32 KiB; a block can have 227 KiB
                config = HpcOpsConfig(tile_m=tokens, stages=stages, schedule=schedule, whole_x=whole_x)
                x, weight = new(64, 128, dtype=torch.float8_e4m3fn), new(2, 128, 128, dtype=torch.float8_e4m3fn)
                out, scale = new(64, 128, dtype=torch.bfloat16), new(2, dtype=torch.float32)
                run = lambda: group_gemm.HpcOpsGroupGemm(x, weight, new(2), new(3), scale, out, config)
                yield f"hpc_ops group_gemm {tokens} {schedule} {whole_x}", lambda: run().multiply()
        yield f"hpc_ops update_grouped_tma {tokens}", lambda: run().update_maps()
