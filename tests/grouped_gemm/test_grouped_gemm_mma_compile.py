"""Machine code of the grouped GEMM with mma.sync for several GPUs: instructions and spills; no GPU is needed."""

import pytest

from moe_numba.grouped_gemm.mma_sync.config import select_mma_config
from moe_numba.grouped_gemm.mma_sync.launch import MMA_SIGNATURE
from moe_numba.runtime.device import gpu_like
from moe_numba.runtime.sass import compile_apart

SOURCE = """
from moe_numba.grouped_gemm.mma_sync.config import MmaConfig
from moe_numba.grouped_gemm.mma_sync.kernel import make_kernel
"""
EMULATED = gpu_like((8, 9))._replace(hardware_capability=(9, 0))  # MOE_NUMBA_ARCH=89 on an H200
# The configurations of many rows per group, in which warps have most accumulators: name -> GPU, scaling, silu_and_mul
CASES = {
    "bf16": (gpu_like((8, 0)), "none", False),
    "converted, blocks": (gpu_like((8, 0)), "block", False),
    "converted, silu": (gpu_like((8, 0)), "tensor", True),
    "fp8, blocks": (gpu_like((8, 9)), "block", False),
    "fp8, silu, blocks": (gpu_like((8, 9)), "block", True),
    "fp8 emulated, blocks": (EMULATED, "block", False),
    "bf16, options": (gpu_like((8, 0)), "none", False),
}
OPTIONS = dict(bias="bf16", out_dtype="f32", accumulate=True, scatter=True, row_weights=True)
LINKED_FOR = {(8, 0): [(8, 0), (8, 6), (9, 0)], (8, 9): [(8, 9), (12, 0)]}
EMULATED_FOR = [(9, 0), (10, 0)]


def config_of(name):
    gpu, scaling, silu_and_mul = CASES[name]
    config = select_mma_config(gpu, scaling, "lengths", 4096, silu_and_mul)._replace(gather=True)
    return config._replace(**OPTIONS) if "options" in name else config


def link_archs(name):
    return EMULATED_FOR if "emulated" in name else LINKED_FOR[CASES[name][0].capability]


@pytest.fixture(scope="module")
def reports():
    found = {}
    for arch in LINKED_FOR:
        for emulated in (False, True)[: 1 + (arch == (8, 9))]:
            names = [n for n, (gpu, *_) in CASES.items() if gpu.capability == arch and ("emulated" in n) == emulated]
            configs = {name: config_of(name) for name in names}
            requests = {
                name: (f"make_kernel(MmaConfig(**{c._asdict()}))[0]", MMA_SIGNATURE, c.threads, False)
                for name, c in configs.items()
            }
            found |= compile_apart(SOURCE, requests, arch, link_archs(names[0]))
    return found


TARGETS = [(name, link_arch) for name in CASES for link_arch in link_archs(name)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}, sm_{target[1][0]}{target[1][1]}")
def test_no_spills(target, reports):
    code = reports[target]
    assert code.spilled_bytes == code.stack_bytes == 0 and code.complaints == []
    assert not code.count("LDL", "STL")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0]}, sm_{target[1][0]}{target[1][1]}")
def test_instructions(target, reports):
    """Each mma.sync of a stage occurs once, and ldmatrix loads each of its operands once."""
    name, code, config = target[0], reports[target], config_of(target[0])
    assert code.count("LDGSTS") and not code.count("HGMMA", "QGMMA", "UTMALDG")
    steps = config.block_k_bytes // 32
    products = steps * (config.warp_m // 16) * (config.warp_n // 8)
    if config.mma == "f16" or "emulated" in name:
        products *= 2
    assert code.count("QMMA" if config.mma == "e4m3" and "emulated" not in name else "HMMA") == products
    assert code.count("LDSM") == (steps + 1) * (config.warp_m + config.warp_n) // 16


@pytest.mark.parametrize("link_arch", LINKED_FOR[8, 0])
def test_main_loop_is_mostly_matrix_instructions(link_arch, reports):
    """The loop has few instructions besides: the addresses of ldmatrix are immediates, those of copies are not."""
    opcodes = [code.split(".")[0] for code in reports["bf16", link_arch].opcodes]
    products = [i for i, code in enumerate(opcodes) if code == "HMMA"]
    loop = opcodes[products[0] : products[-1]]
    assert sum(code in ("HMMA", "LDSM") for code in loop) > 0.55 * len(loop)
