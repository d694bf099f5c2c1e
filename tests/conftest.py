"""Chooses GPU or simulator before Numba is imported, and deselects tests that need more GPUs than there are."""

import os

# Each worker of pytest-xdist has one core. Threads of torch that wait for work would spin on those of the others, which
# takes most of the time of the references; processes that tests start inherit the setting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import moe_numba  # noqa: F401, I001  before Numba: this import chooses the simulator or the GPU

import contextlib
import gc
import sys

import pytest
from helpers.thirds import THIRD, chosen_third, take_sixth

from moe_numba import simulator
from moe_numba.runtime.device import gpu_like, gpu_of

# Left out by ``make test-fast``: whole modules, and single tests, that take more than about 8 s of one core.
SLOW_MODULES = {
    "test_buffer_compile",
    "test_buffer_faults",
    "test_channels",
    "test_combine_notebook_compile",
    "test_deepep_port_compile",
    "test_dispatch_direct",
    "test_grouped_gemm_compile",
    "test_grouped_gemm_kernel",
    "test_grouped_gemm_mma",
    "test_grouped_gemm_mma_compile",
    "test_hpc_ops",
    "test_k_grouped_gemm_kernel",
    "test_low_latency_compile",
    "test_torch_layer",
}
SLOW_TESTS = {
    "test_a_kernel_that_cannot_be_compiled_says_why",
    "test_alignment_uses_no_local_or_generic_memory",
    "test_deepseek_v3",
    "test_dispatch_and_combine",
    "test_doctor_on_this_machine",
    "test_every_public_function_is_measured_with_out_and_prepared",
    "test_functions_take_the_paths_of_the_table",
    "test_gate_notebook_runs_with_other_sizes",
    "test_gather_indices_match_gathered_rows",
    "test_kernels_for_an_older_gpu_are_measured_in_a_process",
    "test_notebooks_go_on_after_steps_that_a_t4_cannot_run",
    "test_registers_of_a_kernel_with_setmaxnreg",
    "test_runs_in_the_simulator",
    "test_static_properties_from_the_compiler",
    "test_the_first_seed_that_fails_is_named",
    "test_the_machine_code",
    "test_tuner_tries_configs_that_fit",
    "test_with_lto_both_interfaces_compile_alike",
    "test_wrong_kernels_are_rejected",
}

# Tests of these modules detect data races, and so do the tests that look for planted bugs; with MOE_NUMBA_RACES=1 all
# tests do. Kernels that the vector engine can judge take the same time; asynchronous copies and several ranks need
# threads, which takes up to twice the time.
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
        "test_tma",
        "test_wgmma",
    },
}

# Modules that only compile kernels of one topic: a commit's run takes a sixth of them, and other tests run the kernels.
COMPILE_CHECKS = [
    "test_buffer_compile",
    "test_align_notebook_compile",
    "test_grouped_gemm_mma_compile",
    "test_low_latency_compile",
    "test_align_one_launch_compile",
    "test_grouped_gemm_w4_compile",
    "test_moe_layer_notebook_compile",
    "test_combine_notebook_compile",
    "test_low_latency_notebook_compile",
]


def pytest_report_header():
    """Say which third of the slowest cases this run tries, so that it can be repeated."""
    return f"planted bugs, notebooks, architectures: {THIRD}={chosen_third()}"


def takes_long(module):
    """Return whether a module has long tests or set-ups: begun last, they would keep one worker while others are idle.

    A set-up that workers share (`helpers.once_per_run`) would also make them wait for each other.
    """
    return module.endswith("_compile") or module in ("test_architectures", "test_notebooks")


def gpus():
    """Return the number of GPUs that tests may use: 0 in the simulator."""
    if simulator.ENABLED:
        return 0
    import torch

    return torch.cuda.device_count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect tests that need more or newer GPUs, and compile checks of other thirds: a skip looks like a problem."""
    found = gpus()
    gpu = gpu_of(0) if found else gpu_like((9, 0))
    too_new = set().union(
        *(modules for needed, modules in CAPABILITIES.items() if gpu.capability < needed),
        CAPABILITIES[9, 0] if not gpu.has_wgmma else set(),
    )

    left_out = set(COMPILE_CHECKS) - set(take_sixth(COMPILE_CHECKS))

    def available(item):
        needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
        return needed <= found and item.module.__name__ not in too_new | left_out

    for item in items:
        if item.module.__name__ in SLOW_MODULES or item.originalname in SLOW_TESTS:
            item.add_marker("slow")
    unavailable = [item for item in items if not available(item)]
    if unavailable:
        config.hook.pytest_deselected(items=unavailable)
        items[:] = [item for item in items if available(item)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not takes_long(item.module.__name__))


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
    """Report data races in the modules of `RACES`, but not in tests marked ``intended_races(reason)``."""
    if request.node.get_closest_marker("intended_races"):
        context = simulator.races(False)
    else:
        context = simulator.races() if request.module.__name__ in RACES else contextlib.nullcontext()
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
