"""Dispatch as everyone can write it: count, ``index_select``, and ``torch.distributed.all_to_all_single``.

The functions take ``all_to_all``: torch's, or one that is played where the ranks are threads.
"""

import torch


def all_to_all_counts(is_token_in_rank, all_to_all):
    """What an all-to-all must be told: the rows from each rank, those to each rank, and the tokens as they leave.

    The host waits for its GPU, and so for the other ranks: `tolist` and `nonzero` cannot do otherwise.
    """
    sends = is_token_in_rank.sum(dim=0)
    receives = torch.empty_like(sends)
    all_to_all(receives, sends)
    order = is_token_in_rank.T.nonzero()[:, 1]  # by rank, and by token
    receives, sends = torch.stack([receives, sends]).tolist()
    return receives, sends, order


def all_to_all_rows(x, receives, sends, order, all_to_all):
    """Pick the rows that leave, and exchange them; gives what came, by rank and token: dispatch's ``recv_x``."""
    recv_x = torch.empty(sum(receives), x.shape[1], dtype=x.dtype, device=x.device)
    all_to_all(recv_x, x.index_select(0, order), receives, sends)
    return recv_x


def poisoned(all_to_all):
    """The same, for a check: what an exchange does not write is no row that lay there before."""

    def exchange(output, *rest):
        output.fill_(float("nan") if output.is_floating_point() else -1)
        all_to_all(output, *rest)

    return exchange


def wrong_rows(given, wanted):
    """None, or what is wrong with the rows that came; ``wanted`` has those of each source, compared bit for bit."""
    if len(given) != sum(map(len, wanted)):
        return f"{len(given)} rows came, not {sum(map(len, wanted))}"
    for source, (came, sent) in enumerate(zip(given.split([len(rows) for rows in wanted]), wanted)):
        if not torch.equal(came.view(torch.uint8), sent.view(torch.uint8)):
            return f"the rows of rank {source} are not those that it sent, in their order"
    return None


def played(transport):
    """torch's all_to_all_single, played by ranks that are threads: each takes its slices of everybody's input."""

    def wait(tensor):
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()  # each rank has a stream of its own

    def exchange(output, given, output_splits=None, input_splits=None):
        equal = [len(given) // transport.num_ranks] * transport.num_ranks
        wait(given)
        everybodys = transport.gather((given, input_splits or equal))
        for there, (theirs, splits) in zip(output.split(output_splits or equal), everybodys):
            there.copy_(theirs.split(splits)[transport.rank])
        wait(output)
        transport.gather(None)  # all have read what is this rank's

    return exchange
