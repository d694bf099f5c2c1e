"""Plugin of pytest that runs peers' own tests of routing and alignment: their import names lead to our functions.

Nothing of SGLang, vLLM or FlashInfer needs to be installed, and nothing of theirs is in this repository. A folder holds
copies of their test files; `FILES` says which, and where each comes from. This plugin makes the modules that they
import, with functions of the peers' names, arguments and conventions that call ours. What it does not make can be
imported, but not called. Where a test compares two of a peer's kernels, one is ours and the other our reference in
torch. In the simulator the device "cuda" is the CPU.
"""

import ast
import contextlib
import fnmatch
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import sys
import types
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

import moe_numba  # noqa: I001  before Numba: this import chooses the simulator or the GPU
from moe_numba import moe_align_block_size, simulator
from moe_numba.align import reference as align_reference
from moe_numba.gate import reference as gate_reference

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MOE_NUMBA_PEERS", ROOT / "build" / "peers"))

_SGLANG = "sgl-project/sglang: test/registered/kernels/ops/moe"
_VLLM = "vllm-project/vllm: tests/kernels/moe"
# Test files by their paths in the folder, with the repositories and folders that they come from. The other files hold
# functions that are references of the tests (`function_of`), or are imported by them.
FILES = {
    "sglang/test_fused_topk_deepseek.py": _SGLANG,
    "sglang/test_moe_align_block_size.py": _SGLANG,
    "sglang/test_moe_align_small_numel.py": _SGLANG,
    "sglang/test_moe_align_v2.py": _SGLANG,
    "sglang/test_moe_fused_gate.py": _SGLANG,
    "sglang/test_moe_topk_sigmoid.py": _SGLANG,
    "sglang/test_moe_topk_softmax.py": _SGLANG,
    "sglang/topk.py": "sgl-project/sglang: python/sglang/srt/layers/moe",
    "vllm/test_fused_topk.py": _VLLM,
    "vllm/test_grouped_topk.py": _VLLM,
    "vllm/test_moe_align_block_size.py": _VLLM,
    "vllm/test_topk_softplus_sqrt.py": _VLLM,
    "vllm/grouped_topk_router.py": "vllm-project/vllm: vllm/model_executor/layers/fused_moe/router",
    "flashinfer/test_dsv3_fused_routing.py": "flashinfer-ai/flashinfer: tests/model_optimizations",
    "flashinfer/test_trtllm_gen_routing.py": "flashinfer-ai/flashinfer: tests/moe",
    "flashinfer/trtllm_gen_fused_moe_utils.py": "flashinfer-ai/flashinfer: tests/moe",
    "flashinfer/utils.py": "flashinfer-ai/flashinfer: tests/moe",
}

GATE = "our gate has no"
HAS_PADDING_MASK = "is_padding" in inspect.signature(moe_numba.biased_grouped_topk).parameters
# Tests that must fail: (function, condition on its parameters, what differs). One that passes nevertheless is an error,
# so that the table cannot become stale.
DIFFERENCES = [
    (
        "test_flashinfer_fused_topk_deepseek_*_contract*",
        lambda **_: True,
        "tests which shapes SGLang passes on to FlashInfer; our gate takes all of them itself",
    ),
    (
        "test_topk_softmax_vs_torch",
        lambda moe_softcapping, use_bias, **_: moe_softcapping or use_bias,
        f"{GATE} tanh of the logits, and it adds the bias to scores; this function adds it to logits",
    ),
    (
        "test_topk_softmax_matches_aot",
        lambda topk, renormalize, **_: topk > 1 or not renormalize,
        "two builds of one kernel agree in all bits; ours and our reference only up to rounding",
    ),
    ("test_topk_softmax_full_topk", lambda num_experts: num_experts > 32, f"{GATE} more than 32 columns"),
    (
        "test_batched_moe_align_block_size",
        lambda **_: True,
        "aligns rows that are already grouped by expert; our layers get such rows from dispatch, and need no alignment",
    ),
    (
        "test_sqrtsoftplus_bias_uses_deepseek_v4_routing_method",
        lambda: True,
        "tests which of FlashInfer's routing methods vLLM asks for",
    ),
    ("test_fused_topk_softplus_sqrt_hash", lambda **_: True, f"{GATE} experts from a table by token"),
    (
        "test_fused_topk_softplus_sqrt_padding",
        lambda use_hash, use_padding_mask, **_: use_hash or (use_padding_mask and not HAS_PADDING_MASK),
        f"{GATE} experts from a table by token" + ("" if HAS_PADDING_MASK else ", and no mask of padding"),
    ),
    (
        "test_dsv4_fast_topk_padding",
        lambda: simulator.ENABLED or not HAS_PADDING_MASK,
        "the simulator has no CUDA graphs" if simulator.ENABLED else f"{GATE} mask of padding",
    ),
    (
        "test_custom_routing_methods",
        lambda routing_method, **_: routing_method.name == "TopK",
        f"{GATE} method whose weights are the logits",
    ),
    ("test_invalid_group_args_rejected", lambda: True, "the messages are ours, and we allow more than 4 groups"),
    ("test_unsupported_fused_shared_experts_rejected", lambda **_: True, "with us shared experts go with every method"),
    ("test_invalid_args_rejected", lambda: True, "our blocks may have any number of rows, also 12"),
]

