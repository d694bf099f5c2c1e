"""The gang that runs now. Only one runs at a time; the scheduler sets it before each step."""

gang = None
