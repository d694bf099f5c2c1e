"""Wrong variants of kernels, made by replacing source text; checkers must reject them."""

import inspect


def changed(module, right, wrong):
    """Execute a module's source with ``right`` replaced by ``wrong``; return its namespace."""
    source = inspect.getsource(module)
    assert right in source, right
    made = {"__name__": f"{module.__name__}_wrong"}
    exec(compile(source.replace(right, wrong), f"<{module.__name__}: {wrong}>", "exec"), made)
    return made
