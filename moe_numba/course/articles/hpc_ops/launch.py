"""The document's two kernels, made ready for one set of tensors: what the notebook and the tests start."""

import torch

from moe_numba import simulator
from moe_numba.course.articles.hpc_ops import group_gemm, update_grouped_tma
from moe_numba.course.articles.hpc_ops.group_gemm import HALF, TILE_K, TILE_N
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap


class Run:
    """Calling it starts ``update_grouped_tma`` and the main kernel, on the caller's stream; it gives ``out``.

    Parameters
    ----------
    x : tensor [total, k], float8_e4m3fn; k a multiple of 16, total at least 1
    weight : tensor [groups, n, k], float8_e4m3fn; n a multiple of 8
    seqlens, cu_seqlens : tensor [groups] and [groups + 1], int32
    y_scale : tensor [groups], float32
    out : tensor [total, n], bfloat16
    constants : group_gemm.Constants
    blocks : int, optional
        Of the main kernel; as many as the GPU has multiprocessors if not given.
    dependent : bool
        Programmatic dependent launch: the main kernel's blocks may start before ``update_grouped_tma`` is done.
    """

    def __init__(self, x, weight, seqlens, cu_seqlens, y_scale, out, constants, blocks=None, dependent=False):
        (self.groups, self.n, self.k), self.constants, self.dependent = weight.shape, constants, dependent
        if self.groups > min(constants.groups, 32 * update_grouped_tma.GROUPS_PER_THREAD):
            raise ValueError(f"weight has {self.groups} groups; {constants.groups} are allowed, and 256 at most")
        self.x, self.seqlens, self.cu_seqlens, self.y_scale, self.out = x, seqlens, cu_seqlens, y_scale, out
        self.weight, self.blocks = weight, blocks or _multiprocessors(x.device)
        self.map_x = TensorMap(x, (constants.tokens, TILE_K), swizzle=128)
        self.map_y = TensorMap(out, (constants.tokens, HALF), swizzle=128)
        self.map_weight = TensorMap(weight, (1, TILE_N, TILE_K), swizzle=128)
        room = torch.zeros((2 * self.groups + 1) * update_grouped_tma.MAP, dtype=torch.uint8, device=x.device)
        self.maps = room[-room.data_ptr() % update_grouped_tma.MAP :][: 2 * self.groups * update_grouped_tma.MAP]
        self.tiles, self.cu_tiles = torch.zeros_like(seqlens), torch.zeros_like(cu_seqlens)

    def update(self):
        """Start ``update_grouped_tma``."""
        launch(
            update_grouped_tma.make_update_grouped_tma(self.constants.tokens),
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
        """Start the main kernel, with the maps that are there."""
        kernel, shared_bytes = group_gemm.make_kernel(self.constants)
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
        self.update()
        return self.multiply()


def _multiprocessors(device):
    return 2 if simulator.ENABLED else devices.gpu_of(device).sm_count
