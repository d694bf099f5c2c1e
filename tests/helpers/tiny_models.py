"""Tiny random models of transformers with experts."""

import torch
import transformers

COMMON = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=64, num_experts_per_tok=2, max_position_embeddings=64,
)  # fmt: skip
NARROW = dict(moe_intermediate_size=64)
DEEPSEEK = NARROW | dict(n_routed_experts=8, num_local_experts=8, n_shared_experts=1, first_k_dense_replace=1)
LATENT = dict(q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
MODELS = {
    "DeepseekV3": DEEPSEEK | LATENT | dict(n_group=4, topk_group=2),
    "Glm4Moe": DEEPSEEK | dict(n_group=1, topk_group=1, head_dim=32),
    "Qwen3Moe": NARROW | dict(num_experts=8, head_dim=32),
    "Mixtral": dict(num_local_experts=8, head_dim=32),
    "Olmoe": dict(num_experts=8),
    "GptOss": dict(num_local_experts=8, head_dim=32),
}


def make_model(name, device, **options):
    config = getattr(transformers, f"{name}Config")(**COMMON | MODELS[name] | options)
    torch.manual_seed(1)  # with 0 a token's choice of Mixtral's experts depends on roundings
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval().to(device).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model
