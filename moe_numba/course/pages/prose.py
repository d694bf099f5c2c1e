"""Prose with measured numbers, which code fills in."""

from IPython.display import Markdown

NOT_MEASURED = "*(Nothing is recorded for this paragraph yet; on a GPU the notebook measures it.)*"


def say(template: str, **numbers: float | str | None) -> Markdown:
    """Return a paragraph whose numbers come from measurements or records.

    Parameters
    ----------
    template : str
        Markdown with fields as in ``str.format``: ``"Loading takes {load:.1f} us."``.
    **numbers
        The value of each field. If one is None, because nothing is measured or recorded, the paragraph says so.
    """
    if any(value is None for value in numbers.values()):
        return Markdown(NOT_MEASURED)
    return Markdown(template.format(**numbers))
