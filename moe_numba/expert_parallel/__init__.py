"""Expert parallelism inside a host: tokens travel to the GPUs that hold their experts, and back."""

from moe_numba.expert_parallel.api import get_dispatch_layout
from moe_numba.expert_parallel.casts import per_token_cast_back, per_token_cast_to_fp8

__all__ = ["get_dispatch_layout", "per_token_cast_back", "per_token_cast_to_fp8"]
