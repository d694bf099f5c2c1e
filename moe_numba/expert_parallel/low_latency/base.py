"""What `LowLatencyBuffer` is apart from its two calls: prepared exchanges, rank masks and phases."""

import torch

from moe_numba.expert_parallel.buffer_base import BufferBase
from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS, MAX_TOPK
from moe_numba.expert_parallel.low_latency import checks
from moe_numba.expert_parallel.low_latency.config import make_shape
from moe_numba.expert_parallel.low_latency.exchange import BOTH, RECEIVE, SEND, load_kernels
from moe_numba.expert_parallel.low_latency.pair import LowLatency
from moe_numba.expert_parallel.low_latency.rank_mask import RankMask
from moe_numba.expert_parallel.ranks.events import is_capturing
from moe_numba.runtime.validate import check_flag, check_int


class LowLatencyBase(BufferBase):
    """Prepared low-latency exchanges of a `Buffer`, and the mask of its ranks."""

    _rank_mask: RankMask | None = None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the bytes that low-latency dispatch and combine in bfloat16 allocate on each rank.

        They allocate memory themselves, whatever ``num_rdma_bytes`` of the buffer is.
        """
        num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
        shape = make_shape(num_ranks, num_max_dispatch_tokens_per_rank, hidden, MAX_TOPK, num_experts)
        return 4 * (shape.dispatch_words + shape.combine_words)

    def low_latency(
        self,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        use_fp8: bool = False,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        expert_major: bool = True,
        protocol: str = "lamport",
        use_fp8_combine: bool = False,
        topk_idx_dtype: torch.dtype = torch.int64,
        num_sms: int | None = None,
    ) -> LowLatency:
        """Prepare low-latency dispatch and combine of one token format, with fixed outputs.

        All ranks must call it, with the same arguments. It allocates and compiles, and waits for all ranks.

        Parameters
        ----------
        num_max_dispatch_tokens_per_rank, hidden, num_experts, num_topk : int
            The most tokens of a rank, elements of a row, experts of all ranks, and experts of a token.
        use_fp8, round_scale, use_ue8m0 : bool
            As for `low_latency_dispatch`.
        expert_major : bool
            Pack received rows by expert; combine then weights them. Otherwise a row stays at [source rank][token], the
            weights travel with the tokens, and combine adds rows that the caller has weighted.
        protocol : str
            "lamport": receivers poll the data itself; a NaN may change its bits. "flags": a flag follows the data.
        use_fp8_combine : bool
            As ``use_fp8`` of `low_latency_combine`.
        topk_idx_dtype : torch.dtype
            int64 or int32.
        num_sms : int, optional
            SMs of a launch, whose CTAs must all be resident at once. By default all, shared by the ranks of a GPU.

        Returns
        -------
        LowLatency
            Free it with ``close()``, on all ranks, before `destroy`.

        Raises
        ------
        ValueError, TypeError
            An argument is invalid, or differs between ranks.
        RuntimeError
            In a CUDA graph capture, or after `destroy`.
        """
        shape = shape_of_options(
            *(self.group_size, num_max_dispatch_tokens_per_rank, hidden, num_experts, num_topk),
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            expert_major=expert_major,
            protocol=protocol,
            use_fp8_combine=use_fp8_combine,
        )
        num_sms = None if num_sms is None else check_int("num_sms", num_sms, 1)
        self._check_can_allocate()
        return LowLatency(self._runtime, self._mask(), shape, topk_idx_dtype, num_sms)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Wait for all ranks, and clear the memory of all low-latency calls with these sizes; all ranks must call it.

        Needed only after a timeout, together with `low_latency_clean_mask_buffer`: other sizes have other memory. It
        does not wait for ranks that are masked, and with ``enable_shrink`` it masks a rank that does not come in time.

        Raises
        ------
        ValueError, TypeError
            An argument is not a positive int. Sizes of which there was no call have no effect.
        TimeoutError
            A rank did not come in time, and the buffer is without ``enable_shrink``.
        """
        wanted = (
            check_int("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1),
            check_int("hidden", hidden, 1),
            check_int("num_experts", num_experts, 1),
        )
        for exchange in self._exchanges.values():
            shape = exchange.shape
            if (shape.max_tokens, shape.hidden, shape.num_experts) == wanted:
                exchange.reset()

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked, and 0 for each other rank, to an int32 tensor [num_ranks]."""
        checks.check_mask_status(mask_status, self.group_size, self._device)
        mask_status.copy_(self._mask().mask)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank: nothing is sent to it, nothing waits for it, and its rows are NaN; or do so no longer."""
        rank = check_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        self._mask().mask[rank] = int(check_flag("mask", mask))

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks, and forget the timeouts that masked them."""
        self._mask().clear()

    def check(self, synchronize: bool = False) -> None:  # noqa: D102
        super().check(synchronize)
        if self._rank_mask is not None:
            self._rank_mask.check()

    def destroy(self) -> None:  # noqa: D102
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()
        super().destroy()

    def _mask(self):
        if self._rank_mask is None:
            self._rank_mask = RankMask(self._runtime, not self.enable_shrink)
        return self._rank_mask

    def _check_can_allocate(self):
        self._runtime.check_alive()
        if is_capturing():
            raise RuntimeError(
                "the first low-latency call with new sizes allocates and waits for all ranks, and cannot be captured "
                "in a CUDA graph; make it once before the capture"
            )
        if masked := self._mask().masked_ranks():
            raise RuntimeError(
                f"the first low-latency call with new sizes waits for all ranks, but these are masked: {masked}"
            )

    def _exchange(self, make, x, topk_idx, max_tokens, num_experts, hidden, scales=None, combines_fp8=False):
        """Return the exchange for these arguments; the first call makes it."""
        for name, tensor in (("x", x), ("topk_idx", topk_idx)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor")
            if tensor.dim() < 2:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have two dimensions or more")
        if not type(max_tokens) is type(num_experts) is int:  # before the look-up: 4.0 would find what was made for 4
            max_tokens = check_int("num_max_dispatch_tokens_per_rank", max_tokens)
            num_experts = check_int("num_experts", num_experts)
        mask = self._mask()
        mask.check()
        hidden = x.shape[-1] if isinstance(hidden, torch.Tensor) else hidden
        topk = topk_idx.shape[-1]
        key = make, max_tokens, hidden, topk, num_experts, scales, combines_fp8, topk_idx.dtype
        try:
            return self._exchanges[key]
        except KeyError:
            shape = make_shape(
                self.group_size, max_tokens, hidden, topk, num_experts, scales=scales, combines_fp8=combines_fp8
            )
            checks.check_topk_idx_dtype(topk_idx.dtype)
            self._check_can_allocate()
            exchange = self._exchanges[key] = make(self._runtime, mask, shape, topk_idx.dtype, self._low_latency_sms)
            load_kernels(exchange)
            return exchange

    def _run(self, launch, async_finish, return_recv_hook, *tensors):
        """Launch an operation, or its send phase; return its event and hook."""
        runtime, tensors = self._runtime, [t for t in tensors if isinstance(t, torch.Tensor)]
        with runtime.streams.on_stream(None, async_finish, False) as finish:
            launch(SEND if return_recv_hook else BOTH)
            event = finish(*tensors)
        if not return_recv_hook:
            return event, None
        pending = [True]

        def hook():
            if not pending:
                raise RuntimeError("this hook was called before; it receives once")
            pending.clear()
            with runtime.streams.on_stream(None, False, False) as finish:
                launch(RECEIVE)
                finish(*tensors)

        return event, hook


def scales_format(use_fp8, round_scale, use_ue8m0):
    """Return the name of the scales' format, None for bfloat16."""
    use_fp8, round_scale, use_ue8m0 = (
        check_flag(name, value)
        for name, value in (("use_fp8", use_fp8), ("round_scale", round_scale), ("use_ue8m0", use_ue8m0))
    )
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 is True and round_scale is False; exponents alone need round_scale=True")
    if round_scale and not use_fp8:
        raise ValueError("round_scale is True and use_fp8 is False; only FP8 rows have scales")
    return None if not use_fp8 else "ue8m0" if use_ue8m0 else "rounded" if round_scale else "float32"


def shape_of_options(
    num_ranks,
    num_max_dispatch_tokens_per_rank,
    hidden,
    num_experts,
    num_topk,
    *,
    use_fp8=False,
    round_scale=False,
    use_ue8m0=False,
    expert_major=True,
    protocol="lamport",
    use_fp8_combine=False,
):
    """Return what `LowLatencyBase.low_latency` compiles its kernels for; parameters as there."""
    scales = scales_format(use_fp8, round_scale, use_ue8m0)
    sizes = num_max_dispatch_tokens_per_rank, hidden, num_topk, num_experts
    expert_major = check_flag("expert_major", expert_major)
    return make_shape(
        num_ranks,
        *sizes,
        scales=scales,
        expert_major=expert_major,
        protocol=protocol,
        combines_fp8=check_flag("use_fp8_combine", use_fp8_combine),
    )
