"""Exceptions that make the vector engine give up a launch; it then runs with one greenlet per thread."""


class Unsupported(Exception):
    """The kernel does something that the vector engine does not do, or that it cannot tell from an error."""


class Conflict(Unsupported):
    """Two threads access the same memory, one of them to write, with nothing that orders them."""
