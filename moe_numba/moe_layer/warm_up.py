"""Compilation of all kernels that a module or a model needs, before its first call."""

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba import simulator
from moe_numba.moe_layer.module import Experts, MoELayer
from moe_numba.moe_layer.weights import shape_of
from moe_numba.runtime import cubin_cache
from moe_numba.runtime.compile_calls import compile_calls
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.torch_op import NAMESPACE, public_function
from moe_numba.runtime.validate import check_dtype, check_int

# Which kernels a call needs depends on the rows per expert, in steps that are larger than those of these sizes.
_MAX_TOKENS = 1 << 14
_COMPILE_S = 600.0  # that ranks wait for the one that compiles
TOKENS = (*range(1, 17), *(round(16 * 1.08**i) for i in range(1, 91)), _MAX_TOKENS)


def warm_up(
    module: torch.nn.Module,
    tokens: Iterable[int] | None = None,
    *,
    topk: int | None = None,
    topk_ids_dtype: torch.dtype = torch.int32,
    processes: int | None = None,
    progress: bool = True,
) -> int:
    """Compile all kernels that a module needs, in parallel processes, so that no call waits for the compiler.

    Machine code is cached on disk (``MOE_NUMBA_CACHE``): on a machine that has compiled the kernels before, the call
    takes as long as the start of the processes. Without it each call with a new number of tokens may wait for seconds.

    If experts are distributed over ranks, all ranks must call it with the same arguments. One rank of a node compiles
    while the others wait, and find the machine code in the cache. Then each rank calls the layers with one token, which
    compiles the kernels of the exchange, allocates its memory and loads all kernels of such a call.

    Parameters
    ----------
    module : Experts, MoELayer, ExpertParallelMoE, or a model of transformers
        On the GPU. A model's experts and routers are those that its implementation of experts,
        :func:`moe_numba.integrations.transformers.distribute_experts` and
        :func:`moe_numba.integrations.transformers.fuse_routers` have chosen: call them before.
    tokens : iterable of int, optional
        Numbers of tokens of a call, of one rank. By default all up to 16384. A layer that exchanges tokens through
        rings without ``num_worst_tokens`` may receive any number of rows up to that of all ranks' tokens: the kernels
        for all of them are compiled.
    topk : int, optional
        Experts per token; required for `Experts` and `ExpertParallelMoE`, which do not know it.
    topk_ids_dtype : torch.dtype
        Of ``topk_ids`` of `Experts` and `ExpertParallelMoE`: int32, as the gate returns them, or int64.
    processes : int, optional
        By default one per core, at most 32.
    progress : bool
        Show a progress bar.

    Returns
    -------
    int
        Number of kernels, also those that the cache had; 0 in the simulator, and if the cache is off. Kernels of
        the exchange between ranks do not count.

    Raises
    ------
    TypeError
        If ``module`` is none of these, or an option has another type.
    ValueError
        If a number of tokens or ``topk`` is less than 1, ``topk`` is missing, or the model has no experts that this
        package computes.
    RuntimeError
        If the rank that compiles for this one has failed.

    Examples
    --------
    >>> layer = moe_numba.moe_layer.MoELayer(num_experts=4, hidden=64, intermediate=64, topk=2)
    >>> _ = moe_numba.warm_up(layer, tokens=[1, 64], progress=False)  # nothing to compile in the simulator
    """
    processes = None if processes is None else check_int("processes", processes, 1)
    check_dtype("topk_ids_dtype", topk_ids_dtype, (torch.int32, torch.int64))
    sizes = None if tokens is None else tuple(check_int(f"tokens[{i}]", n, 1) for i, n in enumerate(tokens))
    parts = partial(_parts, module, topk=topk, topk_ids_dtype=topk_ids_dtype)
    total = warm_up_parts(parts, sizes, distributed_layers(module), processes=processes, progress=progress)
    if total is None:
        raise ValueError(f"module is a {type(module).__name__} without experts that moe_numba computes")
    return total


