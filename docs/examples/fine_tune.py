"""Train a tiny random Qwen3-MoE model of transformers, whose experts run forward and backward on moe_numba's kernels.

Run it with ``python docs/examples/fine_tune.py``. Without a GPU the kernels run in the simulator. It prints the losses
of each step, which fall, beside those of eager. Their relative difference is below 0.02.

Master weights are in float32, as mixed precision wants it: the optimiser's steps are smaller than what bfloat16 holds.
"""

import copy

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_numba  # before Numba, if your program imports that too
from moe_numba.integrations.transformers import register

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"
initial = Qwen3MoeForCausalLM(config).bfloat16().to(device)
tokens = torch.randint(1, 64, (1, 8), device=device)
register()


def train(implementation, steps=3):
    """Return the loss of each step."""
    model, losses = copy.deepcopy(initial), []
    model.set_experts_implementation(implementation)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimiser = torch.optim.AdamW(masters, lr=3e-3)
    for _ in range(steps):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimiser.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


eager, own = train("eager"), train("moe_numba")
for name, losses in (("eager", eager), ("moe_numba", own)):
    print(f"{name}:", *(f"{loss:.3f}" for loss in losses))
print(f"relative difference of the last loss: {abs(own[-1] / eager[-1] - 1):.4f}")
