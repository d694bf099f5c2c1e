"""Which form of the kernel serves how many rows, and how it is compiled and made ready."""

from functools import cache

from moe_numba.grouped_gemm.constants import THREADS, Constants
from moe_numba.grouped_gemm.kernel import make_kernel
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.launch import cached_cubin, launcher

SIGNATURE = (TENSOR_MAP, TENSOR_MAP, "int32*", "float32*", "int32*", "int32*", "float32*", "float32*", *("int32",) * 5)
SIGNATURE += ("uint8*", "int32*", "int32", "int32")  # x's own rows, for who gathers

# Average rows of a group up to which a form is taken; see bench/tune_grouped_gemm. A form is the tokens of a part, the
# parts of a tile, the multiplications, the stages, and how many blocks share their tokens.
_FORMS = (
    (10, dict(tokens=32, sizes=(32, 16), stages=10, cluster=2)),
    (40, dict(tokens=64, sizes=(64, 32), stages=8, cluster=2)),
    (120, dict(tokens=128, sizes=(128, 96, 64), stages=6, cluster=2)),
    (None, dict(tokens=144, parts=2, sizes=(144, 136, 128, 120), stages=4)),
)
# With activation a stage has two tiles of weights.
_ACTIVATED_FORMS = (
    (10, dict(tokens=32, sizes=(32, 16), stages=5, cluster=2)),
    (40, dict(tokens=64, sizes=(64, 32), stages=5)),
    (120, dict(tokens=96, sizes=(96, 64), stages=4)),
    (None, dict(tokens=144, sizes=(144, 136, 128, 120), stages=4)),
)
# A factor for each token takes registers, and the way to them shared memory's time: no second part, and none of 144.
_LARGEST_BY_BLOCK = dict(tokens=128, sizes=(128, 96, 64), stages=6)
_LARGEST_ACTIVATED_BY_BLOCK = dict(tokens=96, sizes=(96, 64), stages=4)


@cache
def form_for(scaling, rows, average, activated=False):
    """The form for groups of so many rows on average."""
    forms = _ACTIVATED_FORMS if activated else _FORMS
    most, form = next((most, form) for most, form in forms if most is None or average <= most)
    if most is None and scaling == "block":
        form = _LARGEST_ACTIVATED_BY_BLOCK if activated else _LARGEST_BY_BLOCK
    dtype = "bf16" if scaling == "none" else "e4m3"
    return Constants(dtype=dtype, scaling=scaling, rows=rows, activated=activated, **form)


@cache
def launcher_for(constants, device):
    """The form as a program on one device."""
    kernel, shared_bytes = make_kernel(constants)
    return launcher(
        kernel,
        SIGNATURE,
        device,
        launch_bounds=THREADS,
        shared_bytes=shared_bytes,
        cluster=constants.cluster if constants.cluster > 1 else None,
        dependent=True,
        cache_key=_key(constants),
    )


def compile_for(constants):
    """Compile a form, unless its machine code is on disk; no GPU is needed, and it then lies there."""
    kernel, _ = make_kernel(constants)
    cached_cubin(kernel, SIGNATURE, launch_bounds=THREADS, cache_key=_key(constants))


def _key(constants):
    return ("grouped_gemm", *constants)
