from moe_numba.course.pages.prose import NOT_MEASURED, say


def test_numbers_are_filled_in_or_the_paragraph_says_that_there_are_none():
    assert say("Loads take {us:.1f} of {name}.", us=3.14159, name="them").data == "Loads take 3.1 of them."
    assert say("Loads take {us:.1f} us.", us=None).data == NOT_MEASURED
