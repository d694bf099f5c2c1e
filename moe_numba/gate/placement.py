"""Where experts are: the physical experts (replicas) of each logical one, among which the gate's kernels choose."""

from typing import Any, NamedTuple

import torch

from moe_numba import simulator
from moe_numba.gate.reference import REPLICA_CHOICES
from moe_numba.runtime.dlpack import as_tensor
from moe_numba.runtime.launch import address
from moe_numba.runtime.outputs import remember, tensor_key
from moe_numba.runtime.overlap import overlaps
from moe_numba.runtime.validate import check_choice, check_int, check_tensor

TABLE_TYPES = {torch.int32: "int32*", torch.int64: "int64*"}
TENSORS = "physical_ids", "num_replicas", "load"  # fields
MAX_SEED = (1 << 64) - 1
_MAX_PHYSICAL_EXPERTS = 1 << 24
_apart: dict = {}  # addresses of tensors that do not overlap


class ExpertPlacement(NamedTuple):
    """Physical experts of each logical expert, as an expert-parallel load balancer (EPLB) places them.

    The gate chooses logical experts, which the logits are for. With a placement it returns the ids of physical experts,
    each of which holds the weights of a logical one, and counts how many tokens each gets.

    Parameters
    ----------
    physical_ids : tensor [num_experts, max_replicas], int32 or int64
        Ids of the replicas of each logical expert, 0 to num_physical_experts - 1, in its first ``num_replicas``
        columns. The others are not read: SGLang and vLLM fill them with -1. Contiguous.
    num_replicas : tensor [num_experts], dtype of physical_ids, or None
        Number of replicas of each logical expert, 1 to max_replicas. Contiguous. None, only with ``how="static"``.
    num_physical_experts : int
        1 to 2**24. Fused shared experts have the ids after the last physical one.
    how : {"round_robin", "static", "random"}
        Which replica a token gets. "round_robin": column ``token % num_replicas[expert]``, where token is the row of
        the logits. "static": column 0 for all tokens, so each rank can have its own nearest replicas there. "random": a
        hash of seed, token and expert; equal seeds make equal choices.
    seed : int
        Of the random choice, 0 to 2**64 - 1, of an op (``torch.ops``, ``torch.compile``) to 2**63 - 1. A CUDA graph
        repeats the seed that it captured.
    load : tensor [num_physical_experts], int32, or None
        Counters, to which the kernel adds, for each physical expert, the tokens that chose it. Rows that are padding
        and fused shared experts are not counted. Contiguous. The caller sets them to zero.

    Notes
    -----
    The fields are SGLang's ``partial_logical_to_all_physical_map``, ``..._num_valid`` and ``num_physical_experts``, and
    vLLM's ``logical_to_physical_map``, ``logical_replica_count`` and ``expert_load_view``. SGLang's
    ``partial_logical_to_rank_dispatch_physical_map`` is ``physical_ids`` after ``[:, None]``, with ``how="static"``.
    Like theirs, ``load`` is per physical expert. Integers are added, so counts do not depend on the order of threads.

    The host does not read the tables, except in the simulator, which refuses wrong values. In a kernel, an id that is
    out of range becomes -1 with weight 0, and a number of replicas is limited to 1 to max_replicas.

    Examples
    --------
    Four logical experts, of which the first has a replica, on two ranks with three physical experts each:

    >>> physical_ids = torch.tensor([[0, 5], [1, -1], [2, -1], [3, -1]], dtype=torch.int32)
    >>> num_replicas = torch.tensor([2, 1, 1, 1], dtype=torch.int32)
    >>> load = torch.zeros(6, dtype=torch.int32)
    >>> placement = moe_numba.ExpertPlacement(physical_ids, num_replicas, 6, load=load)
    >>> logits = torch.tensor([[9.0, 0, 1, 0], [9, 1, 0, 0]])
    >>> weights, ids = moe_numba.biased_grouped_topk(logits, None, 2, placement=placement)
    >>> ids.tolist(), load.tolist()
    ([[0, 2], [5, 1]], [1, 1, 1, 0, 0, 1])
    """

    physical_ids: torch.Tensor
    num_replicas: torch.Tensor | None
    num_physical_experts: int
    how: str = "round_robin"
    seed: int = 0
    load: torch.Tensor | None = None

    @staticmethod
    def written() -> tuple[str, ...]:
        """Name the fields that the kernel modifies.

        :meta private:
        """
        return ("load",)


def as_placement(placement: Any) -> ExpertPlacement:
    """Return a placement whose arrays are tensors."""
    if not isinstance(placement, ExpertPlacement):
        raise TypeError(f"placement is {type(placement).__name__}; it must be a moe_numba.ExpertPlacement")
    given = {n: t for n in TENSORS if (t := getattr(placement, n)) is not None}
    return placement._replace(**{n: as_tensor(t, f"placement.{n}") for n, t in given.items()})


