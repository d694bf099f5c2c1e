"""Memory that shared experts take on a rank when they are stored as routed experts."""

from dataclasses import dataclass

from moe_numba.runtime.validate import check_int


@dataclass(frozen=True)
class MemoryCost:
    """Bytes on one rank; tensor parallelism splits every expert into equal shards."""

    expert_bytes: int  # one whole expert of one layer
    moe_layers: int
    replicas_bytes: int  # shards of all replicas, all layers
    removed_bytes: int  # shards of the original shared experts, all layers

    @property
    def extra_bytes(self) -> int:
        """Additional bytes on the rank."""
        return self.replicas_bytes - self.removed_bytes


def memory_cost(
    num_replicas: int = 1,
    *,
    hidden_size: int = 7168,
    moe_intermediate_size: int = 2048,
    num_hidden_layers: int = 61,
    first_k_dense_replace: int = 3,
    n_shared_experts: int = 1,
    bytes_per_weight: int = 1,
    tensor_parallel_size: int = 1,
) -> MemoryCost:
    """Compute the memory that shared experts take as routed experts; the defaults are DeepSeek-V3's, in FP8.

    Parameters
    ----------
    num_replicas : int
        Copies of each shared expert. SGLang's fusion uses as many as there are tensor-parallel ranks.
    hidden_size, moe_intermediate_size, num_hidden_layers, first_k_dense_replace, n_shared_experts : int
        From the model's config. The first ``first_k_dense_replace`` layers have no experts.
    bytes_per_weight : int
        1 for FP8 (without its block scales, another 0.02 %), 2 for bfloat16.
    tensor_parallel_size : int
        Ranks over which each expert is sharded.

    Returns
    -------
    MemoryCost

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; the message names the argument, its value and what is allowed.

    Examples
    --------
    >>> cost = moe_numba.memory_cost(num_replicas=8, tensor_parallel_size=8)  # DeepSeek-V3 in FP8
    >>> cost.moe_layers, cost.replicas_bytes, cost.removed_bytes
    (58, 2554331136, 319291392)
    """
    positive = dict(
        num_replicas=num_replicas,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_hidden_layers=num_hidden_layers,
        n_shared_experts=n_shared_experts,
        bytes_per_weight=bytes_per_weight,
        tensor_parallel_size=tensor_parallel_size,
    )
    # As Python's integers, which do not overflow
    replicas, hidden, intermediate, layers, shared, weight_bytes, ranks = (
        check_int(name, value, 1) for name, value in positive.items()
    )
    moe_layers = layers - check_int("first_k_dense_replace", first_k_dense_replace, 0, layers)
    expert = hidden * intermediate * 3 * weight_bytes
    if expert % ranks:
        raise ValueError(f"tensor_parallel_size is {ranks}; it must divide an expert's {expert} bytes")
    before = expert // ranks * shared * moe_layers
    return MemoryCost(expert, moe_layers, before * replicas, before)
