"""Expert parallelism inside a host: tokens travel to the GPUs that hold their experts, and back."""

from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.config import Config
from moe_numba.expert_parallel.dispatch_layout import get_dispatch_layout
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
from moe_numba.expert_parallel.output_buffer import Output
from moe_numba.expert_parallel.transport import CudaIpc, LocalGroup, SymmetricMemory

__all__ = [
    "Buffer",
    "Config",
    "CudaIpc",
    "EventHandle",
    "EventOverlap",
    "LocalGroup",
    "Output",
    "SymmetricMemory",
    "get_dispatch_layout",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]
