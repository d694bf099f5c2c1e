"""Generate tokens with a tiny random Qwen3-MoE model of transformers, whose experts run on moe_numba's kernels.

Run it with ``python docs/examples/transformers_generation.py``. Without a GPU the kernels run in the simulator. The
printed difference is below 0.02.

With ``cache_implementation="static"`` transformers compiles the decode step on a GPU and captures it in CUDA graphs.
Without it the Python code of transformers takes longer per token than the kernels at batch size 1, so that faster
kernels change nothing.
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_numba  # before Numba, if your program imports that too
from moe_numba.integrations.transformers import fuse_routers, register

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"
model = Qwen3MoeForCausalLM(config).bfloat16().eval().to(device)
prompt = torch.arange(5, device=device).view(1, 5)

with torch.no_grad():
    model.set_experts_implementation("eager")
    eager = model(prompt).logits.float()

    register()
    model.set_experts_implementation("moe_numba")
    fuse_routers(model)
    difference = (model(prompt).logits.float() - eager).norm() / eager.norm()

tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, cache_implementation="static")
print("tokens:", tokens[0, 5:].tolist())
print(f"relative difference of the logits from eager: {float(difference):.4f}")
