"""What DeepEP's users rely on besides results: names, constructor arguments, default devices, events, dtypes."""

import sys

import numpy as np
import pytest
import torch
from helpers.deepep_calls import exchange_as_deepep_low_latency_test, exchange_as_deepep_tests, make_deep_ep
from helpers.expert_parallel import (
    FP8,
    HIDDEN,
    NUM_BYTES,
    SCALE,
    SMALL,
    check_combined,
    check_received,
    make_inputs,
    reference_dispatch,
    refused,
    run,
    send,
    to_device,
)

from moe_numba import simulator
from moe_numba.expert_parallel import Buffer, Config, EventHandle, EventOverlap, get_dispatch_layout
from moe_numba.expert_parallel.ranks.local_group import LocalGroup


@pytest.mark.parametrize("exchange", [exchange_as_deepep_tests, exchange_as_deepep_low_latency_test])
def test_calls_of_deepeps_tests(exchange, monkeypatch):
    """Through a module named deep_ep, on a default device that is not the CPU."""
    monkeypatch.setitem(sys.modules, "deep_ep", make_deep_ep())
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    import deep_ep

    def work(transport):
        with torch.device("meta" if simulator.ENABLED else "cuda"):
            exchange(deep_ep, transport, transport.rank, 2, transport.device)

    LocalGroup(2).run(work)


def test_constructor_arguments():
    def work(transport):
        options = dict(allow_mnnvl=True, use_fabric=True, explicitly_destroy=True, timeout=5)
        buffer = Buffer(transport, 384, 0, False, 8, False, **options)  # a multiple of 128, but not of 256
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.group_size, buffer.rank) == (384, 0, 1, 0)
        assert not buffer.low_latency_mode and not buffer.enable_shrink and buffer.explicitly_destroy
        buffer.destroy()
        for arguments, sentence in (
            (dict(enable_shrink=True), "enable_shrink is True; only low-latency calls can go on without a rank"),
            (dict(num_rdma_bytes=np.int64(1)), "num_rdma_bytes is 1; it must be 0"),
            (dict(num_nvl_bytes=100), "num_nvl_bytes is 100; it must be a positive multiple of 128"),
            (dict(comm=object()), "comm is given"),
            (dict(group=None, low_latency_mode=2), "group is None; it must be a ProcessGroup or a transport"),
        ):
            refused(ValueError, sentence, Buffer, **(dict(group=transport, num_nvl_bytes=256) | arguments))
        refused(TypeError, "num_nvl_bytes is 256.0; it must be an int", Buffer, transport, 256.0)
        for group in (2, "ranks", object(), transport.group, type(transport)):
            sentence = f"group is {type(group).__name__}; it must be a ProcessGroup or a transport"
            refused(TypeError, sentence, Buffer, group, low_latency_mode=2)

    LocalGroup(1).run(work)


def test_local_buffer_tensor():
    def work(transport):
        buffer = Buffer(transport, 384)
        whole = buffer.get_local_buffer_tensor(torch.int32)
        assert whole.numel() == 96 and buffer.get_local_buffer_tensor(torch.uint8, offset=380).numel() == 4
        part = buffer.get_local_buffer_tensor(torch.int32, (2, 3), np.int32(8), use_rdma_buffer=False)
        assert part.shape == (2, 3) and part.data_ptr() == whole[2:].data_ptr()
        refused(ValueError, "offset is 385", buffer.get_local_buffer_tensor, torch.uint8, offset=385)
        refused(ValueError, "offset is 2; .* multiple of 4", buffer.get_local_buffer_tensor, torch.int32, offset=2)
        refused(ValueError, r"size is \(97,\); 96 elements", buffer.get_local_buffer_tensor, torch.int32, (97,))
        refused(ValueError, "use_rdma_buffer is True", buffer.get_local_buffer_tensor, torch.int8, use_rdma_buffer=True)
        buffer.destroy()

    LocalGroup(1).run(work)


