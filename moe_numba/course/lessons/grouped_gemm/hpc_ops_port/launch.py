"""Launch our Numba port of hpc-ops' two kernels for one set of tensors, in the notebook and the tests."""

import torch

from moe_numba import simulator
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import group_gemm, update_grouped_tma
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.group_gemm import TILE_K, TILE_N, WARPGROUP_N
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.update_grouped_tma import MAP_BYTES
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap


class HpcOpsGroupGemm:
    """A grouped GEMM of fixed tensors; calling it launches both kernels on the caller's stream and returns ``out``.

    Parameters
    ----------
    x : tensor [total, k], float8_e4m3fn; k a multiple of 16, total at least 1
    weight : tensor [groups, n, k], float8_e4m3fn; n a multiple of 8
    seqlens, cu_seqlens : tensor [groups] and [groups + 1], int32
    y_scale : tensor [groups], float32
    out : tensor [total, n], bfloat16
    config : group_gemm.HpcOpsConfig
    blocks : int, optional
        CTAs of the main kernel; one per SM if not given.
    dependent : bool
        Programmatic dependent launch: the main kernel's CTAs may start before ``update_grouped_tma`` has finished.
    """

    def __init__(self, x, weight, seqlens, cu_seqlens, y_scale, out, config, blocks=None, dependent=False):
        (self.groups, self.n, self.k), self.config, self.dependent = weight.shape, config, dependent
        max_groups = min(config.max_groups, 32 * update_grouped_tma.GROUPS_PER_THREAD)
        if self.groups > max_groups:
            raise ValueError(f"weight has {self.groups} groups; at most {max_groups} are allowed")
        self.x, self.seqlens, self.cu_seqlens, self.y_scale, self.out = x, seqlens, cu_seqlens, y_scale, out
        self.weight, self.blocks = weight, blocks or (2 if simulator.ENABLED else gpu_of(x.device).sm_count)
        self.map_x = TensorMap(x, (config.tile_m, TILE_K), swizzle=128)
        self.map_y = TensorMap(out, (config.tile_m, WARPGROUP_N), swizzle=128)
        self.map_weight = TensorMap(weight, (1, TILE_N, TILE_K), swizzle=128)
        maps = torch.zeros((2 * self.groups + 1) * MAP_BYTES, dtype=torch.uint8, device=x.device)
        self.maps = maps[-maps.data_ptr() % MAP_BYTES :][: 2 * self.groups * MAP_BYTES]
        self.tiles, self.cu_tiles = torch.zeros_like(seqlens), torch.zeros_like(cu_seqlens)

    def update_maps(self):
        """Launch ``update_grouped_tma``."""
        launch(
            update_grouped_tma.make_update_grouped_tma(self.config.tile_m),
            self.groups + 1,
            update_grouped_tma.THREADS,
            self.map_x,
            self.map_y,
            self.maps,
            self.x,
            self.out,
            self.seqlens,
            self.cu_seqlens,
            self.tiles,
            self.cu_tiles,
            self.groups,
            self.n,
            self.k,
            shared_bytes=update_grouped_tma.SHARED_BYTES,
        )

    def multiply(self):
        """Launch the main kernel with the present maps and return ``out``."""
        kernel, shared_bytes = group_gemm.make_kernel(self.config)
        launch(
            kernel,
            self.blocks,
            group_gemm.THREADS,
            self.map_x,
            self.map_weight,
            self.maps,
            self.cu_seqlens,
            self.tiles,
            self.cu_tiles,
            self.y_scale,
            self.groups,
            self.n,
            self.k,
            shared_bytes=shared_bytes,
            dependent=self.dependent,
        )
        return self.out

    def __call__(self):
        self.update_maps()
        return self.multiply()
