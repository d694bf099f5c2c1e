"""Exercises of the notebooks on the alignment (`moe_align_block_size`)."""

from numbers import Integral

from moe_numba.course.exercises import Exercise
from moe_numba.simulator.profiler.bank_conflicts import count_wavefronts


def _has_no_bank_conflicts(row_pitch):
    """Test a function from the number of experts to the words per row of the threads' counters."""
    for num_experts in (64, 32, 16, 7):
        words = row_pitch(num_experts)
        if words is ...:
            return "not answered yet: return a number of words"
        if not isinstance(words, Integral):
            return f"ROW_PITCH({num_experts}) is {words}, which is no integer"
        if words < num_experts:
            return f"a row holds {num_experts} counters, but ROW_PITCH({num_experts}) is {words}"
        if words > 2 * num_experts + 2:
            return f"ROW_PITCH({num_experts}) is {words}; rows of at most {2 * num_experts + 2} words fit"
        for expert in (0, num_experts - 1):
            addresses = {lane: 4 * (lane * words + expert) for lane in range(32)}
            wavefronts, _ = count_wavefronts(addresses, 4, True)
            if wavefronts > 1:
                return (
                    f"with {num_experts} experts and rows of {words} words, the 32 lanes need {wavefronts} wavefronts "
                    f"to read their counters of expert {expert}; without bank conflicts they need 1"
                )
    return None


EXERCISES = {
    1: Exercise(
        "a function from the number of experts to the words per row, without bank conflicts",
        _has_no_bank_conflicts,
        "Word w lies in bank w % 32. Lanes l and m conflict if l * pitch and m * pitch leave the same remainder.",
        "lambda num_experts: num_experts | 1  # an odd pitch visits all 32 banks",
    )
}
