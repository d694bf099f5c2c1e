"""Which of a kernel's buffers its time depends on, from runs with copies of them and with mixes of two copies."""

from collections.abc import Iterable

SAME = 0.05  # share of a time: a smaller difference counts as none
OUTPUTS, COUNTERS = "outputs", "counters"


def conclude(times: dict[str, float], ladder_us: float) -> str:
    """Say which buffers of copy 0 make the difference to other copies, if there is one.

    Parameters
    ----------
    times : dict
        Label -> microseconds, all measured interleaved: "copy 0", "copy n", "outputs of copy n" (with the counters of
        copy 0) and "counters of copy n" (with the outputs of copy 0).
    ladder_us : float
        The time in the ladder, which has the buffers of copy 0.

    Returns
    -------
    str
        One or two sentences.
    """
    first = times["copy 0"]
    copies, others_outputs, others_counters = (of(times, label) for label in ("copy", OUTPUTS, COUNTERS))
    sentence = _cause(_change(copies, first), _change(others_outputs, first), _change(others_counters, first))
    if _change([ladder_us], first) != "none":
        sentence += f" In the ladder the same buffers take {ladder_us:.1f} us, so they do not explain that time."
    return sentence


def of(times: dict[str, float], label: str) -> list[float]:
    """Return the times of "copy n", or of the mixes "outputs of copy n" or "counters of copy n", for n above 0."""
    return [us for name, us in times.items() if name.startswith(f"{label} ") and name != "copy 0"]


def _change(times: Iterable[float], first: float) -> str:
    """Return how times differ from that of copy 0: "none", "slower", "faster", or "mixed"."""
    kinds = {"none" if abs(us / first - 1) < SAME else "slower" if us > first else "faster" for us in times}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _cause(copies, others_outputs, others_counters):
    if copies == "mixed":
        return "The copies differ among themselves, so these times do not isolate a buffer."
    if copies == "none":
        if others_outputs == others_counters == "none":
            return f"All these times are within {100 * SAME:g} % of copy 0: the buffers make no difference."
        return "The copies take as long as copy 0, but some mixes do not: no single buffer is the cause."
    # Mixes with other outputs have the counters of copy 0.
    keeps_time = {COUNTERS: others_outputs == "none", OUTPUTS: others_counters == "none"}
    if all(keeps_time.values()):
        change = {"slower": "longer", "faster": "shorter"}[copies]
        both = (
            "The outputs of copy 0 alone keep its time, and so do its counters alone: no single buffer is the cause; "
        )
        return f"{both}the time is {change} only if both are another copy's."
    if not any(keeps_time.values()):
        return "Neither the outputs nor the counters of copy 0 alone keep its time: no single buffer is the cause."
    cause, other = sorted(keeps_time, key=keeps_time.get, reverse=True)
    return f"The {cause} of copy 0 alone keep its time, its {other} alone do not: the {cause} make the difference."
