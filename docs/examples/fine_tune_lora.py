"""Fine-tune tiny random Qwen3-MoE and gpt-oss models with the Trainer of transformers and LoRA adapters of PEFT.

Run it with ``python docs/examples/fine_tune_lora.py``; it needs peft and accelerate. Without a GPU the kernels run in
the simulator. It prints the loss of each step, which falls, beside that of eager. Their relative difference is below
0.02.

The adapters of the experts are PEFT's ``target_parameters``: it adds the product of two small matrices to an expert's
weight. The experts of moe_numba compute the adapters apart from the weight.
"""

import copy
import tempfile

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PrinterCallback, Trainer, TrainingArguments

import moe_numba  # before Numba, if your program imports that too
from moe_numba.integrations.transformers import register

SIZES = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "Qwen3Moe": SIZES | dict(intermediate_size=64, moe_intermediate_size=64, num_experts=4),
    "GptOss": SIZES | dict(intermediate_size=64, num_local_experts=4),
}
ADAPTERS = dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

register()
transformers.logging.set_verbosity_error()
device = "cpu" if moe_numba.simulator.ENABLED else "cuda"


def losses_of(initial, implementation, examples):
    """Return the loss of each step."""
    model = copy.deepcopy(initial)
    model.set_experts_implementation(implementation)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**ADAPTERS, target_parameters=EXPERTS))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=4, per_device_train_batch_size=1, learning_rate=3e-2, logging_steps=1, report_to=[],
            use_cpu=device == "cpu", disable_tqdm=True, save_strategy="no", logging_strategy="steps",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=examples)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


for name, sizes in MODELS.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().to(device)
    tokens = torch.randint(1, 64, (8,))
    examples = [dict(input_ids=tokens, labels=tokens)]
    eager, own = (losses_of(model, implementation, examples) for implementation in ("eager", "moe_numba"))
    print(f"{name}, eager:", *(f"{loss:.3f}" for loss in eager))
    print(f"{name}, moe_numba:", *(f"{loss:.3f}" for loss in own))
    print(f"relative difference of the last loss: {abs(own[-1] / eager[-1] - 1):.4f}")
