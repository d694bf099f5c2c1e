"""Token slots of dispatch: packs a token and its metadata into a slot, unpacks a slot into the output tensors."""

from dataclasses import dataclass
from functools import cache

from numba import cuda, int32, int64

from moe_numba.expert_parallel.common.buffer_layout import align_words

_MAX_EXPERT = (1 << 31) - 1


@dataclass(frozen=True)
class TokenSlot:
    """Layout of a packed token: the row, followed by its metadata; sizes and offsets in words."""

    row: int
    scales: int = 0
    topk: int = 0  # experts, and as many weights
    has_src_idx: bool = True  # whether the token's index on its source rank follows

    @property
    def topk_idx(self):
        """Offset of the experts."""
        return self.row + self.scales

    @property
    def topk_weights(self):
        """Offset of the experts' weights."""
        return self.topk_idx + self.topk

    @property
    def src_idx(self):
        """Offset of the token's index on its source rank."""
        return self.topk_weights + self.topk

    @property
    def words(self):
        """Size of a packed token, rounded up to 16 bytes, the size of a vector."""
        return -(-(self.src_idx + self.has_src_idx) // 4) * 4

    @property
    def stride(self):
        """Distance from slot to slot."""
        return align_words(self.words)


@cache
def make_pack_token(shape):
    """Make ``pack_token``: start the load of a token's row to the staging buffer, and write its metadata there."""
    slot, pipeline = shape.slot, shape.pipeline
    row_words, scale_words, topk, row_bytes = slot.row, slot.scales, slot.topk, 4 * slot.row
    experts_offset, weights_offset, source_offset = slot.topk_idx, slot.topk_weights, slot.src_idx
    scales_per_lane = -(-scale_words // 32)
    num_registers = max(1, scales_per_lane)

    @cuda.jit(device=True)
    def pack_token(smem_i32, smem_u64, barrier, lane, staging, token, inputs):
        # Load the metadata first: its latency overlaps with the store of the previous row.
        scales = cuda.local.array(num_registers, int32)
        expert, weight = int32(-1), int32(0)
        for j in range(scales_per_lane):
            if lane + 32 * j < scale_words:
                scales[j] = inputs.scales[token * inputs.token_stride + (lane + 32 * j) * inputs.scale_stride]
        if lane < topk:
            number = inputs.topk_idx[int64(token) * topk + lane]
            expert = int32(number) if 0 <= number and number <= _MAX_EXPERT else int32(-1)
            weight = inputs.topk_weights[int64(token) * topk + lane]
        pipeline.load_row(smem_i32, smem_u64, barrier, lane, staging, inputs.x, int64(token) * row_words, row_bytes)
        for j in range(scales_per_lane):
            if lane + 32 * j < scale_words:
                smem_i32[int32(staging + row_words + lane + 32 * j)] = scales[j]
        if lane < topk:
            smem_i32[int32(staging + experts_offset + lane)] = expert
            smem_i32[int32(staging + weights_offset + lane)] = weight
        if lane == 0:
            smem_i32[int32(staging + source_offset)] = token
        pipeline.fence_staging()

    return pack_token


@cache
def make_unpack_token(shape):
    """Make ``unpack_token``: copy a packed token from the staging buffer to its row of the output tensors.

    Lane ``store_lane`` issues the store of the row. Experts become local to ``rank``; others become -1.
    """
    slot, pipeline = shape.slot, shape.pipeline
    row_words, scale_words, topk, row_bytes = slot.row, slot.scales, slot.topk, 4 * slot.row
    experts_offset, weights_offset, source_offset = slot.topk_idx, slot.topk_weights, slot.src_idx

    @cuda.jit(device=True)
    def unpack_token(smem_i32, staging, lane, store_lane, row, rank, experts_per_rank, recv):
        pipeline.store_row(lane, store_lane, recv.x, row * row_words, smem_i32, staging, row_bytes)
        for i in range(lane, scale_words, 32):
            recv.scales[row * scale_words + i] = smem_i32[int32(staging + row_words + i)]
        for i in range(lane, topk, 32):
            expert = int32(smem_i32[int32(staging + experts_offset + i)] - rank * experts_per_rank)
            is_local = 0 <= expert and expert < experts_per_rank
            recv.topk_idx[row * topk + i] = expert if is_local else int32(-1)
            weight = smem_i32[int32(staging + weights_offset + i)]
            recv.topk_weights[row * topk + i] = weight if is_local else int32(0)
        if lane == 0:
            recv.src_idx[row] = smem_i32[int32(staging + source_offset)]

    return unpack_token


@cuda.jit(device=True)
def pad_tail(recv_topk_idx, topk, num_received, num_rows, warp, warps, lane):
    """Set the experts of the output rows beyond the received ones to -1, with ``warps`` warps."""
    offset = int64(int64(num_received) * topk + warp * 32 + lane)
    while offset < int64(num_rows) * topk:
        recv_topk_idx[offset] = int32(-1)
        offset += int64(warps * 32)
