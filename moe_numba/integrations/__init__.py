"""Registrations with other libraries; see :mod:`moe_numba.integrations.torch_ops`."""
