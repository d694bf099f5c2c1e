"""What the article on DeepEP's intranode kernels claims."""

from moe_numba.course.articles.claims import deepep_checks as checks
from moe_numba.course.verdicts import (
    About,
    Article,
    Claim,
    Found,
    Setup,
    at_least,
    at_most,
    exactly,
    faster,
    least_saving,
    no_cost,
    saving,
)

SIZES = ("4096 tokens", "64 tokens", "1 token")
LAYOUT, QUANTISATION, NOTIFY = "get_dispatch_layout", "dispatch, quantisation", "dispatch, notify_dispatch"
DISPATCH, SENDER, RECEIVER = "dispatch, kernel", "dispatch, sender", "dispatch, receiver"


def _port(section, quote, quantity, threshold, check, differs="", needs=""):
    """Make a claim about code that this course's port of the listing decides."""
    return Claim(section, quote, quantity, About.CODE, threshold, check, (), Setup.PORT, differs, needs)


def _handle(count):
    return Found(count, f"a handle of {count:g} bytes, by which a second process mapped the buffer and stored into it")


BUFFER = (
    Claim(
        "introduction",
        "the normal kernels forward in two stages; the advantage is a high throughput",
        "time saved beside a kernel without forwarding, on several nodes",
        About.DIRECTION,
        faster(),
        needs="DeepEP's internode kernels and others, on several nodes",
    ),
    Claim(
        "introduction",
        "low latency also leaves out notify, at the price of more memory",
        "bytes of its buffer over those of the normal kernels'",
        About.DIRECTION,
        at_least(1.02),
        needs="a low-latency dispatch beside the normal one in a record",
    ),
    Claim(
        "introduction",
        "double buffering: NVLink and RDMA buffers are separate, so that the two do not disturb each other",
        "time that a transfer over one takes longer during one over the other",
        About.DIRECTION,
        no_cost(),
        needs="transfers over NVLink and RDMA at the same time, on several nodes",
    ),
    Claim(
        "buffer",
        "one cudaMalloc allocates one piece of memory on this GPU, which is divided into several regions",
        "bytes that two of its four parts share, or that none has",
        About.CODE,
        exactly(0),
        checks.parts_of_the_buffer,
    ),
    Claim(
        "buffer",
        "by cudaIpcOpenMemHandle other GPUs map this memory, and read and write it directly over NVLink",
        "bytes of a handle, CUDA_IPC_HANDLE_SIZE",
        About.CODE,
        exactly(64),
        _handle,
        ("IPC handle",),
        Setup.OTHER,
        "two processes on one GPU",
    ),
    Claim(
        "buffer, MoE counters",
        "this is an efficient communication from GPU to CPU, which avoids an explicit cudaMemcpy",
        "time saved beside cudaMemcpy",
        About.DIRECTION,
        faster(),
        needs="the exchange of counts with mapped memory and with cudaMemcpy",
    ),
)

LAYOUT_CLAIMS = (
    _port(
        LAYOUT,
        "each block counts the tokens of 32 successive experts, others those of 8 successive ranks",
        "CTAs for 256 experts and 8 ranks",
        exactly(9),
        checks.layout_blocks,
    ),
    _port(
        LAYOUT,
        "each block still has to walk all tokens in the whole of topk_idx",
        "ids that each CTA reads",
        exactly(100, " %"),
        checks.reads_of_a_block,
    ),
    _port(
        LAYOUT,
        "each thread handles other tokens and has a row of its own in the counter, so no atomic operations are needed",
        "atomic operations",
        exactly(0),
        checks.atomics_of_layout,
    ),
    Claim(
        LAYOUT,
        "the advantage of this is that no atomic operations are needed",
        "time saved beside the same kernel with atomics, least of three sizes",
        About.DIRECTION,
        faster(interleaved=False),
        least_saving(SIZES),
        tuple(f"{step}, {size}" for size in SIZES for step in ("the same with atomics", "private counters")),
        Setup.PORT,
    ),
    _port(
        LAYOUT,
        "each thread makes a vector of length 8 (is_in_rank) in its own registers",
        "bytes of stack",
        exactly(0),
        checks.stack_of_layout,
        "compiled by Numba, not by nvcc",
        "Numba's compiler",
    ),
    _port(
        LAYOUT,
        "num_tokens_per_rank_per_thread[thread_id][j] += (is_in_rank[j] > 0)",
        "ranks whose count is not the number of tokens with an expert there",
        exactly(0),
        checks.counts_per_rank,
    ),
)

QUANTISATION_CLAIMS = (
    Claim(
        QUANTISATION,
        "448 is the largest positive number that torch.float8_e4m3fn can represent",
        "torch's number",
        About.CODE,
        exactly(448),
        checks.largest_e4m3,
    ),
    Claim(
        QUANTISATION,
        "x_scales.view(dtype=torch.int8).to(torch.int) << 23",
        "wrong scales of those below 2",
        About.CODE,
        exactly(0),
        checks.packed_scales_below_2,
    ),
    Claim(
        QUANTISATION,
        "x_scales.view(dtype=torch.int8).to(torch.int) << 23",
        "wrong scales of those from 2 on",
        About.CODE,
        exactly(0),
        checks.packed_scales_from_2,
    ),
)

