"""Measures a training step of a whole model of transformers: rows of the topic `training`."""

from functools import partial

import torch

from moe_numba.course.bench.topics.models.measure import DEFAULT, MODELS, OURS, WITH_ROUTERS, fits, make_model, select
from moe_numba.integrations.transformers import register

STEPS = DEFAULT, OURS, WITH_ROUTERS
PROMPT_TOKENS = 4096  # at most; more tokens are a batch of prompts
BOUND = 2e-2  # relative difference of the loss, and of the gradients' norm, from those of transformers


def model_steps(about=MODELS[0], tokens=4096, device="cuda"):
    """Return {name: function that computes a step}, of prompts, with the gradients of all weights.

    A step is the forward pass, the loss and the backward pass, without an optimiser; it frees the gradients. The result
    is None if the GPU's memory does not hold the model and its gradients.
    """
    if device == "cuda" and not fits(about, copies=2):
        return None
    register()
    model = make_model(about, device).requires_grad_(True)
    model.config.use_cache = False
    prompts = -(-tokens // PROMPT_TOKENS), min(tokens, PROMPT_TOKENS)
    ids = torch.randint(1, model.config.vocab_size, prompts, generator=torch.Generator().manual_seed(0)).to(device)

    def step(name, judge=torch.detach):
        select(model, name)
        loss = model(ids, labels=ids).loss
        loss.backward()
        result = judge(loss)
        model.zero_grad(set_to_none=True)
        return result

    def with_norm(loss):
        """Return the loss and the norm of the gradients of all experts."""
        gradients = [weight.grad.float().norm() for n, weight in model.named_parameters() if ".experts." in n]
        return torch.stack([loss.detach(), torch.stack(gradients).norm()])

    wanted = step(DEFAULT, with_norm)
    for name in STEPS:
        difference = float((step(name, with_norm) / wanted - 1).abs().max())
        if not difference < BOUND:
            raise AssertionError(
                f"{name}, {about.name}: the loss or its gradients differ by {difference:.1e}; {BOUND} is allowed"
            )
    return {name: partial(step, name) for name in STEPS}
