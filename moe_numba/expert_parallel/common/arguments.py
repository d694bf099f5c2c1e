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


class TokenInputs(NamedTuple):
    """The tokens that this rank dispatches."""

    x: object  # int32*, rows in words
    scales: object  # int32*, with the two strides that follow
    token_stride: object  # int64
    scale_stride: object  # int64
    topk_idx: object  # int64* or int32*
    topk_weights: object  # int32*, bits of float32


class RecvTensors(NamedTuple):
    """The output tensors of dispatch on the receiving rank."""

    x: object  # int32*
    scales: object  # int32*
    topk_idx: object  # int64* or int32*
    topk_weights: object  # int32*, bits of float32
    src_idx: object  # int32*
