"""Dispatch with torch and NCCL: count, ``index_select``, and ``torch.distributed.all_to_all_single``.

The functions take ``all_to_all``: torch's function, or `played` where the ranks are threads of one process.
"""

import torch


def all_to_all_counts(is_token_in_rank, all_to_all):
    """Return the arguments of an all-to-all: rows from each rank, rows to each rank, and the order of the sent tokens.

    `tolist` and `nonzero` synchronise the host with its GPU, and thus with the other ranks.
    """
    sends = is_token_in_rank.sum(dim=0)
    receives = torch.empty_like(sends)
    all_to_all(receives, sends)
    order = is_token_in_rank.T.nonzero()[:, 1]  # by rank, then by token
    receives, sends = torch.stack([receives, sends]).tolist()
    return receives, sends, order


def all_to_all_rows(x, receives, sends, order, all_to_all):
    """Select the rows to send, exchange them, and return dispatch's ``recv_x``: rows by source rank and token."""
    recv_x = torch.empty(sum(receives), x.shape[1], dtype=x.dtype, device=x.device)
    all_to_all(recv_x, x.index_select(0, order), receives, sends)
    return recv_x


def poisoned(all_to_all):
    """Wrap an all-to-all for a check: poison the output first, so that rows that are not written are detected."""

    def exchange(output, *rest):
        output.fill_(float("nan") if output.is_floating_point() else -1)
        all_to_all(output, *rest)

    return exchange


def wrong_rows(given, wanted):
    """Return None, or what is wrong with the received rows; ``wanted`` has the rows of each source rank."""
    if len(given) != sum(map(len, wanted)):
        return f"{len(given)} rows were received, not {sum(map(len, wanted))}"
    for source, (received, sent) in enumerate(zip(given.split([len(rows) for rows in wanted]), wanted)):
        if not torch.equal(received.view(torch.uint8), sent.view(torch.uint8)):
            return f"the rows of rank {source} are not those that it sent, in their order"
    return None


def played(transport):
    """Make an all_to_all_single for ranks that are threads: each rank copies its slices of all ranks' inputs."""

    def wait(tensor):
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()  # each rank has a stream of its own

    def exchange(output, given, output_splits=None, input_splits=None):
        equal = [len(given) // transport.num_ranks] * transport.num_ranks
        wait(given)
        inputs = transport.gather((given, input_splits or equal))
        for part, (source, splits) in zip(output.split(output_splits or equal), inputs):
            part.copy_(source.split(splits)[transport.rank])
        wait(output)
        transport.gather(None)  # all ranks have read this rank's input

    return exchange
