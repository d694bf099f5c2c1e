"""Gradients of the experts of a layer: see ``docs/training.md``."""
