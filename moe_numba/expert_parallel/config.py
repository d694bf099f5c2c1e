"""How much of the GPU dispatch and combine may use, and what follows from it for the kernels."""

from dataclasses import dataclass
from functools import cache

from moe_numba import simulator
from moe_numba.expert_parallel.kernels.buffer_layout import LINE, MOST_RANKS, MOST_TOPK, Record, lines
from moe_numba.expert_parallel.kernels.channels import Rings

_SHARED_BYTES = 227 * 1024  # of a block on a Hopper GPU
_MOST_WARPS = 2 if simulator.ENABLED else 16
_FILL_THE_LINK = 8  # multiprocessors, by bulk copies: notebook 05
_REDUCERS = 23  # warps of the document's combine that add up at the same time


@dataclass(frozen=True)
class Config:
    """What one call may use; DeepEP's names.

    Parameters
    ----------
    num_sms : int
        Multiprocessors: an even number, 2 to 132. At most one half sends, see `senders_of`; the others receive.
    num_max_nvl_chunked_send_tokens : int
        Rows that a sender may put into a ring before it says so; 1 or more. These kernels say so as soon as they can.
    num_max_nvl_chunked_recv_tokens : int
        Rows of bfloat16 that the rings from one rank to one multiprocessor hold together, of FP8 twice as many; at
        least 22 more than the chunk: with fewer DeepEP's combine hangs, since its 23 adding warps may hold on to as
        many rows.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256

    def __post_init__(self):
        for name, value in self.__dict__.items():
            if type(value) is not int:
                raise TypeError(f"{name} is {value!r}; it must be an int")
        if not 2 <= self.num_sms <= 132 or self.num_sms % 2:
            raise ValueError(f"num_sms is {self.num_sms}; it must be even, 2 to 132")
        chunk, ring = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if chunk < 1:
            raise ValueError(f"num_max_nvl_chunked_send_tokens is {chunk}; it must be 1 or more")
        if ring < chunk + _REDUCERS - 1:
            raise ValueError(
                f"num_max_nvl_chunked_recv_tokens is {ring}; with chunks of {chunk} it must be "
                f"{chunk + _REDUCERS - 1} or more"
            )

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        """Bytes of a buffer that is large enough for rows of so many bytes, dispatched and combined."""
        record = Record(-(-hidden_bytes // 4), -(-hidden_bytes // 128), MOST_TOPK)
        channels = channels_of(self.num_sms, num_ranks, hidden_bytes)
        return 2 * 4 * channels * num_ranks * slots_of(self, num_ranks, channels) * record.stride


@cache
def senders_of(num_sms, num_ranks):
    """How many of the multiprocessors send: as many as fill the link, half at most.

    Eight fill it, if all that they carry leaves. Senders of dispatch also carry half of a rank's own rows, one for
    every ``num_ranks - 1`` that leave. More of them need more rings, and gain nothing: who does not send can receive.
    """
    others = max(1, num_ranks - 1)
    return min(num_sms // 2, -(-_FILL_THE_LINK * (2 * others + 1) // (2 * others)))


def senders_without_rings(num_sms):
    """The same where nothing goes through rings, and nobody receives.

    As many as fill the link, and as many again for a rank's own rows. More only get in one another's way.
    """
    return min(num_sms, 2 * _FILL_THE_LINK)


@cache
def channels_of(num_sms, num_ranks, hidden_bytes, of_a_warp=None):
    """Into how many channels a rank's tokens are dealt out: one for each sending warp, or four.

    Multiprocessors that do not fill the link all send at the same rate: equal shares are best. More of them do not:
    then a warp that is done with a channel takes the next that nobody has begun with.
    """
    senders = senders_of(num_sms, num_ranks)
    of_a_warp = of_a_warp or (1 if senders <= _FILL_THE_LINK else 4)
    return of_a_warp * senders * most_warps(hidden_bytes)


@cache
def slots_of(config, num_ranks, channels):
    """Rows that one ring holds, of all that lead from a rank to a multiprocessor."""
    return max(1, config.num_max_nvl_chunked_recv_tokens * senders_of(config.num_sms, num_ranks) // channels)


@cache
def most_warps(hidden_bytes):
    """Warps of a block, each with room in shared memory for a row of so many bytes and what may go with it; 1 to 16."""
    room = 4 * lines(Record(-(-hidden_bytes // 4), 0, MOST_TOPK).words) + 8 + 16 * MOST_RANKS + 8
    warps = min(_MOST_WARPS, _SHARED_BYTES // room)
    if warps < 1:
        raise ValueError(f"x has rows of {hidden_bytes // 2} elements; in bfloat16 one must fit {_SHARED_BYTES} bytes")
    return warps


@cache
def rings_for(config, num_ranks, warps, channels, record, words, element_bytes=2):
    """The rings of an operation, as large as the configuration and so many words of memory allow.

    Also the words from ring to ring: the same for rows of all kinds, so that no two rings ever share memory.
    """
    ring_words = words // (channels * num_ranks) // LINE * LINE
    slots = min(slots_of(config, num_ranks, channels) * 2 // element_bytes, ring_words // record.stride)
    if slots < 1:
        least = 2 * 4 * channels * num_ranks * record.stride
        raise ValueError(
            f"num_nvl_bytes is too small: {channels} channels of {num_ranks} ranks with rows of {4 * record.row} bytes "
            f"need {least} or more; Config.get_nvl_buffer_size_hint says how much is good"
        )
    return Rings(num_ranks, warps, slots, record), ring_words
