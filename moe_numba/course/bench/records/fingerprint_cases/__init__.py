"""The public calls whose kernels are fingerprinted: every kernel that the package chooses between on an H200.

Each case is a generator of (name, call) pairs; every launch in a call is one kernel. The calls run in compile-only mode
(see ``moe_numba.runtime.device``), so the tensors are small and on the CPU. Sizes that no kernel is compiled for are
arbitrary.
"""

from moe_numba.course.bench.records.fingerprint_cases.articles import articles
from moe_numba.course.bench.records.fingerprint_cases.expert_parallel import expert_parallel, low_latency, one_kernel
from moe_numba.course.bench.records.fingerprint_cases.grouped_gemm import grouped_gemm, grouped_gemm_backward
from moe_numba.course.bench.records.fingerprint_cases.moe_layer import decode, moe_layer
from moe_numba.course.bench.records.fingerprint_cases.routing import align, gate, gate_align, shared_experts

_GENERATORS = (
    *(gate, align, gate_align, shared_experts, grouped_gemm, grouped_gemm_backward, moe_layer, decode),
    *(expert_parallel, low_latency, one_kernel, articles),
)
CASES = {generator.__name__: generator for generator in _GENERATORS}
