"""What a rank pays in memory for shared experts that are kept as routed ones."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryCost:
    """Bytes on one rank; tensor parallelism cuts every expert into equal shares."""

    expert_bytes: int  # one expert of one layer, uncut
    moe_layers: int
    replicas_bytes: int  # the replicas, of all layers
    removed_bytes: int  # the shared expert that was there before, of all layers

    @property
    def extra_bytes(self):
        """What the rank pays more than before."""
        return self.replicas_bytes - self.removed_bytes


def memory_cost(
    num_replicas=1,
    *,
    hidden_size=7168,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    first_k_dense_replace=3,
    n_shared_experts=1,
    bytes_per_weight=1,
    tensor_parallel_size=1,
):
    """Count what shared experts cost as routed ones; the defaults are DeepSeek-V3's, in FP8.

    Parameters
    ----------
    num_replicas : int
        Copies of each shared expert; the document uses as many as there are tensor-parallel ranks.
    hidden_size, moe_intermediate_size, num_hidden_layers, first_k_dense_replace, n_shared_experts : int
        Of the model's config. The first ``first_k_dense_replace`` layers have no experts.
    bytes_per_weight : int
        1 for FP8 (block scales, 0.02 % more, are left out), 2 for bfloat16.
    tensor_parallel_size : int
        Ranks that share each expert.

    Returns
    -------
    MemoryCost
    """
    named = dict(
        num_replicas=num_replicas,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_hidden_layers=num_hidden_layers,
        n_shared_experts=n_shared_experts,
        bytes_per_weight=bytes_per_weight,
        tensor_parallel_size=tensor_parallel_size,
    )
    for name, value in named.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an int of 1 or more")
    if type(first_k_dense_replace) is not int or not 0 <= first_k_dense_replace <= num_hidden_layers:
        raise ValueError(f"first_k_dense_replace is {first_k_dense_replace!r}; 0 to {num_hidden_layers} are allowed")
    expert = hidden_size * moe_intermediate_size * 3 * bytes_per_weight
    if expert % tensor_parallel_size:
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; it must divide an expert's {expert} bytes")
    layers = num_hidden_layers - first_k_dense_replace
    before = expert // tensor_parallel_size * n_shared_experts * layers
    return MemoryCost(expert, layers, before * num_replicas, before)
