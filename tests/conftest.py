"""Chooses GPU or simulator before Numba is imported, and deselects tests that need more GPUs than there are."""

import os

# Each worker of pytest-xdist has one core. Threads of torch that wait for work would spin on those of the others, which
# takes most of the time of the references; processes that tests start inherit the setting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import moe_numba  # noqa: F401, I001  before Numba: this import chooses the simulator or the GPU

import contextlib
import functools
import gc
import sys
from unittest import mock

import pytest
from helpers.measure_costs import CostWriter
from helpers.suite import SHARDS, Suite, parse_shard, read_costs, shard_of_commit

from moe_numba import simulator
from moe_numba.runtime import compilers, sass
from moe_numba.runtime.device import gpu_like, gpu_of

# Processes that tests start import this clone's package, and find what this process finds.
_PATHS = [os.path.dirname(os.path.dirname(__file__)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(_PATHS)))

# Tests of these modules detect data races, and so do those that are the cheapest to find a planted bug; with
# MOE_NUMBA_RACES=1 all tests do. Kernels that the vector engine can judge take the same time; asynchronous copies and
# several ranks need threads, which takes up to twice the time.
RACES = {
    "test_align",
    "test_dependent_launch",
    "test_dispatch_layout",
    "test_fp8_cast",
    "test_fuse_routing",
    "test_gate",
    "test_gate_align",
    "test_group_by_expert",
    "test_per_token_quant",
    "test_permute",
    "test_weighted_sum",
}
# The oldest compute capability whose instructions a module's kernels use; on an older GPU its tests are deselected.
# For (9, 0) it is the only one, since wgmma and setmaxnreg exist on no other.
CAPABILITIES = {
    (8, 0): {
        "test_cp_async",
        "test_determinism",
        "test_examples",
        "test_expert_parallel_moe",
        "test_fused_moe",
        "test_grouped_gemm",
        "test_grouped_gemm_mma",
        "test_mma",
        "test_moe_layer",
        "test_moe_module",
        "test_transformers",
    },
    (9, 0): {
        "test_cluster",
        "test_dependent_launch",
        "test_grouped_gemm_kernel",
        "test_grouped_gemm_w4",
        "test_grouped_gemm_w4_api",
        "test_grouped_gemm_w4_packing",
        "test_hopper_conformance",
        "test_hopper_conformance_wgmma",
        "test_hpc_ops",
        "test_k_grouped_gemm",
        "test_k_grouped_gemm_kernel",
        "test_mbarrier",
        "test_one_kernel_by_expert",
        "test_tma",
        "test_wgmma",
    },
}


def with_default_compiler(function):
    """Return a function that does the same with the default compiler, in the processes that it starts."""

    @functools.wraps(function)
    def call(*args, **options):
        with mock.patch.dict(os.environ, {compilers.VARIABLE: compilers.DEFAULT}):
            return function(*args, **options)

    return call


# The limits of registers and instructions that tests know are numba-cuda's; docs/compilers.md has the other compiler's.
sass.compile_apart = with_default_compiler(sass.compile_apart)


def pytest_addoption(parser):
    """Add the options that choose tests; see ``helpers/suite.py``."""
    parser.addoption("--suite", choices=("fast", "commit", "all"), default="all", help="which tests; default: all")
    parser.addoption("--shard", metavar="N/M", help="with --suite commit: the shard of the tests that take long")
    parser.addoption("--cheapest-first", action="store_true", help="run tests in the order of their times")
    parser.addoption("--write-costs", action="store_true", help="write the tests' times to tests/costs.json")


def pytest_configure(config):
    """Choose the suite; the processes of pytest-xdist get the options of the first one."""
    if config.option.shard is None:
        config.option.shard = f"{shard_of_commit()}/{SHARDS}"
    try:
        shard = parse_shard(config.option.shard)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.suite = Suite(read_costs(), config.option.suite, shard)
    if config.option.write_costs:
        config.pluginmanager.register(CostWriter())


def pytest_report_header(config):
    """Say which tests this run has, so that it can be repeated."""
    shard = f" --shard {config.option.shard}" if config.option.suite == "commit" else ""
    return f"tests: --suite {config.option.suite}{shard}"


def gpus():
    """Return the number of GPUs that tests may use: 0 in the simulator."""
    if simulator.ENABLED:
        return 0
    import torch

    return torch.cuda.device_count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect tests that need more or newer GPUs, or that the suite leaves out: a skip looks like a problem."""
    found = gpus()
    gpu = gpu_of(0) if found else gpu_like((9, 0))
    too_new = set().union(
        *(modules for needed, modules in CAPABILITIES.items() if gpu.capability < needed),
        CAPABILITIES[9, 0] if not gpu.has_wgmma else set(),
    )

    def available(item):
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        return needed <= found and item.module.__name__ not in too_new

    suite, nodeids = config.suite, [item.nodeid for item in items if available(item)]
    if suite.name == "commit" and config.args == config.getini("testpaths") and (missing := suite.missing(nodeids)):
        raise pytest.UsageError(
            f"make mutants ARGS=--write must choose others than {', '.join(missing)}: not collected"
        )
    chosen = suite.choose(nodeids)
    if suite.name == "commit":
        chosen |= {item.nodeid for item in items if item.get_closest_marker("each_commit")}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    if config.option.cheapest_first:
        items.sort(key=lambda item: suite.seconds(item.nodeid))
    elif "PYTEST_XDIST_WORKER" in os.environ:  # begun last, a long test would keep one worker while others are idle
        longest = {}
        for item in items:
            longest[item.path] = max(longest.get(item.path, 0.0), suite.seconds(item.nodeid))
        items.sort(key=lambda item: -longest[item.path])  # which keeps the tests of a module together


def pytest_collection_finish():
    """Leave the objects that imports and the collection have made out of garbage collections, to save their time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """For ``-n auto``: one test at a time on a GPU, so that tests do not compete for memory."""
    return len(os.sched_getaffinity(0)) if simulator.ENABLED else 0


@pytest.fixture(autouse=True)
def no_plans():
    """Forget the launch plans of earlier tests, so that a replaced kernel or limit takes effect."""
    for name, module in list(sys.modules.items()):
        if name.startswith("moe_numba."):
            vars(module).get("_plans", {}).clear()


@pytest.fixture(autouse=True)
def data_races(request):
    """Report data races in the tests that `RACES` describes, but not in tests marked ``intended_races(reason)``."""
    if request.node.get_closest_marker("intended_races"):
        context = simulator.races(False)
    elif request.module.__name__ in RACES or request.node.nodeid in request.config.suite.finders:
        context = simulator.races()
    else:
        context = contextlib.nullcontext()
    with context:
        yield


@pytest.fixture(autouse=True)
def threads(request):
    """Run the kernels of tests marked ``threads(reason)`` with one greenlet per thread."""
    marked = request.node.get_closest_marker("threads")
    with simulator.settings.settings.override(engine="threads") if marked else contextlib.nullcontext():
        yield


@pytest.fixture
def device():
    """Return the device of tensors: "cuda", or "cpu" in the simulator."""
    return "cpu" if simulator.ENABLED else "cuda"


@pytest.fixture(params=[None, False], ids=["default path", "without TMA"])
def uses_tma(request, monkeypatch):
    """Let each ``Buffer`` copy rows as its GPUs can, and without TMA."""
    from moe_numba.expert_parallel import Buffer

    monkeypatch.setattr(Buffer, "_uses_tma", request.param)
    return request.param
