"""Run a tiny random gpt-oss model of transformers with its experts on moe_numba's kernels, in bfloat16 and in MXFP4.

Run it with ``python docs/examples/gpt_oss_mxfp4.py``. Without a GPU the kernels run in the simulator. A checkpoint of
gpt-oss is loaded with ``quantization_config=Mxfp4Config(dequantize=True)``. Both printed differences are below 0.02.
"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import moe_numba  # before Numba, if your program imports that too
from moe_numba.integrations.transformers import fuse_routers, pack_mxfp4_weights, register

config = GptOssConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_local_experts=8,
    num_experts_per_tok=4, num_attention_heads=2, num_key_value_heads=2, head_dim=32, sliding_window=16,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"
model = GptOssForCausalLM(config).bfloat16().eval().requires_grad_(False).to(device)
prompt = torch.arange(5, device=device).view(1, 5)
for module in model.modules():
    if hasattr(module, "gate_up_proj"):
        for weight in (module.gate_up_proj, module.down_proj):
            weight.copy_(torch.randint(-3, 4, weight.shape) / 16)  # values that MXFP4 represents exactly


def logits_of(implementation):
    """Return the logits of the prompt in float32."""
    model.set_experts_implementation(implementation)
    return model(prompt).logits.float()


def difference(logits, wanted):
    """Return the relative difference of logits."""
    return float((logits - wanted).norm() / wanted.norm())


eager = logits_of("eager")
register()
fuse_routers(model)
print(f"relative difference of the logits from eager: {difference(logits_of('moe_numba'), eager):.4f}")

pack_mxfp4_weights(model)  # exact; the experts then take about a quarter of the memory
print(f"relative difference of the logits in MXFP4 from eager: {difference(logits_of('moe_numba'), eager):.4f}")
tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
print("tokens:", tokens[0, 5:].tolist())