TOKENS = "num_tokens", "seq_length", "max_tokens_per_batch", "m", "M", "n_token", "numel"  # names of a batch's size
MOST_TOKENS = 64 if simulator.ENABLED else 1 << 30
LARGE = {"test_large_batch_smoke"} if simulator.ENABLED else set()
# Cases of a test function; all of them on a GPU.
MOST_CASES = int(os.environ.get("MOE_NUMBA_PEERS_CASES", 12 if simulator.ENABLED else 1 << 30))
HAS_TRITON = importlib.util.find_spec("triton") is not None  # which SGLang's tests have a reference in


class Missing:
    """A name that no test needs which runs here: it can be imported and mentioned, but not called."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} has no stand-in")


def function_of(path, name, **names):
    """Return a function of a peer's file, a test's reference, without the imports of that file.

    It gets logits in float32. Of 16-bit logits it would round the scores to 16 bits and therefore choose other experts
    than kernels, which compute in float32.
    """

    @functools.cache
    def load():
        tree = ast.parse((FOLDER / path).read_text())
        (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        found.decorator_list = []  # torch.compile
        annotations = ast.parse("from __future__ import annotations").body  # whose names are not imported
        namespace = {"torch": torch, **names}
        exec(compile(ast.Module(annotations + [found], []), str(FOLDER / path), "exec"), namespace)
        return namespace[name]

    def call(hidden_states, gating_output, *args, **kwargs):
        return load()(hidden_states, gating_output.float(), *args, **kwargs)

    return call


def gate(*args, **kwargs):
    return moe_numba.biased_grouped_topk(*args, **kwargs)


def copy_into(outputs, results):
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


# SGLang


def moe_fused_gate(scores, bias, topk, scoring_func="sigmoid", route=gate, **options):
    return route(scores, bias, topk, scoring=scoring_func, **options)


def sglang_topk_softmax(weights, ids, logits, renormalize=False, moe_softcapping=0.0, correction_bias=None, route=gate):
    if moe_softcapping or correction_bias is not None:
        raise NotImplementedError("tanh of the logits, and a bias that is added to logits")
    copy_into((weights, ids), route(logits, None, weights.shape[1], renormalize, scoring="softmax"))


def sglang_topk_sigmoid(weights, ids, logits, renormalize=False, correction_bias=None, route=gate, **options):
    copy_into((weights, ids), route(logits, correction_bias, weights.shape[1], renormalize, **options))


class GroupedTopkFlag:
    """SGLang's environment variable that chooses between two kernels: here ours and the reference."""

    route = staticmethod(gate)

    @contextlib.contextmanager
    def override(self, value):
        previous, self.route = self.route, gate if value else gate_reference.biased_grouped_topk
        yield
        self.route = previous


FLAG = GroupedTopkFlag()


def biased_grouped_topk_gpu(hidden_states, *args, **kwargs):
    return FLAG.route(*args, **kwargs)


