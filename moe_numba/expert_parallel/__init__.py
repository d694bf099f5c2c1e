"""Expert parallelism within a node: dispatch sends tokens to the GPUs that hold their experts, combine returns them."""

from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.config import Config, topk_idx_t
from moe_numba.expert_parallel.dispatch_layout import get_dispatch_layout
from moe_numba.expert_parallel.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
from moe_numba.expert_parallel.local_group import LocalGroup
from moe_numba.expert_parallel.low_latency import LowLatency
from moe_numba.expert_parallel.low_latency_exchange import LowLatencyReceived
from moe_numba.expert_parallel.output_buffer import SymmetricOutput
from moe_numba.expert_parallel.transport import CudaIpc, SymmetricMemory
from moe_numba.expert_parallel.transport_nvshmem import Nvshmem

__all__ = [
    "Buffer",
    "Config",
    "CudaIpc",
    "EventHandle",
    "EventOverlap",
    "LocalGroup",
    "LowLatency",
    "LowLatencyReceived",
    "Nvshmem",
    "SymmetricMemory",
    "SymmetricOutput",
    "get_dispatch_layout",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "topk_idx_t",
]