Part = tuple[Callable, tuple]  # a module, or a function, and the arguments of a call


def warm_up_parts(
    parts: Callable[[int], Iterable[Part]],
    sizes: Iterable[int] | None = None,
    layers: Iterable[Any] = (),
    *,
    processes: int | None = None,
    progress: bool = True,
) -> int | None:
    """Compile all kernels of some calls, as `warm_up` does; return their number, or None if the calls launch nothing.

    Parameters
    ----------
    parts : callable
        ``parts(tokens)`` yields the calls for a number of tokens; of those that are made its tensors are fake.
    sizes : iterable of int, optional
        Numbers of tokens, by default `TOKENS`.
    layers : iterable of ExpertParallelMoE
        The distributed layers among the parts.
    processes, progress
        As for `warm_up`.
    """
    layers, sizes = list(layers), list(TOKENS if sizes is None else sizes)
    compiles = not simulator.ENABLED and cubin_cache.folder() is not None
    if not compiles:
        sizes = sizes[:1]  # for the checks
    elif received := [layer.buffer.group_size for layer in layers if layer.receives_any_number]:
        most = max(received) * max(sizes, default=0)
        sizes = sorted({*sizes, *(n for n in TOKENS if n <= most)})
    for n in sizes[:1]:
        next(iter(parts(n)), None)  # checks the arguments, before processes start
    found: list[Call] = []

    def traced():
        for n in dict.fromkeys([*sizes[::-8], *sizes]):  # some of all sizes first: what compiles long begins early
            made = _calls_of(parts(n))
            found.extend(made)
            yield from made

    if not layers and compiles and sizes:  # processes start while calls are traced
        total = _compile(traced(), processes, progress)
        return total if found else None
    with _uses_of(layers) as uses:
        calls = tuple(dict.fromkeys(traced()))
    if sizes and not calls:
        return None
    if not compiles or not calls:
        return 0
    total = _compile_on_one_rank(layers[0].buffer.transport, partial(_compile, calls, processes), progress)
    for layer, topk, ids_dtype in uses:
        _call_with_one_token(layer, topk, ids_dtype)
    return total


def distributed_layers(module: torch.nn.Module) -> list:
    """Return the `ExpertParallelMoE` that are, or belong to, modules of ``module``; also those in tuples."""
    if not isinstance(module, torch.nn.Module):
        return []
    from moe_numba.moe_layer.expert_parallel.layer import ExpertParallelMoE

    found: dict[Any, None] = {}
    for part in module.modules():
        values = (value for value in vars(part).values() if isinstance(value, tuple))
        for value in (part, *itertools.chain(*values)):
            if isinstance(value, ExpertParallelMoE):
                found[value] = None
    return list(found)


def _compile(calls, processes, progress):
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    total = 0
    columns = *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("compiling kernels", total=None)
        for done, total in compile_calls(calls, processes=processes, prepare=_import_functions):
            bar.update(task, completed=done, total=total)
    return total


def _compile_on_one_rank(transport, compile_all, progress):
    """Compile on the first of the ranks that have the same GPU and cache, while the others wait; return the number."""
    own = socket.gethostname(), str(cubin_cache.folder()), gpu_of(transport.device)
    first, error = transport.gather(own).index(own), None
    result: int | str = ""
    if transport.rank == first:
        try:
            result = compile_all(progress)
        except Exception as raised:  # after the other ranks, which wait, have been told
            error, result = raised, f"{type(raised).__name__}: {raised}"
    transport.rendezvous("warm_up", _COMPILE_S)
    total = transport.gather(result)[first]
    if error:
        raise error
    if isinstance(total, str):
        raise RuntimeError(f"rank {first}, which compiles for rank {transport.rank}, has raised {total}")
    return total


