"""A CUDA stream that waits until a test lets it go on."""

import threading
from contextlib import contextmanager

import torch

LIMIT_S = 20.0


@contextmanager
def blocked(stream):
    """Let a stream wait for the end of the block, whatever time the block takes on the host.

    A call in the block that waits for the stream itself ends with an AssertionError, after `LIMIT_S` seconds. CUDA
    waits when it loads a kernel, so the block may only launch kernels that have run before.
    """
    from cuda.bindings import driver

    flag = torch.zeros(1, dtype=torch.int32).pin_memory()
    (error,) = driver.cuStreamWaitValue32(
        stream.cuda_stream, flag.data_ptr(), 1, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    )
    assert error == driver.CUresult.CUDA_SUCCESS
    release = threading.Timer(LIMIT_S, flag.fill_, [1])
    release.start()
    try:
        yield
        assert not flag.item(), "a call waited for the stream"
    finally:
        release.cancel()
        flag.fill_(1)
