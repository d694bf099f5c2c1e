"""Optional dependencies: which extra of the package installs a module that is missing."""

# Module -> extra. What the simulator needs comes without an extra.
EXTRA_OF = dict.fromkeys(("torch", "cffi", "ml_dtypes", "rich", "safetensors"), "kernels") | {
    "matplotlib": "plots",
    "numba_cuda_mlir": "mlir",
    "nvshmem": "nvshmem",
    "transformers": "transformers",
}


def missing_extra(error: ImportError, what: str) -> ImportError | None:
    """Return the error to raise for `what` instead of `error`, or None if no extra installs the missing module."""
    module = (error.name or "").split(".")[0]
    if module not in EXTRA_OF:
        return None
    extra = EXTRA_OF[module]
    command = f"pip install 'moe_numba[{extra}]'"
    if extra in ("kernels", "plots"):
        command += " (or 'moe_numba[cu13]', which adds the compiler of CUDA 13)"
    return ImportError(f"{what} needs {module}, which is not installed: {command}", name=module)
