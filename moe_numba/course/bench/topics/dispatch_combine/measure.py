"""Measures dispatch and combine with one process per GPU: the package, NCCL, and a plain push as the upper limit.

Every sample is the slowest rank's. *Kernel time* is measured over many back-to-back calls, with the host ahead of the
GPU; *call time* between CUDA events around one call, after a barrier of all ranks. ``dispatch_combine_peers_measure``
says what a module of ``--peers`` provides.
"""

import json
import tempfile
from functools import cached_property, partial
from pathlib import Path

import torch

from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.nccl_all_to_all import all_to_all_counts, all_to_all_rows, poisoned, wrong_rows
from moe_numba.course.bench.records import progress
from moe_numba.course.bench.timing import Stats, launched_by
from moe_numba.course.bench.timing.dist import load_files, peer_files
from moe_numba.course.bench.topics.dispatch_combine.measure_peers import Problem, peer_rows
from moe_numba.expert_parallel.ranks.process_group import free_port, process_group

TOKENS, HIDDEN, EXPERTS, TOPK = 4096, 7168, 256, 8
SMS = (4, 8, 12, 16, 20, 24, 32, 48)
MAIN_SMS = 24
DECODE_TOKENS = (1, 8, 32, 128)
BUFFER_BYTES = 1 << 30
BLOCKS_OF_PUSH = (8, 12, 16, 24, 32, 132)
PARTS = ("push", "large", "nccl", "decode")


def measure(numbers_of_ranks, quick=False, parts=PARTS, peers=()):
    """Return the record's rows for all group sizes for which there are enough GPUs.

    Parameters
    ----------
    numbers_of_ranks : sequence of int
    quick : bool
        Measure only a few configurations.
    parts : sequence of str
        "push", a plain push; "large", many tokens; "nccl", NCCL; "decode", few tokens.
    peers : sequence of modules
        Measured with "large".
    """
    if isinstance(parts, str) or not set(parts) <= set(PARTS):
        raise ValueError(f"parts is {parts!r}; it must be a sequence of names out of {', '.join(PARTS)}")
    rows = []
    for ranks in numbers_of_ranks:
        if ranks <= torch.cuda.device_count():
            rows += _measure_ranks(ranks, quick, parts, peer_files(peers, "plan_dispatch_combine"))
    return rows


def _measure_ranks(ranks, quick, parts, files):
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(_work, (ranks, free_port(), quick, parts, files, found), nprocs=ranks)
        return json.loads(found.read_text())


def _work(rank, ranks, port, quick, parts, files, found):
    with process_group(rank, ranks, port), progress.said(rank == 0):
        rows = _Bench(rank, ranks, quick, load_files(files)).rows(parts)
        if rank == 0:
            found.write_text(json.dumps(rows))