def test_config_has_deepeps_five_numbers():
    config = Config(24, 6, 256, 8, 128)
    assert (config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens) == (8, 128)
    assert Config(num_sms=20).num_max_rdma_chunked_recv_tokens == 256
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    for call, error, sentence in (
        (lambda: Config(24, 6, 256, 0), ValueError, "num_max_rdma_chunked_send_tokens is 0"),
        (lambda: Config(24, 6, 256, 8, 1.5), TypeError, "num_max_rdma_chunked_recv_tokens is 1.5; it must be an int"),
        (lambda: Config(True), TypeError, "num_sms is True"),
        (lambda: config.get_nvl_buffer_size_hint(2.0, 2), TypeError, "hidden_bytes is 2.0"),
        (lambda: config.get_nvl_buffer_size_hint(256, 9), ValueError, "num_ranks is 9; 1 to 8 are allowed"),
        (lambda: config.get_rdma_buffer_size_hint(256, 16), ValueError, "num_ranks is 16"),
    ):
        refused(error, sentence, call)


def test_default_number_of_sms(monkeypatch):
    monkeypatch.setattr(Buffer, "num_sms", Buffer.num_sms)
    Buffer.set_num_sms(np.int64(8))
    assert type(Buffer.num_sms) is int and Buffer.get_dispatch_config(2).num_sms == 8
    refused(ValueError, "num_sms is 7", Buffer.set_num_sms, 7)
    assert Buffer.get_combine_config(np.int32(4)).num_sms == 8


