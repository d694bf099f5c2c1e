"""The claims of the five articles, as data, and the checks of those that speak of code.

One module per article; ``<article>_checks`` holds its checks. `moe_numba.course.claims` makes tables of them.
"""