def placement_key(placement):
    """Return what a launch plan depends on of a placement: all but the seed, which is an argument of the kernel."""
    physical_ids, num_replicas, num_physical_experts, how, _, load = placement
    tables = tensor_key(physical_ids), tensor_key(num_replicas), tensor_key(load)
    return *tables, num_physical_experts, type(num_physical_experts), how


def check_placement(placement, num_experts, device):
    """Check what `placement_key` has."""
    check_choice("placement.how", placement.how, REPLICA_CHOICES)
    num_physical = check_int("placement.num_physical_experts", placement.num_physical_experts, 1, _MAX_PHYSICAL_EXPERTS)
    place, of_logits = (device, "gating_output"), "gating_output has {} columns"
    ids, count = placement.physical_ids, placement.num_replicas
    wanted = dict(shape=(num_experts, "max_replicas"), because=(of_logits,), contiguous=True, device=place)
    check_tensor("placement.physical_ids", ids, dtype=tuple(TABLE_TYPES), **wanted)
    if not 1 <= ids.shape[1] <= num_physical:
        raise ValueError(
            f"placement.physical_ids has {ids.shape[1]} columns; 1 to placement.num_physical_experts "
            f"({num_physical}) are allowed"
        )
    if count is not None:
        wanted = dict(shape=(num_experts,), because=(of_logits,), contiguous=True, device=place)
        check_tensor("placement.num_replicas", count, dtype=ids.dtype, **wanted)
    elif placement.how != "static":
        raise TypeError(f"placement.num_replicas is None; with how={placement.how!r} it must be a tensor")
    if placement.load is not None:
        because = ("placement.num_physical_experts is {}",)
        wanted = dict(shape=(num_physical,), because=because, contiguous=True, device=place)
        check_tensor("placement.load", placement.load, dtype=torch.int32, **wanted)


def check_values(placement):
    """Raise for replicas and ids that are out of range; this reads the tables on the host."""
    ids, count, num_physical = placement.physical_ids, placement.num_replicas, placement.num_physical_experts
    used = torch.ones_like(ids[:, 0]) if placement.how == "static" else count
    wrong = (used < 1) | (used > ids.shape[1])
    if wrong.any():
        expert = int(wrong.nonzero()[0])
        raise ValueError(
            f"placement.num_replicas has {int(used[expert])} for expert {expert}; 1 to {ids.shape[1]}, the columns of "
            "placement.physical_ids, are allowed"
        )
    is_used = torch.arange(ids.shape[1], device=ids.device) < used[:, None]
    wrong = ((ids < 0) | (ids >= num_physical)) & is_used
    if wrong.any():
        expert, replica = map(int, wrong.nonzero()[0])
        raise ValueError(
            f"placement.physical_ids has {int(ids[expert, replica])} for replica {replica} of expert {expert}; 0 to "
            f"{num_physical - 1} are allowed"
        )
    experts, replicas = is_used.nonzero(as_tuple=True)
    logical = torch.full((num_physical,), -1, device=ids.device)
    logical[ids[experts, replicas].long()] = experts
    shared = logical[ids[experts, replicas].long()] != experts
    if shared.any():
        physical = int(ids[experts, replicas][shared][0])
        raise ValueError(
            f"placement.physical_ids has {physical} for expert {int(experts[shared][0])} and for expert "
            f"{int(logical[physical])}; a physical expert has the weights of one logical expert"
        )


def check_apart(placement, **tensors):
    """Raise if the counters overlap another tensor of a call; all but the outputs may overlap each other."""
    if placement.load is None:
        return
    tensors |= {"placement.physical_ids": placement.physical_ids, "placement.num_replicas": placement.num_replicas}
    key = tuple(t is not None and (t.data_ptr(), t.nbytes) for t in (placement.load, *tensors.values()))
    if key in _apart:
        return
    if found := overlaps((placement.load,), tuple(tensors.values()), [False] * len(tensors)):
        raise ValueError(f"placement.load overlaps {list(tensors)[found[1]]} in memory: pass other memory")
    remember(_apart, key, True)


def placement_values(placement, num_experts, unused):
    """Return the kernel's arguments for a placement, or those without one; the kernel does not use ``unused``."""
    if placement is None:
        return unused, unused, unused, num_experts, num_experts, 1, 0, 0
    ids, count, num_physical, _, seed, load = placement
    seed = check_int("placement.seed", seed, 0, MAX_SEED)
    if simulator.ENABLED:
        check_values(placement)
    tables = (unused if t is None else address(t) for t in (ids, count, load))
    return *tables, num_experts, num_physical, ids.shape[1], seed & 0xFFFFFFFF, seed >> 32
