"""PTX and LTO-IR of a kernel by numba-cuda-mlir, without a GPU."""

import contextlib
from functools import cache

from moe_numba.runtime.mlir.translate import translation


def generate(function, argument_types, arch, *, lto, launch_bounds=None, lineinfo=False, name=None):
    """Compile a kernel's Python function.

    Parameters
    ----------
    function : the kernel, as it is written for numba-cuda
    argument_types : list of numba-cuda-mlir's types
    arch : tuple
        Compute capability, such as ``(9, 0, "a")``.
    lto : bool
        Return LTO-IR instead of PTX.
    launch_bounds : int or tuple, optional
    lineinfo : bool
    name : str, optional
        Make a device function of this name, which its caller inlines, instead of an entry.

    Returns
    -------
    (code, links)
        The PTX as text or the LTO-IR, and the paths of CUDA C++ files to link with it.
    """
    options = {"chip": "sm_" + "".join(map(str, arch)), "lto": lto}
    if name:
        options |= {"device": True, "abi_info": {"abi_name": name}}
    if launch_bounds:
        options["launch_bounds"] = launch_bounds
    if lineinfo:
        options["lineinfo"] = True
    with _without_driver(arch):
        _set_up()
        return compile_function(translation(arch).kernel(function), argument_types, options)


def compile_function(function, argument_types, options):
    """Compile a function that is written for numba-cuda-mlir; return as `generate`. The driver must not be needed."""
    from numba_cuda_mlir import mlir_compiler, mlir_optimization
    from numba_cuda_mlir._mlir.passmanager import PassManager
    from numba_cuda_mlir.lowering_utilities import context
    from numba_cuda_mlir.numba_cuda import types
    from numba_cuda_mlir.optimization import run_pre_codegen_patterns

    from moe_numba.runtime.mlir import corrections

    chip, lto = options["chip"].removeprefix("sm_"), options["lto"]
    compiled = mlir_compiler.compile_mlir(function, types.void, tuple(argument_types), targetoptions=options)
    with context.get_context():
        module = compiled.metadata["mlir_module"]
        corrections.promote_variables(module)
        PassManager.parse(mlir_optimization.get_base_pipeline()).run(module.operation)
        run_pre_codegen_patterns(module)
        corrections.correct_module(mlir_optimization._get_single_gpu_module(module))
        if mlir_optimization._needs_llvm70_path(chip):
            text = mlir_optimization._call_llvm70_capi(module, options, gen_llvmir=True).decode()
            code = corrections.correct_text(text, inlined=options.get("abi_info", {}).get("abi_name")).encode()
        else:
            code = mlir_optimization._prepare_llvm_ir(module, preserve_debug_info=options.get("lineinfo", False))
    links = compiled.metadata.get("linked_external_link_items", ())
    for_libnvvm = mlir_optimization._nvvm_options(chip, options)
    if lto:
        return mlir_optimization._compile_to_ltoir(code, _libdevice(), for_libnvvm), links
    return mlir_optimization._compile_to_ptx(code, chip, _libdevice(), for_libnvvm).decode(), links


@cache
def _libdevice():
    from numba_cuda_mlir.numba_cuda.cudadrv.nvvm import LibDevice

    return LibDevice()


@cache
def _set_up():
    from numba_cuda_mlir.descriptor import mlir_target
    from numba_cuda_mlir.lowering_utilities import context

    from moe_numba.runtime.mlir import corrections

    # A process that is forked later (`sass`) would wait for MLIR's threads, which it does not have.
    context.get_context().enable_multithreading(False)
    mlir_target.ensure_initialized()
    corrections.apply()


@contextlib.contextmanager
def _without_driver(arch):
    """Let the compiler take ``arch`` for that of the current GPU: it asks the driver even if it is told one."""
    from numba_cuda_mlir import tools

    saved, tools._cached_cc = tools._cached_cc, arch[:2]
    try:
        yield
    finally:
        tools._cached_cc = saved
