"""Expert parallelism within a node: dispatch sends tokens to the GPUs that hold their experts, combine returns them."""

from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.layout.api import get_dispatch_layout
from moe_numba.expert_parallel.low_latency.exchange import LowLatencyReceived
from moe_numba.expert_parallel.low_latency.pair import LowLatency
from moe_numba.expert_parallel.ranks.events import EventHandle, EventOverlap
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.ranks.transport import CudaIpc, SymmetricMemory
from moe_numba.expert_parallel.ranks.transport_nvshmem import Nvshmem
from moe_numba.expert_parallel.rings.config import Config, topk_idx_t
from moe_numba.expert_parallel.rings.output_buffer import SymmetricOutput
from moe_numba.quantise.fp8_cast import per_token_cast_back, per_token_cast_to_fp8

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
