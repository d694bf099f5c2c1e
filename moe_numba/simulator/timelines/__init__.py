"""Timelines of simulated traces and of time stamps from a GPU, side by side.

`spans` makes spans of both, `chrome_trace` writes and reads them as a file that Perfetto opens, and `player` shows them
as a page to step through. The package is not called `timeline` because that name is the function's.
"""
