"""An MoE layer whose experts are distributed over several GPUs of a node.

Run it with ``torchrun --nproc-per-node=2 docs/examples/expert_parallel.py``, one process per GPU. Started by ``python``
alone, it runs two virtual ranks in one process: on one GPU, or in the simulator. Each rank prints the relative
difference from one GPU with all experts, which is below 0.02: bfloat16 rounds the ranks' sums.
"""

import os

import torch

import moe_numba
from moe_numba.expert_parallel import LocalGroup
from moe_numba.moe_layer import ExpertParallelMoE, Experts, fused_experts

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOPK = 8, 128, 64, 4, 2


def run(group, rank, ranks, device):
    """Compute the layer for this rank's tokens; return its relative difference from one GPU with all experts."""
    random = torch.Generator().manual_seed(0)
    w13 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=random) / HIDDEN**0.5).bfloat16().to(device)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=random) / INTERMEDIATE**0.5).bfloat16().to(device)
    random.manual_seed(rank + 1)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16().to(device)
    logits = torch.randn(TOKENS, EXPERTS, generator=random).to(device)

    config = moe_numba.Buffer.get_dispatch_config(ranks)
    buffer = moe_numba.Buffer(group, config.get_nvl_buffer_size_hint(2 * HIDDEN, ranks))  # bytes of a row in bfloat16
    local = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    experts = Experts(EXPERTS // ranks, HIDDEN, INTERMEDIATE, device=device)
    experts.load_state_dict({"w13": w13[local], "w2": w2[local]})
    # A rank has at most TOKENS tokens, few enough for the low-latency exchange: a launch each, which a CUDA graph can
    # capture. For prompts, num_worst_tokens of more than 512 tokens a rank, or none, chooses rings.
    layer = ExpertParallelMoE(buffer, experts, num_worst_tokens=TOKENS * ranks)

    weights, ids = moe_numba.biased_grouped_topk(logits, None, TOPK)
    result, expected = layer(x, weights, ids).float(), fused_experts(x, w13, w2, weights, ids).float()
    buffer.destroy()  # frees the memory of the exchange, too
    difference = float((result - expected).norm() / expected.norm())
    assert difference < 0.02
    return difference


if "RANK" in os.environ:
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    own = dist.get_rank()
    print(f"rank {own}: relative difference {run(dist.group.WORLD, own, dist.get_world_size(), 'cuda'):.4f}")
    dist.destroy_process_group()
else:
    differences = LocalGroup(2).run(lambda rank: run(rank, rank.rank, rank.num_ranks, rank.device))
    for own, difference in enumerate(differences):
        print(f"rank {own}: relative difference {difference:.4f}")
