"""Sizes of the lesson "Shared experts": the layer and the batches, on a GPU and in the simulator."""

import torch

from moe_numba import simulator
from moe_numba.course.bench.baselines.torch_layer import TP8, Shape

SMALL = Shape(16, 4, 128, 128, 4, 2)  # for the simulator
TIMED = TP8  # DeepSeek-V3 on one of 8 GPUs; all times are those of this layer
SHAPE = SMALL if simulator.ENABLED else TIMED  # of the layers that run
EXPERTS, TOPK, SCALE = SHAPE.num_experts, SHAPE.topk, SHAPE.routed_scaling_factor
REPLICAS = 3 if simulator.ENABLED else 8
DECODE = 8  # tokens of the steps' times
ALL_TOKENS = (1, 8, 64, 256, 1024, 4096)
CHECKED = 6 if simulator.ENABLED else DECODE  # tokens of the steps' checks
COPIES = 1 if simulator.ENABLED else 4  # layers that are timed in turn, so that no weights stay in the L2 cache
DEVICE = "cpu" if simulator.ENABLED else "cuda"
FP8 = torch.float8_e4m3fn
DTYPES = {"FP8": FP8, "bfloat16": torch.bfloat16}

# The gate's kernel routes with DeepSeek-V3's numbers, also in the simulator.
GATE_EXPERTS, GATE_GROUPS, GATE_KEPT, GATE_TOPK = TP8.num_experts, TP8.num_expert_group, TP8.topk_group, TP8.topk
WARPS = 4  # of a CTA of the gate's kernel; each routes a token
GATE_TOKENS = 64
