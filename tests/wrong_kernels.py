"""How a test gets the kernel of a module in which one thing is wrong."""

import inspect


def changed(module, right, wrong):
    """What a module defines when something in its source is replaced."""
    source = inspect.getsource(module)
    assert right in source, right
    made = {"__name__": f"{module.__name__}_wrong"}
    exec(compile(source.replace(right, wrong), f"<{module.__name__}: {wrong}>", "exec"), made)
    return made
