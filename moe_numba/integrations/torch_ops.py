"""Register every public function as a PyTorch op; importing this module is all that is needed.

The public functions already work under torch.compile(fullgraph=True), torch.export and FakeTensorMode: there they call
their ops. To write ops into a graph by hand, or to load an exported program, import this module and use
``torch.ops.moe_numba.<name>``. An op takes the function's arguments without ``out`` and ``workspace``.
``torch.ops.moe_numba.<name>.out`` writes to ``out``, a tensor or a list of tensors, and returns nothing; it takes
``out`` and the arguments after it by keyword. ``num_token_non_padded`` must be a tensor. An ``ExpertPlacement`` is
passed as its fields, ``placement_physical_ids`` and so on. Of the ops ``group_gemm_bf16`` has a backward. They refuse
torch.vmap.
"""

from moe_numba import align, expert_parallel, gate, grouped_gemm, moe_layer, shared_experts
from moe_numba.align import with_gate as gate_align
from moe_numba.runtime.torch_op import OPS

__all__ = ["OPS", "align", "expert_parallel", "gate", "gate_align", "grouped_gemm", "moe_layer", "shared_experts"]
