"""Weak memory and kernels on several ranks."""
