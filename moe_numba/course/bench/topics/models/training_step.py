"""Measures a training step of a whole model of transformers: rows of the topic `training`."""

from functools import partial

import torch

from moe_numba.course.bench.topics.models.measure import DEFAULT, MODELS, OURS, WITH_ROUTERS, fits, make_model, select
from moe_numba.integrations.transformers import register

STEPS = DEFAULT, OURS, WITH_ROUTERS
BOUND = 2e-2  # relative difference of the loss, and of the gradients' norm, from those of transformers


def model_steps(about=MODELS[0], tokens=4096, device="cuda"):
    """Return {name: function that computes a step}, of a prompt, with the gradients of all weights.

    A step is the forward pass, the loss and the backward pass, without an optimiser. The result is None if the GPU's
    memory does not hold the model and its gradients.
    """
    if device == "cuda" and not fits(about, copies=2):
        return None
    register()
    model = make_model(about, device).requires_grad_(True)
    model.config.use_cache = False
    ids = torch.randint(1, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)

    def step(name):
        select(model, name)
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def judged(name):
        """Return the loss and the norm of the gradients of all experts."""
        loss = step(name)
        gradients = [weight.grad.float().norm() for n, weight in model.named_parameters() if ".experts." in n]
        return torch.stack([loss, torch.stack(gradients).norm()])

    wanted = judged(DEFAULT)
    for name in STEPS:
        difference = float((judged(name) / wanted - 1).abs().max())
        if not difference < BOUND:
            raise AssertionError(
                f"{name}, {about.name}: the loss or its gradients differ by {difference:.1e}; {BOUND} is allowed"
            )
    return {name: partial(step, name) for name in STEPS}
