"""What a ``Buffer`` is apart from its calls: construction, default configurations and access to its memory."""

import math
from functools import cache
from typing import Any

import torch

from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS
from moe_numba.expert_parallel.ranks import transport
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.ranks.rank_state import RankState
from moe_numba.expert_parallel.ranks.warm_up import warm_up
from moe_numba.expert_parallel.rings import checks
from moe_numba.expert_parallel.rings.config import Config
from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput
from moe_numba.runtime.validate import check_flag, check_int

_ALIGNMENT = 128  # of the size of a buffer, in bytes, as in DeepEP


@cache
def _default_config(num_sms, num_ranks):
    return Config(num_sms, 4, 512 if num_ranks == 2 else 256)  # with more ranks longer rings are not faster


class BufferBase:
    """Shared memory of a group of ranks; see `Buffer`."""

    num_sms = 20
    _channels_per_warp = None  # None: the best number; notebook 09 measures others
    _uses_tma = None  # None: if the GPUs of all ranks have TMA
    _low_latency_sms = None  # None: all SMs

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        *,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        timeout: float = 100.0,
    ):
        if comm is not None or group is None:
            raise ValueError("group is None or comm is given; pass a torch.distributed process group or a transport")
        low_latency_mode = check_flag("low_latency_mode", low_latency_mode)
        enable_shrink = check_flag("enable_shrink", enable_shrink)
        if enable_shrink and not low_latency_mode:
            raise ValueError(f"enable_shrink is {enable_shrink}; only low-latency calls can go on without a rank")
        if check_int("num_rdma_bytes", num_rdma_bytes, 0) and not low_latency_mode:
            raise ValueError(f"num_rdma_bytes is {num_rdma_bytes}; it must be 0: all ranks are in one node")
        num_nvl_bytes = check_int("num_nvl_bytes", num_nvl_bytes)
        if num_nvl_bytes < (not low_latency_mode) or num_nvl_bytes % _ALIGNMENT:
            raise ValueError(f"num_nvl_bytes is {num_nvl_bytes}; it must be a positive multiple of {_ALIGNMENT}")
        checks.check_timeout(timeout)
        self.transport = group if hasattr(group, "allocate") else transport.SymmetricMemory(group)
        self.group, self.rank, self.group_size = group, self.transport.rank, self.transport.num_ranks
        if not 1 <= self.group_size <= MAX_RANKS:
            raise ValueError(f"the group has {self.group_size} ranks; 1 to {MAX_RANKS} are allowed")
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy = explicitly_destroy
        self._exchanges: dict[tuple, Any] = {}  # of low-latency calls
        self._combine_inputs: dict[tuple, torch.Tensor] = {}
        # Half of the memory is for the rings of dispatch, and both halves start at multiples of _ALIGNMENT.
        num_bytes = -(-num_nvl_bytes // (2 * _ALIGNMENT)) * 2 * _ALIGNMENT
        self._runtime = RankState(self.transport, num_bytes, timeout, self._uses_tma)
        self._device = self.transport.device

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return True: rows of FP8 can be dispatched on every GPU, and TMA is used where the GPUs have it."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the number of SMs of default configurations; it must be even."""
        cls.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Record an event on the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return the default configuration of dispatch for ``num_ranks`` ranks."""
        return _default_config(cls.num_sms, check_int("num_ranks", num_ranks, 1, MAX_RANKS))

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return the default configuration of combine for ``num_ranks`` ranks."""
        return cls.get_dispatch_config(num_ranks)

    def get_comm_stream(self) -> "torch.cuda.Stream | None":
        """Return the stream on which calls with ``async_finish`` run; None in the simulator."""
        return self._runtime.streams.comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: tuple[int, ...] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Return this rank's ring memory as a tensor.

        Parameters
        ----------
        dtype : torch.dtype
        size : tuple of int, optional
            The tensor's shape; by default all of the memory behind ``offset``, flat.
        offset : int
            In bytes, a multiple of the dtype's size.
        use_rdma_buffer : bool
            Must be False: there is no memory for transfers between nodes.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or the memory is too small for ``size``.
        RuntimeError
            After `destroy`.
        """
        self._runtime.check_alive()
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}; it must be a torch.dtype")
        if use_rdma_buffer:
            raise ValueError(f"use_rdma_buffer is {use_rdma_buffer}; it must be False: all ranks are in one node")
        offset = check_int("offset", offset, 0, self.num_nvl_bytes)
        if offset % dtype.itemsize:
            raise ValueError(f"offset is {offset}; it must be a multiple of {dtype.itemsize}, the size of {dtype}")
        start = 4 * self._runtime.rings_offset
        memory = self._runtime.shared.local[start + offset : start + self.num_nvl_bytes]
        memory = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return memory
        if not isinstance(size, (tuple, list)):
            raise TypeError(f"size is {size!r}; it must be a tuple of ints")
        size = tuple(check_int(f"size[{i}]", length, 0) for i, length in enumerate(size))
        count = math.prod(size)
        if count > memory.numel():
            raise ValueError(f"size is {size}; {memory.numel()} elements of {dtype} start at offset {offset}")
        return memory[:count].view(size)

    def destroy(self) -> None:
        """Free the shared memory; all ranks must call it, after their last call.

        Waits for the other ranks, at most ``timeout`` seconds. After an error on the GPU it does not wait. Memory to
        which a missing rank may still write then stays allocated.
        """
        self._runtime.close()

    def check(self, synchronize: bool = False) -> None:
        """Raise the error of this buffer if an operation on the GPU has aborted, here or on a peer.

        Every other call raises that error too. A replayed CUDA graph does not, because the host does not see its
        kernels: call this after replays, or look for NaNs in their results. It reads a word in host memory and can be
        called at any time.

        Parameters
        ----------
        synchronize : bool
            Wait until the GPU has finished all work, which takes at most ``timeout`` for each operation that hangs.
            Otherwise only errors of operations that have ended are found.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As listed in `Buffer`.
        """
        if synchronize:
            self._runtime.synchronize()
        self._runtime.check_alive()

    def warm_up(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int = 0,
        *,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        topk_idx_dtype: torch.dtype = torch.int64,
        config: Config | None = None,
        combine_config: Config | None = None,
        out: SymmetricOutput | None = None,
    ) -> None:
        """Compile and load all kernels for rows of one kind, and synchronise the ranks.

        Later calls with these arguments compile nothing. All ranks must call it, with the same arguments. It dispatches
        one token of each rank, with and without a handle, and combines it, with and without weights.

        Parameters
        ----------
        hidden : int
            Elements of a row.
        num_experts : int
            Experts of all ranks.
        num_topk : int
            Experts per token; 0 if ``topk_idx`` is not passed to dispatch.
        dtype : torch.dtype
            Of the rows of dispatch: bfloat16, or float8_e4m3fn with ``num_scales`` scales per row.
        topk_idx_dtype : torch.dtype
            Of ``topk_idx``.
        config, combine_config : Config, optional
            Of dispatch and combine; the defaults are theirs.
        out : SymmetricOutput, optional
            Warm up dispatch to this output, whose contents are overwritten, instead of dispatch through rings.

        Raises
        ------
        ValueError, TypeError, TimeoutError
            As from `dispatch`.
        """
        warm_up(self, hidden, num_experts, num_topk, dtype, num_scales, topk_idx_dtype, config, combine_config, out)

    def new_output(
        self,
        num_rows: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        num_scales: int = 0,
        num_topk: int = 0,
        scale_dtype: torch.dtype = torch.float32,
        topk_idx_dtype: torch.dtype = torch.int64,
    ) -> SymmetricOutput:
        """Allocate output tensors of dispatch to which the peers can write; all ranks must pass the same arguments.

        Parameters
        ----------
        num_rows : int
            Capacity in rows; at most ``num_ranks`` times the tokens of a rank can arrive.
        hidden : int
            Elements of a row, a multiple of 16 bytes.
        dtype : torch.dtype
            bfloat16, or float8_e4m3fn with ``num_scales`` scales of ``scale_dtype`` (float32 or int32) per row.
        num_topk : int
            Experts and weights per row; 0 to 32.
        topk_idx_dtype : torch.dtype
            int64 or int32, the dtype of the experts.

        Returns
        -------
        SymmetricOutput
            For ``dispatch(..., out=...)``. Free it with ``close()``, on all ranks.
        """
        num_rows, hidden, num_scales, num_topk = checks.check_new_output(
            num_rows, hidden, dtype, num_scales, num_topk, scale_dtype, topk_idx_dtype
        )
        return SymmetricOutput(
            self._runtime, num_rows, hidden, dtype, num_scales, scale_dtype, num_topk, topk_idx_dtype
        )