class _Bench:
    """The benchmark on one rank."""

    def __init__(self, rank, ranks, quick, peers=()):
        self.peers = peers
        self.rank, self.ranks, self.quick, self.device = rank, ranks, quick, torch.device("cuda", rank)
        self.experts = EXPERTS // ranks * ranks
        self.x = self._tokens_of(rank)
        torch.manual_seed(rank)
        self.topk_idx = torch.rand(TOKENS, self.experts, device=self.device).topk(TOPK, dim=1).indices
        self.topk_weights = torch.rand(TOKENS, TOPK, device=self.device)
        self.config = dict(ranks=ranks, num_experts=self.experts, topk=TOPK, hidden=HIDDEN)

    def _tokens_of(self, rank):
        """Return the tokens of a rank; every rank can compute them, to check what it receives."""
        generator = torch.Generator(self.device).manual_seed(rank)
        return torch.randn(TOKENS, HIDDEN, device=self.device, generator=generator).bfloat16()

    @cached_property
    def x_in_fp8(self):
        from moe_numba.expert_parallel import per_token_cast_to_fp8

        return per_token_cast_to_fp8(self.x)

    def rows(self, parts):
        """Return the rows of this group size, the same on every rank."""
        found = []
        if "push" in parts:
            found += self._with_buffer(self._push)
        if "large" in parts:
            for sms in (MAIN_SMS,) if self.quick else SMS:
                found += self._with_buffer(self._large, sms)
        if "nccl" in parts:
            found += self._nccl()
        if "decode" in parts:
            for tokens in (1, 128) if self.quick else DECODE_TOKENS:
                found += self._with_buffer(self._decode, tokens)
                found += self._with_buffer(self._decode_direct, tokens)
        return found

    def _with_buffer(self, measure, *arguments):
        """Run a part with a new buffer: one that was used with other configurations needs barriers."""
        import torch.distributed as dist

        from moe_numba.expert_parallel import Buffer

        self.buffer = Buffer(dist.group.WORLD, BUFFER_BYTES * max(1, self.ranks // 4), timeout=20)
        found = measure(*arguments)
        self.buffer.destroy()
        return found

    # Timing

    def _barrier(self):
        import torch.distributed as dist

        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def _slowest(self, samples, kernels=()):
        """Return the statistics of the maximum over ranks of each sample."""
        import torch.distributed as dist

        samples = torch.tensor(samples, device=self.device)
        dist.all_reduce(samples, dist.ReduceOp.MAX)
        return Stats.of(samples.cpu().numpy(), kernels)

    def _time(self, call, repeats, batch):
        kernels = launched_by(call)
        for _ in range(2):
            call()
        samples = []
        for _ in range(repeats):
            self._barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(batch):
                call()
            end.record()
            torch.cuda.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / batch)
        return self._slowest(samples, kernels)

    def kernel(self, call):
        """Measure many back-to-back calls."""
        return self._time(call, 9, 20)

    def call(self, call):
        """Measure one call, after a barrier."""
        return self._time(call, 20, 1)

    def _largest(self, number):
        """Return the maximum over ranks."""
        return int(self._slowest([float(number)]).median)

    # Steps

    def _config(self, sms):
        from moe_numba.expert_parallel import Buffer, Config

        return Config(sms, 6, Buffer.get_dispatch_config(self.ranks).num_max_nvl_chunked_recv_tokens)

    def _layout(self, topk_idx):
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(topk_idx, self.experts)
        return dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in_rank)

    def _large(self, sms):
        """Measure dispatch in both dtypes, through rings and to an output, and combine, on ``sms`` SMs."""
        config, layout = self._config(sms), self._layout(self.topk_idx)
        own = int(layout["is_token_in_rank"][:, self.rank].sum())
        found, main = [], sms == MAIN_SMS
        for dtype, x in (("bf16", self.x), ("e4m3", self.x_in_fp8)):
            out = self._new_output(x)
            for step, options in {"final": dict(config=config), "to output": dict(config=config, out=out)}.items():
                given = self.buffer.dispatch(x, **layout, **options)
                self.check_given(x, given, config, layout)
                row_bytes = 2 * HIDDEN if dtype == "bf16" else HIDDEN + 4 * x[1].shape[1]
                wire = self._largest((len(given[4][3]) - own) * row_bytes)
                cached = partial(self.buffer.dispatch, x, given[4], **options)
                self.check_given(x, cached(), config, layout)
                found.append(self.row(step, "dispatch", sms, dtype, cached, wire, main))
                if main:
                    metadata = dict(topk_idx=self.topk_idx, topk_weights=self.topk_weights)
                    whole = partial(self.buffer.dispatch, x, **layout, **metadata, **options)
                    found.append(self.row(f"{step}, with notify", "dispatch", sms, dtype, whole, wire, main))
                if dtype == "bf16" and step == "final":
                    back = partial(self.buffer.combine, given[0], given[4], config=config)
                    found.append(self.row(step, "combine", sms, dtype, back, wire, main))
            out.close()
            problem = Problem(self.buffer.transport, x, self.topk_idx, self.topk_weights, self.experts, sms)
            found += peer_rows(self, problem, layout, dtype, wire, main)
        return found

    def _new_output(self, x):
        """Allocate an output for the tokens of all ranks."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        num_scales = 0 if scales is None else scales.shape[1]
        return self.buffer.new_output(self.ranks * len(values), HIDDEN, values.dtype, num_scales, TOPK)

    def check_given(self, x, given, config, layout):
        """Check what the package's dispatch returns."""

        def combine(rows):
            return self.buffer.combine(rows, given[4], config=config)[0]

        self.check(x, given[0], given[4][3], given[4][0], combine, layout)

    def check(self, x, received, src_idx, rank_prefix, combine, layout):
        """Check own rows bit for bit, and all rows by the sums that combine returns, exact in both dtypes."""
        prefix = rank_prefix[:, self.rank].tolist()
        rows = slice(prefix[self.rank - 1] if self.rank else 0, prefix[self.rank])
        pairs = list(zip(x, received, strict=True)) if isinstance(x, tuple) else [(x, received)]
        for sent, got in pairs:
            if not torch.equal(got[rows].view(torch.uint8), sent[src_idx[rows].long()].view(torch.uint8)):
                raise AssertionError("a rank's own rows are not what was sent")
        self._check_back(combine(pairs[0][1].bfloat16()), layout, pairs[0][0])

    def _check_back(self, out, layout, x):
        """Check that each combined token is the token times the number of ranks that it was sent to."""
        copies = layout["is_token_in_rank"].sum(1, keepdim=True)
        if not torch.equal(out, (x.float() * copies).bfloat16()):
            raise AssertionError("the combined rows are not the sums of the sent rows")

    def row(self, step, operation, sms, dtype, call, wire, with_call=False, **more):
        kernel = self.kernel(call)
        more |= {"wire_gbps": round(wire / kernel.median / 1e3, 1), "bytes": wire, "operation": operation}
        config = self.config | ({"num_sms": sms} if sms else {})
        return records.row(
            step,
            config=config,
            size={"tokens": TOKENS},
            dtype=dtype,
            kernel=kernel,
            call=self.call(call) if with_call else None,
            **more,
        )

    def _push(self):
        """Measure the upper limit: 16-byte stores into the next rank's buffer, and into those of all other ranks."""
        from moe_numba.course.bench.baselines.peer_push import push

        size, found = self.x.numel() * 2, []
        shared = self.buffer.transport.allocate(size * max(1, self.ranks - 1))
        steps = {self.ranks - 1: "push to all"} | {1: "plain push"}  # the same with two ranks
        for others, step in steps.items():
            for blocks in BLOCKS_OF_PUSH:
                call = partial(push, shared.addresses, self.rank, others, self.x, blocks)
                found.append(self.row(step, "push", blocks, "bf16", call, others * size))
            self._barrier()
            for nth, received in enumerate(shared.local.view(torch.bfloat16).split(self.x.numel())[:others]):
                if not torch.equal(received.view_as(self.x), self._tokens_of((self.rank - 1 - nth) % self.ranks)):
                    raise AssertionError(f"{step}: what rank {(self.rank - 1 - nth) % self.ranks} sent did not arrive")
            shared.local.zero_()
            self._barrier()
        shared.close()
        return found

    def _nccl(self):
        """Measure torch's all_to_all_single on the rows that dispatch sends, without their metadata."""
        import torch.distributed as dist

        from moe_numba.expert_parallel.reference import dispatch_layout

        exchange = dist.all_to_all_single
        is_in_rank = dispatch_layout(self.topk_idx, self.ranks, self.experts)[2]
        all_sent = [None] * self.ranks
        dist.all_gather_object(all_sent, [chosen.nonzero().flatten().tolist() for chosen in is_in_rank.T])
        wanted = [
            self._tokens_of(source)[torch.tensor(sent[self.rank], dtype=torch.int64, device=self.device)]
            for source, sent in enumerate(all_sent)
        ]
        receives, sends, order = known = all_to_all_counts(is_in_rank, poisoned(exchange))
        picked, out = self.x[order], torch.empty(sum(receives), HIDDEN, dtype=torch.bfloat16, device=self.device)
        wire = self._largest((sum(sends) - sends[self.rank]) * 2 * HIDDEN)

        def only_exchange(exchange):
            exchange(out, picked, receives, sends)
            return out

        # The last step synchronises with the host in each call. Its kernel time, measured over back-to-back calls as
        # all others, includes these waits; the package's dispatch with notify waits for its counts in the same way.
        steps = {
            "NCCL all_to_all_single": only_exchange,
            "index_select and NCCL": lambda exchange: all_to_all_rows(self.x, *known, exchange),
            "counts, index_select and NCCL": lambda exchange: all_to_all_rows(
                self.x, *all_to_all_counts(is_in_rank, exchange), exchange
            ),
        }
        for step, run in steps.items():
            if wrong := wrong_rows(run(poisoned(exchange)), wanted):
                raise AssertionError(f"{step}, rank {self.rank}: {wrong}")
        return [
            self.row(step, "dispatch", None, "bf16", lambda run=run: run(exchange), wire, True)
            for step, run in steps.items()
        ]

    def _decode(self, tokens):
        """Measure dispatch and combine of few tokens: with and without waiting for counts, in a graph, and NCCL."""
        import torch.distributed as dist

        without_host = self._dispatch_and_combine(tokens, num_worst_tokens=self.ranks * tokens)
        x = self.x[:tokens]
        send = x.repeat(self.ranks, 1)
        got, back = torch.empty_like(send), torch.empty_like(send)

        def nccl(exchange=dist.all_to_all_single):
            exchange(got, send)
            exchange(back, got)

        nccl(poisoned(dist.all_to_all_single))
        sent = [self._tokens_of(source)[:tokens] for source in range(self.ranks)]
        if wrong := wrong_rows(got, sent) or wrong_rows(back, [x] * self.ranks):
            raise AssertionError(f"NCCL, rank {self.rank}, {tokens} tokens: {wrong}")
        steps = {
            "final": self._dispatch_and_combine(tokens),
            "final, worst": without_host,
            "final, graph": self._graph_of(without_host),
            "NCCL, every token": nccl,
        }
        return self._decode_rows(steps, tokens)

    def _decode_direct(self, tokens):
        """Measure dispatch to an output and combine of few tokens, in a graph."""
        out = self._new_output(self.x[:tokens])
        call = self._dispatch_and_combine(tokens, num_worst_tokens=self.ranks * tokens, out=out)
        found = self._decode_rows({"to output, graph": self._graph_of(call)}, tokens)
        out.close()
        return found

    def _dispatch_and_combine(self, tokens, **options):
        """Return a function that dispatches and combines ``tokens`` tokens, after checking it once."""
        idx, weights, x = (t[:tokens].contiguous() for t in (self.topk_idx, self.topk_weights, self.x))
        config, layout = self._config(MAIN_SMS), self._layout(idx)

        def call():
            given = self.buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights, config=config, **options)
            return self.buffer.combine(given[0], given[4], given[2], config=config)[0]

        self._check_back(call(), layout, x)
        return call

    def _graph_of(self, call):
        """Capture a call in a CUDA graph, and return the function that replays it."""
        self._barrier()
        graph = torch.cuda.CUDAGraph()
        replay = partial(graph.replay)
        with torch.cuda.graph(graph):
            replay.kernels = launched_by(call)
        return replay

    def _decode_rows(self, steps, tokens):
        return [
            records.row(
                name,
                config=self.config | {"num_sms": MAIN_SMS},
                size={"tokens": tokens},
                dtype="bf16",
                operation="dispatch and combine",
                kernel=self.kernel(call),
                call=self.call(call),
            )
            for name, call in steps.items()
        ]
