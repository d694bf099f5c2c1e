"""The experts of a layer on one GPU: a module in bfloat16, FP8 weights with block scales, and a CUDA graph.

Run it with ``python docs/examples/experts_on_one_gpu.py``. Without a GPU the kernels run in the simulator, which has no
CUDA graphs. The printed difference is below 0.1: FP8 keeps 3 bits of the mantissa of weights, x and activations.
"""

import torch

import moe_numba  # before Numba, if your program imports that too
from moe_numba.moe_layer import MoELayer

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOPK = 8, 256, 128, 16, 2
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"
torch.manual_seed(0)

# A module with its router. Weights usually come from a checkpoint, by load_state_dict.
layer = MoELayer(EXPERTS, HIDDEN, INTERMEDIATE, TOPK, scoring="softmax", device=device)
for parameter in layer.parameters():
    parameter.normal_(std=0.1)
x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
result = layer(x)

# The same weights in FP8 with a scale per 128 x 128 block.
experts = layer.experts


def quantise(weight):
    """Return a weight [experts, rows, columns] in FP8, and its scales [experts, rows / 128, columns / 128]."""
    blocks = weight.float().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax((2, 4)) / 448  # the largest magnitude of float8_e4m3fn
    values = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(3).flatten(1, 2), scales


(w13, w13_scale), (w2, w2_scale) = quantise(experts.w13), quantise(experts.w2)
logits = x.float() @ layer.router_weight.float().T
weights, ids = moe_numba.biased_grouped_topk(logits, None, TOPK, scoring="softmax")
workspace, out = moe_numba.ExpertsWorkspace(TOKENS, TOPK, w13, w2), torch.empty_like(x)  # so nothing is allocated


def run():
    """Compute the experts in FP8 into ``out``."""
    moe_numba.fused_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, out=out, workspace=workspace)


def difference(found):
    """Return the relative difference from the module in bfloat16."""
    return float((found.float() - result.float()).norm() / result.float().norm())


run()  # compiles the kernels, which a CUDA graph cannot capture
print(f"relative difference of FP8 from bfloat16: {difference(out):.4f}")
assert difference(out) < 0.1

if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    out.zero_()
    graph.replay()  # reads x, weights and ids again: write new tokens to these tensors
    assert difference(out) < 0.1