NOTIFY_CLAIMS = (
    _port(
        "dispatch, outputs",
        "with a handle it calls cached_notify_dispatch, which only makes a copy of rank_prefix_matrix",
        "other words that it writes",
        exactly(0),
        checks.words_of_cached_notify,
        "the article does not print this kernel",
    ),
    _port(
        NOTIFY,
        "rank_prefix_matrix: (i, j) is the number of tokens that rank j receives from rank i and all ranks before",
        "ranks with another matrix",
        exactly(0),
        checks.rank_prefix_matrix,
    ),
    _port(
        NOTIFY,
        "channel_prefix_matrix: (i, j) is the number of tokens that channel j and all before send to rank i",
        "ranks with another matrix",
        exactly(0),
        checks.channel_prefix_matrix,
    ),
    Claim(
        NOTIFY,
        "10000 tokens, 100 SMs: 50 channels of 200 tokens each; with a block_size of 128 a block has 4 warps",
        "examples that follow from the formulas",
        About.CODE,
        exactly(1),
        checks.channel_example,
    ),
    _port(
        NOTIFY,
        "how many tokens each local expert receives from all ranks is written to moe_recv_expert_counter_mapped",
        "ranks with other numbers",
        exactly(0),
        checks.tokens_per_expert,
    ),
    _port(
        NOTIFY,
        "at the end the kernel clears local_per_expert_buffer again and keeps only rank_prefix_matrix",
        "words that are left",
        exactly(0),
        checks.words_left,
    ),
    Claim(
        f"{NOTIFY}, a comment",
        "to clean: channel start/end offset, head and tail; num_memset_int = num_channels * num_ranks * 4",
        "words too few or too many",
        About.CODE,
        exactly(0),
        checks.memset_words,
    ),
    _port(
        NOTIFY,
        "recv_x is sorted by rank id, within a rank by channel id, within a channel by token id",
        "runs with another order",
        exactly(0),
        checks.order_of_recv_x,
    ),
)

DISPATCH_CLAIMS = (
    Claim(
        DISPATCH,
        "with eight ranks each gets a warp group of 3 warps",
        "warps",
        About.CODE,
        exactly(3),
        checks.warps_per_rank,
    ),
    Claim(
        f"{SENDER}, a comment",
        "num_send_warps_per_rank = num_send_warps / kNumRanks; // 8",
        "warps with eight ranks",
        About.CODE,
        exactly(8),
        checks.warps_per_rank,
    ),
    _port(
        f"{SENDER}, a comment",
        "send offset by `-value - 1`; this is for distinguishing zero tokens",
        "the largest offset that is sent",
        at_most(-1),
        checks.offsets_below_zero,
    ),
    _port(
        DISPATCH,
        "channel_start_offset copies channel_prefix_matrix of channel i - 1, channel_end_offset that of channel i",
        "other offsets",
        exactly(0),
        checks.offsets_of_channels,
    ),
    Claim(
        DISPATCH,
        "each rank and channel has a ring buffer: num_channels * num_ranks * num_recv_buffer_tokens * hidden",
        "bytes more or less",
        About.CODE,
        exactly(0),
        checks.ring_bytes,
    ),
    _port(
        DISPATCH,
        "in combine the results of a token, which have the same src_idx, are reduced by this index",
        "reads of src_idx in the reduction",
        at_least(1),
        checks.reads_of_src_idx,
        "the article does not print combine",
    ),
    _port(
        SENDER,
        "if the ring is full it waits until the receiver has moved head",
        "rows published and not taken beyond the slots of a ring",
        at_most(0),
        checks.rows_in_a_ring,
    ),
    Claim(
        SENDER,
        "reading channel_head_idx for each token may perform badly, so it sends by chunks",
        "time saved by the default chunk beside a chunk of 1",
        About.DIRECTION,
        faster(),
        saving,
        ("dispatch with a chunk of 1", "dispatch with the default chunk"),
        Setup.PORT,
        needs="the ring with a chunk of 1 beside the default chunk in the record",
    ),
    Claim(
        SENDER,
        "a token may have more scales than a warp has threads, so they are copied in a loop with a stride of 32",
        "scales for DeepSeek-V3's hidden size",
        About.CODE,
        at_least(33),
        checks.scales_of_a_token,
    ),
    _port(
        f"{SENDER}, a comment",
        "here all warps should share the same new tail: bar.sync",
        "runs that go wrong without this barrier",
        at_least(1),
        checks.without_the_barrier,
    ),
    _port(
        SENDER,
        "st_release_sys_global(channel_tail_idx.buffer(), cached_channel_tail_idx)",
        "runs that go wrong with a plain store",
        at_least(1),
        checks.without_release,
    ),
    _port(
        RECEIVER,
        "ld_acquire_sys_global(channel_tail_idx.buffer())",
        "runs that go wrong with a relaxed load",
        at_least(1),
        checks.without_acquire,
    ),
)

ARTICLE = Article(
    "DeepEP",
    "understand DeepEP completely (1): intranode",
    "DeepEP's buffer, dispatch layout and intranode dispatch",
    "https://github.com/deepseek-ai/DeepEP",
    ("07_dispatch_layout", "08_ring_buffer_dispatch", "09_combine"),
    BUFFER + LAYOUT_CLAIMS + QUANTISATION_CLAIMS + NOTIFY_CLAIMS + DISPATCH_CLAIMS,
    "https://zhuanlan.zhihu.com/p/1935094821804040824",
)