@pytest.mark.parametrize("direct", [False, True], ids=["rings", "output"])
def test_int32_experts(direct):
    """The gate returns int32; results have the dtype of the inputs."""
    inputs = make_inputs([7 * SCALE, 9 * SCALE])
    invalid = inputs._replace(
        topk_idx=[idx.where(idx >= 0, torch.tensor([-7, 1 << 30])).int() for idx in inputs.topk_idx]
    )
    right = [r._replace(topk_idx=r.topk_idx.int()) for r in reference_dispatch(inputs)]

    def work(buffer, rank):
        rows = 17 * SCALE
        out = buffer.new_output(rows, HIDDEN, num_topk=2, topk_idx_dtype=torch.int32) if direct else None
        given = send(buffer, rank, invalid, out=out)
        assert given[1].dtype == torch.int32
        check_received(given, right[rank], rank, inputs.experts // 2)
        check_received(send(buffer, rank, invalid, out=out, num_worst_tokens=rows), right[rank], rank, 2, rows=rows)
        if direct:
            refused(
                ValueError,
                "experts per row, of torch.int32; topk_idx has 2 of torch.int64",
                send,
                buffer,
                rank,
                inputs,
                out=out,
            )
        else:
            check_received(send(buffer, rank, inputs), reference_dispatch(inputs)[rank], rank, 2)
        return buffer.combine(given[0], given[4], given[2], config=SMALL)[:2]

    check_combined(run(2, work, 3), inputs, right, [r.x for r in right], [r.topk_weights for r in right])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_experts_of_other_dtypes_are_refused(dtype):
    inputs = make_inputs([4])
    wrong = inputs._replace(topk_idx=[idx.clamp(min=0).to(dtype) for idx in inputs.topk_idx])

    def work(buffer, rank):
        sentence = f"topk_idx is {dtype}; it must be torch.int64 or torch.int32"
        refused(TypeError, sentence, send, buffer, rank, wrong)
        given = to_device(buffer.transport.device, inputs.topk_idx[0])
        layout = buffer.get_dispatch_layout(given, inputs.experts)
        x, idx, weights = (to_device(buffer.transport.device, part[rank]) for part in wrong[:3])
        refused(TypeError, sentence, buffer.dispatch, x, None, *layout[:2], layout[3], layout[2], idx, weights)
        refused(TypeError, "topk_idx_dtype is", buffer.new_output, 8, HIDDEN, topk_idx_dtype=dtype)

    run(1, work)


def test_previous_events():
    """An EventOverlap with or without an event, an EventHandle or None; all others are refused by name."""
    inputs = make_inputs([4])

    def work(buffer, rank):
        idx = to_device(buffer.transport.device, inputs.topk_idx[0])
        for event in (None, EventOverlap(), EventOverlap(EventHandle(), extra_tensors=(idx,)), EventHandle()):
            given = send(buffer, rank, inputs, previous_event=event)
            check_received(given, reference_dispatch(inputs)[rank], rank, inputs.experts)
            buffer.combine(given[0], given[4], config=SMALL, previous_event=event)
            buffer.get_dispatch_layout(idx, inputs.experts, previous_event=event)
        for event in (3, "now", idx):
            sentence = f"previous_event is {type(event).__name__}; it must be an EventOverlap, an EventHandle or None"
            refused(TypeError, sentence, send, buffer, rank, inputs, previous_event=event)
            refused(TypeError, sentence, buffer.combine, *given[0:5:4], config=SMALL, previous_event=event)
            refused(TypeError, sentence, buffer.get_dispatch_layout, idx, inputs.experts, event)

    run(1, work)


def test_numpy_integers():
    """Every integer argument may be one of NumPy; the results are those of an int."""
    inputs, number = make_inputs([5 * SCALE]), np.int64
    right = reference_dispatch(inputs)[0]

    def work(transport):
        config = Config(*map(number, (SMALL.num_sms, 1, SMALL.num_max_nvl_chunked_recv_tokens)))
        assert config == SMALL and all(type(value) is int for value in vars(config).values())
        buffer = Buffer(transport, np.int32(NUM_BYTES), np.uint8(0))
        out = buffer.new_output(number(5 * SCALE), number(HIDDEN), num_scales=number(0), num_topk=number(2))
        worst = dict(num_worst_tokens=number(6 * SCALE), expert_alignment=number(4))
        check_received(send(buffer, 0, inputs, config, **worst), right, 0, 2, rows=6 * SCALE)
        check_received(send(buffer, 0, inputs, config, out=out), right, 0, 2)
        refused(
            TypeError,
            "num_worst_tokens is .*2.0.*; it must be an int",
            send,
            buffer,
            0,
            inputs,
            num_worst_tokens=np.float32(2),
        )
        refused(TypeError, "expert_alignment is", send, buffer, 0, inputs, expert_alignment=np.bool_(True))
        out.close()
        buffer.destroy()

    LocalGroup(1).run(work)


def test_numpy_integers_of_the_layout(device):
    idx = make_inputs([5]).topk_idx[0].to(device)
    for given, right in zip(
        get_dispatch_layout(idx, np.int16(2), np.uint8(1)), get_dispatch_layout(idx, 2, 1), strict=True
    ):
        assert torch.equal(given, right)


def test_tensors_without_memory_are_refused():
    """Tensors of the meta device and FakeTensors, which tracing makes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = make_inputs([5])

    def work(buffer, rank):
        device = buffer.transport.device
        x, idx = (to_device(device, part[0]) for part in inputs[:2])
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, inputs.experts)
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)
        handle = buffer.dispatch(x, **layout, config=SMALL)[4]
        fake_x, fake_idx, fake_flags = map(FakeTensorMode().from_tensor, (x, idx, is_in_rank))
        without = "is a FakeTensor without memory; it must be a tensor with data"
        refused(TypeError, f"x {without}", buffer.dispatch, fake_x, **layout)
        refused(TypeError, f"x {without}", buffer.combine, fake_x, handle)
        refused(
            TypeError, f"is_token_in_rank {without}", buffer.dispatch, x, **layout | dict(is_token_in_rank=fake_flags)
        )
        refused(TypeError, f"x's scales {without}", buffer.dispatch, (x.to(FP8), fake_x[:, :1].float()), **layout)
        refused(ValueError, "x is on meta; it must be where the buffer is", buffer.dispatch, x.to("meta"), **layout)
        refused(ValueError, "x is on meta", buffer.combine, x.to("meta"), handle)

    run(1, work)


def test_subclasses_of_tensor_with_memory_are_allowed():
    inputs = make_inputs([5])
    wrapped = inputs._replace(x=[torch.nn.Parameter(x, requires_grad=False) for x in inputs.x])

    def work(buffer, rank):
        given = send(buffer, rank, wrapped)
        check_received(given, reference_dispatch(inputs)[0], rank, 2)

    run(1, work)
