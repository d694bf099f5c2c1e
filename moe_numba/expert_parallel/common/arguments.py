"""Groups of kernel arguments that device functions take as one parameter.

A NamedTuple of pointers and integers compiles to the same machine code as separate parameters.
"""

from typing import NamedTuple


class RankContext(NamedTuple):
    """The arguments with which every kernel begins: the rank, its memory, its peers' memory, and the timeout."""

    local: object  # int32*, this rank's shared buffer
    peers: object  # uint64* [num_ranks], addresses of all ranks' shared buffers
    state: object  # int32*, this rank's private state
    status: object  # int32* [STATUS_WORDS], pinned host memory
    timeout_ns: object  # uint64
    rank: object  # int32


class RingMemory(NamedTuple):
    """The token slots of one operation in each rank's shared buffer, in words."""

    offset: object  # int64, of the first ring
    stride: object  # int32, from ring to ring


class PrefixMatrices(NamedTuple):
    """The prefix sums of row counts that notify computes; the first three tensors of a handle."""

    rank: object  # int32* [num_ranks, num_ranks]
    channel: object  # int32* [num_ranks, channels]
    recv_channel: object  # int32* [num_ranks, channels]


class TokenInputs(NamedTuple):
    """The tokens that this rank dispatches."""

    x: object  # int32*, rows in words
    scales: object  # int32*, with the two strides that follow
    token_stride: object  # int64
    scale_stride: object  # int64
    topk_idx: object  # int64* or int32*
    topk_weights: object  # int32*, bits of float32
    is_token_in_rank: object  # uint8* [num_tokens, num_ranks]
    num_tokens: object  # int32
    experts_per_rank: object  # int32


class RecvTensors(NamedTuple):
    """The output tensors of dispatch on the receiving rank."""

    x: object  # int32*
    scales: object  # int32*
    topk_idx: object  # int64* or int32*
    topk_weights: object  # int32*, bits of float32
    src_idx: object  # int32*
    num_rows: object  # int32


class CombineTensors(NamedTuple):
    """The inputs and outputs of combine."""

    x: object  # int32* [num_rows, hidden / 2], pairs of bfloat16
    num_rows: object  # int32
    topk_weights: object  # int32*, bits of float32
    send_head: object  # int32* [num_tokens, num_ranks]
    num_tokens: object  # int32
    bias_0: object  # int32*, pairs of bfloat16
    bias_1: object  # int32*
    out: object  # int32*
    out_weights: object  # float32*
