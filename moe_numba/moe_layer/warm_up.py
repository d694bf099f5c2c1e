"""Compilation of all kernels that a module or a model needs, before its first call."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba import simulator
from moe_numba.moe_layer.module import Experts, MoELayer
from moe_numba.moe_layer.weights import shape_of
from moe_numba.runtime import cubin_cache
from moe_numba.runtime.compile_calls import compile_calls
from moe_numba.runtime.torch_op import NAMESPACE, public_function
from moe_numba.runtime.validate import check_int

# Which kernels a call needs depends on the rows per expert, in steps that are larger than those of these sizes.
_MAX_TOKENS = 1 << 14
TOKENS = (*range(1, 17), *(round(16 * 1.08**i) for i in range(1, 91)), _MAX_TOKENS)


def warm_up(
    module: torch.nn.Module,
    tokens: Iterable[int] | None = None,
    *,
    topk: int | None = None,
    processes: int | None = None,
    progress: bool = True,
) -> int:
    """Compile all kernels that a module needs, in parallel processes, so that no call waits for the compiler.

    Machine code is cached on disk (``MOE_NUMBA_CACHE``): on a machine that has compiled the kernels before, the call
    takes as long as the start of the processes. Without it each call with a new number of tokens may wait for seconds.

    Parameters
    ----------
    module : Experts, MoELayer, or a model of transformers
        On the GPU. A model's experts and routers are those that its implementation of experts and
        :func:`moe_numba.integrations.transformers.fuse_routers` have chosen: call them before.
    tokens : iterable of int, optional
        Numbers of tokens of a call. By default all up to 16384.
    topk : int, optional
        Experts per token; required for `Experts`, which do not know it.
    processes : int, optional
        By default one per core, at most 32.
    progress : bool
        Show a progress bar.

    Returns
    -------
    int
        Number of kernels, also those that the cache had; 0 in the simulator, and if the cache is off.

    Raises
    ------
    TypeError
        If ``module`` is none of these, or an option has another type.
    ValueError
        If a number of tokens or ``topk`` is less than 1, ``topk`` is missing, or the model has no experts that this
        package computes.

    Examples
    --------
    >>> model.set_experts_implementation("moe_numba")
    >>> moe_numba.warm_up(model)
    """
    sizes = TOKENS if tokens is None else tuple(check_int(f"tokens[{i}]", n, 1) for i, n in enumerate(tokens))
    processes = None if processes is None else check_int("processes", processes, 1)
    compiles = not simulator.ENABLED and cubin_cache.folder() is not None
    if not compiles:
        sizes = sizes[:1]  # for the checks
    calls = list(dict.fromkeys(call for n in sizes for call in calls_of(module, n, topk)))
    if sizes and not calls:
        raise ValueError(f"module is a {type(module).__name__} without experts that moe_numba computes")
    if not compiles or not calls:
        return 0
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    total = 0
    columns = *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("compiling kernels", total=None)
        for done, total in compile_calls(calls, processes=processes):
            bar.update(task, completed=done, total=total)
    return total


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
        given = {
            name: torch.empty_strided(*value[:2], dtype=value.dtype) if isinstance(value, Empty) else value
            for name, value in self.arguments
        }
        public_function(self.function)(**given)


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


def calls_of(module: torch.nn.Module, tokens: int, topk: int | None = None) -> list[Call]:
    """Return the calls of public functions that a module makes for a number of tokens; nothing is computed."""
    calls = _Calls()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), calls:
        for part, inputs in _parts(module, tokens, topk):
            part(*inputs)
    return calls.found


def _parts(module, tokens, topk) -> Iterator[tuple[torch.nn.Module, tuple]]:
    """Yield the modules to call, and their inputs. Of modules with the same sizes one is enough."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}; it must be Experts, MoELayer or a model of transformers")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device=device)
    if isinstance(module, MoELayer):
        yield module, (make(tokens, module.router_weight.shape[1]),)
    elif isinstance(module, Experts):
        if topk is None:
            raise ValueError("topk is None; it is required for Experts")
        topk, hidden = check_int("topk", topk, 1), shape_of(module.w13, module.w2, module.format).hidden
        routing = make(tokens, topk, dtype=torch.float32), make(tokens, topk, dtype=torch.int32)
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