def sglang_align(
    topk_ids,
    num_buckets,
    block_size,
    sorted_token_ids,
    expert_ids,
    num_tokens_post_pad,
    cumsum_buffer=None,
    pad_sorted_token_ids=False,
    ignore_invalid_expert=False,
    version=None,
    align=moe_align_block_size,
):
    # SGLang's kernels ignore strides, and a test passes some columns of a matrix. They do not write the tails of the
    # outputs, and its buffers may be shorter than ours.
    topk_ids = topk_ids.as_strided((topk_ids.numel(),), (1,))
    slots, experts, total = align(topk_ids, block_size, num_buckets - 1, ignore_invalid_experts=ignore_invalid_expert)
    num_tokens_post_pad.copy_(total)
    used = int(total)
    sorted_token_ids[:used] = slots[:used]
    expert_ids[: used // block_size] = experts[: used // block_size]


def sglang_runner_align(topk_ids, block_size, num_experts, ignore_invalid_expert=False, deterministic=False):
    return moe_align_block_size(topk_ids, block_size, num_experts, ignore_invalid_experts=ignore_invalid_expert)


def sglang_modules():
    reference = gate_reference.biased_grouped_topk
    reference_align = functools.partial(sglang_align, align=align_reference.moe_align_block_size)
    impl = function_of("sglang/topk.py", "biased_grouped_topk_impl", _RENORMALIZE_SUM_EPSILON=1e-20)
    return {
        "sglang.kernels.jit.utils": {"get_ci_test_range": lambda full_range, ci_range: full_range},
        "sglang.test.ci.ci_register": {"register_cuda_ci": lambda **kwargs: None},
        "sglang.kernels.ops.moe": {"moe_align_block_size": reference_align},
        "sglang.kernels.ops.moe.moe_align": {
            "moe_align_block_size": sglang_align,
            "moe_align_block_size_out": sglang_align,
            "V2_MAX_BUCKETS": 1024,
            "V2_SMALL_NUMEL_LIMIT": 64,
        },
        "sglang.kernels.ops.moe.moe_align_small_numel": {
            "SMALL_NUMEL_LIMIT": 64,
            "moe_align_small_numel": sglang_align,
        },
        "sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size": {
            "moe_align_block_size": sglang_runner_align
        },
        "sglang.kernels.ops.moe.moe_fused_gate": {
            "moe_fused_gate": moe_fused_gate,
            "moe_fused_gate_jit": functools.partial(moe_fused_gate, route=reference),
        },
        "sglang.kernels.ops.moe.moe_topk_softmax": {"topk_softmax": sglang_topk_softmax},
        "sglang.kernels.ops.moe.moe_topk_sigmoid": {"topk_sigmoid": sglang_topk_sigmoid},
        "sglang.srt.environ": {"envs": types.SimpleNamespace(SGLANG_OPT_USE_JIT_KERNEL_GROUPED_TOPK=FLAG)},
        "sglang.srt.layers.moe.topk": {
            "biased_grouped_topk_gpu": biased_grouped_topk_gpu,
            "biased_grouped_topk_impl": impl,
        },
        "sglang.srt.utils": {"get_device": lambda: "cuda"},
        "sgl_kernel": {
            "moe_align_block_size": reference_align,
            "topk_softmax": functools.partial(sglang_topk_softmax, route=reference),
            "topk_sigmoid": functools.partial(sglang_topk_sigmoid, route=reference),
        },
    }


# vLLM

LAYERS = "vllm.model_executor.layers.fused_moe"


def vllm_align(topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=False, ignore_invalid_experts=False):
    # vLLM drops invalid ids always, and experts of other ranks only on request.
    ignore = ignore_invalid_experts or expert_map is None
    return moe_align_block_size(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore)


def fused_topk(hidden_states, gating_output, topk, renormalize, scoring_func="softmax"):
    return *gate(gating_output, None, topk, renormalize, scoring=scoring_func), None


def fused_topk_bias(
    hidden_states,
    gating_output,
    scoring_func,
    e_score_correction_bias,
    topk,
    renormalize,
    routed_scaling_factor=1.0,
    input_tokens=None,
    hash_indices_table=None,
    is_padding=None,
):
    if hash_indices_table is not None:
        raise NotImplementedError("experts from a table")
    if is_padding is None:  # which tests replace
        is_padding = importlib.import_module(f"{LAYERS}.router.fused_topk_bias_router")._get_padding_mask(hidden_states)
    padding = {} if is_padding is None else {"is_padding": is_padding}
    return gate(
        gating_output,
        e_score_correction_bias,
        topk,
        renormalize,
        routed_scaling_factor=routed_scaling_factor,
        apply_routed_scaling_factor_on_output=True,
        scoring=scoring_func,
        **padding,
    )


def topk_hash_softplus_sqrt(weights, ids, token_expert_indices, logits, **options):
    copy_into((weights, ids), fused_topk_bias(None, logits, "sqrtsoftplus", topk=ids.shape[1], **options))


def dsv4_topk(logits, bias, indices_type, routed_scaling_factor, is_padding=None):
    options = (6, True, routed_scaling_factor, None, None, is_padding)
    weights, ids = fused_topk_bias(None, logits, "sqrtsoftplus", bias, *options)
    return weights, ids.to(indices_type)


def fused_grouped_topk(
    hidden_states,
    gating_output,
    topk,
    renormalize,
    e_score_correction_bias,
    num_expert_group=0,
    topk_group=0,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
):
    groups = {"num_expert_group": num_expert_group, "topk_group": topk_group}
    scale = {"routed_scaling_factor": routed_scaling_factor, "apply_routed_scaling_factor_on_output": True}
    return gate(gating_output, e_score_correction_bias, topk, renormalize, scoring=scoring_func, **groups, **scale)


def vllm_modules():
    envs = types.SimpleNamespace(VLLM_USE_FUSED_MOE_GROUPED_TOPK=False, VLLM_BATCH_INVARIANT=True)
    grouped_topk = function_of("vllm/grouped_topk_router.py", "grouped_topk", envs=envs)

    class GroupedTopk:
        """vLLM's implementation in torch."""

        def __init__(self, **options):
            self.options = options
            self._forward_method = self.forward_cuda

        def forward_cuda(self, **tensors):
            return grouped_topk(**tensors, **self.options)

        __call__ = forward_cuda

    config = types.SimpleNamespace(cache_clear=lambda: None)
    platform = types.SimpleNamespace(is_cuda=lambda: True, is_cuda_alike=lambda: True, is_rocm=lambda: False)
    return {
        "vllm.envs": vars(envs),
        "vllm.config": {
            "CompilationConfig": lambda **kwargs: None,
            "VllmConfig": lambda **kwargs: None,
            "get_cached_compilation_config": config,
            "set_current_vllm_config": lambda config: contextlib.nullcontext(),
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y, "cdiv": lambda x, y: -(-x // y)},
        "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
        "vllm._custom_ops": {"topk_hash_softplus_sqrt": topk_hash_softplus_sqrt},
        f"{LAYERS}.moe_align_block_size": {"moe_align_block_size": vllm_align},
        f"{LAYERS}.router.fused_topk_router": {"fused_topk": fused_topk},
        f"{LAYERS}.router.fused_topk_bias_router": {
            "fused_topk_bias": fused_topk_bias,
            "_get_padding_mask": lambda hidden_states: None,
        },
        f"{LAYERS}.router.dsv4_topk": {"dsv4_topk": dsv4_topk},
        f"{LAYERS}.router.grouped_topk_router": {"GroupedTopk": GroupedTopk, "fused_grouped_topk": fused_grouped_topk},
    }


# FlashInfer


def fused_topk_deepseek(
    scores,
    bias,
    n_group,
    topk_group,
    topk,
    routed_scaling_factor,
    topk_values,
    topk_indices,
    launch_with_pdl=True,
    routing_replay_out=None,
    backend="default",
):
    weights, ids = gate(scores, bias, topk, True, n_group, topk_group, 0, routed_scaling_factor, True)
    copy_into((topk_values, topk_indices), (weights, ids))
    if routing_replay_out is not None:
        routing_replay_out.copy_(ids)


METHODS = (
    "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid TopKSigmoid Unspecified"
)
RoutingMethodType = IntEnum("RoutingMethodType", METHODS.split(), start=0)
# Scores and renormalisation of each method that our gate has
_ROUTINGS = {
    "Default": ("softmax", False),
    "Renormalize": ("softmax", True),
    "RenormalizeNaive": ("softmax", True),
    "DeepSeekV3": ("sigmoid", True),
    "MiniMax2": ("sigmoid", True),
    "SigmoidRenorm": ("sigmoid", True),
    "Sigmoid": ("sigmoid", False),
    "TopKSigmoid": ("sigmoid", False),
    "Llama4": ("sigmoid", False),
}


class RoutingResult(NamedTuple):
    """What FlashInfer's routing returns: experts and weights of tokens, and where the alignment puts them."""

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    total_num_padded_tokens: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    permuted_idx_to_token_idx: torch.Tensor


def trtllm_gen_routing(
    logits,
    bias,
    method,
    top_k,
    n_group=0,
    topk_group=0,
    routed_scaling_factor=1.0,
    tile_tokens_dim=8,
    num_fused_shared_experts=0,
    local_expert_offset=0,
    local_num_experts=None,
):
    if method.name not in _ROUTINGS:
        raise ValueError(f"the gate has no routing method {method.name}")
    scoring, renormalize = _ROUTINGS[method.name]
    num_experts, groups = logits.shape[1], (max(n_group, 1), max(topk_group, 1))
    scale = num_fused_shared_experts, routed_scaling_factor, True
    weights, ids = gate(logits, bias, top_k, renormalize, *groups, *scale, scoring=scoring)
    experts = torch.arange(num_experts, dtype=torch.int32, device=ids.device) - local_expert_offset
    is_local = (experts >= 0) & (experts < (local_num_experts or num_experts))
    expert_map = experts.where(is_local, torch.full_like(experts, -1))
    slots, _, total = moe_align_block_size(ids, tile_tokens_dim, num_experts, expert_map, ignore_invalid_experts=True)
    tokens = torch.where(slots < ids.numel(), slots // ids.shape[1], -1)
    (positions,) = torch.where(slots < ids.numel())
    permuted = torch.full_like(ids, -1)
    permuted.view(-1)[slots[positions].long()] = positions.to(torch.int32)
    ids = ids.where(permuted >= 0, torch.full_like(ids, -1))
    return RoutingResult(ids, weights.to(torch.bfloat16), total, permuted, tokens)


def flashinfer_modules():
    return {
        "flashinfer": {"RoutingMethodType": RoutingMethodType},
        "flashinfer.dsv3_ops": {"fused_topk_deepseek": fused_topk_deepseek},
        "flashinfer.fused_moe": {"trtllm_gen_routing": trtllm_gen_routing},
        "flashinfer.tllm_enums": {"RoutingMethodType": RoutingMethodType},
        "flashinfer.utils": {"get_compute_capability": lambda device: (10, 0)},  # of the GPUs that it supports
        "tests": {},
        "tests.moe": {"__path__": [str(FOLDER / "flashinfer")]},
    }


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules of a table, and others of the same packages without contents."""

    def __init__(self, modules):
        self.modules = modules
        self.packages = {name.partition(".")[0] for name in modules}

    def find_spec(self, name, path=None, target=None):
        if name.startswith("tests.") and name not in self.modules:
            return None  # a peer's file in the folder
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        vars(module).update(self.modules.get(module.__name__, {}))
        module.__getattr__ = functools.partial(self.missing, module.__name__)

    def missing(self, module, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{module}.{name}")


class CpuForCuda(TorchFunctionMode):
    """Lets torch's functions use the CPU where they are told to use "cuda"."""

    @staticmethod
    def device(value):
        is_cuda = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
        return "cpu" if is_cuda else value

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: self.device(value) for name, value in (kwargs or {}).items()}
        return function(*map(self.device, args), **kwargs)


class CpuGenerator(torch.Generator):
    """A generator on the CPU, also where "cuda" is asked for: modes do not see constructors."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, CpuForCuda.device(device))


def pytest_configure(config):
    """Install the stand-ins, for the whole run."""
    modules = sglang_modules() | vllm_modules() | flashinfer_modules()
    if not HAS_TRITON:
        modules["triton"] = {"jit": lambda function: function, "cdiv": lambda x, y: -(-x // y)}
    sys.meta_path.insert(0, StandIns(modules))
    if simulator.ENABLED:
        torch.Generator = CpuGenerator
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.synchronize = lambda device=None: None
        CpuForCuda().__enter__()


def triton_reference(topk_ids, num_buckets, block_size, sorted_token_ids, expert_ids, num_tokens_post_pad):
    align = align_reference.moe_align_block_size
    outputs = sorted_token_ids, expert_ids, num_tokens_post_pad
    sglang_align(topk_ids, num_buckets, block_size, *outputs, align=align)


def pytest_collection_modifyitems(config, items):
    """Choose the cases that run, and mark those that must fail."""
    functions, chosen = {}, set()
    for item in items:
        if not HAS_TRITON and "moe_align_block_size_triton" in vars(item.module):
            item.module.moe_align_block_size_triton = triton_reference
        if max((n for name, n in params_of(item).items() if name in TOKENS), default=0) <= MOST_TOKENS:
            functions.setdefault((item.path, item.originalname), []).append(item)
    for (_, function), cases in functions.items():
        if function not in LARGE:
            chosen.update(random.Random(0).sample(cases, MOST_CASES) if len(cases) > MOST_CASES else cases)
    for item in chosen:
        for pattern, condition, reason in DIFFERENCES:
            if fnmatch.fnmatch(item.originalname, pattern) and condition(**params_of(item)):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def params_of(item):
    """Return the parameters of a test."""
    return item.callspec.params if hasattr(item, "callspec") else {}