@contextlib.contextmanager
def _uses_of(layers):
    """Yield a dict whose keys will be the calls of distributed layers: (layer, topk, dtype of topk_ids)."""
    uses: dict[tuple, None] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, given: uses.update({(layer, given[2].shape[1], given[2].dtype): None})
        )
        for layer in layers
    ]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _call_with_one_token(layer, topk, ids_dtype):
    """Call a distributed layer, on all ranks, with a token for this rank's first expert."""
    transport, hidden = (
        layer.buffer.transport,
        shape_of(layer.experts.w13, layer.experts.w2, layer.experts.format).hidden,
    )
    x = torch.zeros(1, hidden, dtype=torch.bfloat16, device=transport.device)
    weights = torch.zeros(1, topk, device=transport.device)
    ids = torch.full((1, topk), transport.rank * len(layer.experts.w13), dtype=ids_dtype, device=transport.device)
    layer(x, weights, ids)
    if layer.shared_experts is None:
        layer(x, weights, ids, x)  # which may be another kernel of combine
    layer.buffer.check(synchronize=True)


class Empty(NamedTuple):
    """A tensor whose values do not matter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call of a public function, which can be pickled, compared and made on CPU tensors."""

    function: str
    arguments: tuple[tuple[str, Any], ...]

    def __call__(self) -> None:
        """Make the call with tensors whose memory is reserved but not touched."""
        _import_functions()
        given = {
            name: torch.empty_strided(*value[:2], dtype=value.dtype) if isinstance(value, Empty) else value
            for name, value in self.arguments
        }
        public_function(self.function)(**given)


def _import_functions():
    """Import all functions that layers call, which a process that compiles has not done."""
    from moe_numba.moe_layer.expert_parallel import layer  # noqa: F401


class _Calls(TorchDispatchMode):
    """Collects the calls of this package's ops, in FakeTensorMode."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == NAMESPACE:
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args)) | kwargs  # noqa: B905
            arguments = tuple((name, _described(value)) for name, value in given.items())
            self.found.append(Call(func._schema.name.partition("::")[2], arguments))
        return func(*args, **kwargs)


def _described(value):
    if isinstance(value, torch.Tensor):
        return Empty(tuple(value.shape), tuple(value.stride()), value.dtype)
    return value


def calls_of(
    module: torch.nn.Module, tokens: int, topk: int | None = None, topk_ids_dtype: torch.dtype = torch.int32
) -> list[Call]:
    """Return the calls of public functions that a module makes for a number of tokens; nothing is computed."""
    return _calls_of(_parts(module, tokens, topk, topk_ids_dtype))


def _calls_of(parts):
    calls = _Calls()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), calls:
        for part, inputs in parts:
            part(*inputs)
    return calls.found


def _parts(module, tokens, topk, topk_ids_dtype) -> Iterator[Part]:
    """Yield the modules to call, and their inputs. Of modules with the same sizes one is enough."""
    from moe_numba.moe_layer.expert_parallel.layer import ExpertParallelMoE

    if not isinstance(module, torch.nn.Module):
        allowed = "Experts, MoELayer, ExpertParallelMoE or a model of transformers"
        raise TypeError(f"module is {type(module).__name__}; it must be {allowed}")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device=device)
    if isinstance(module, MoELayer):
        yield module, (make(tokens, module.router_weight.shape[1]),)
    elif isinstance(module, Experts | ExpertParallelMoE):
        if topk is None:
            raise ValueError(f"topk is None; it is required for {type(module).__name__}")
        experts = module.experts if isinstance(module, ExpertParallelMoE) else module
        topk, hidden = check_int("topk", topk, 1), shape_of(experts.w13, experts.w2, experts.format).hidden
        routing = make(tokens, topk, dtype=torch.float32), make(tokens, topk, dtype=topk_ids_dtype)
        yield module, (make(tokens, hidden), *routing)
    else:
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "get_text_config"):
            return
        hidden, seen = config.get_text_config().hidden_size, set()
        for block in module.modules():
            if not hasattr(block, "experts") or not isinstance(block.experts, torch.nn.Module):
                continue
            sizes = type(block), tuple((n, t.shape, t.stride(), t.dtype) for n, t in block.named_parameters())
            if sizes not in seen:
                seen.add(sizes)
                yield block, (make(1, tokens, hidden),)
