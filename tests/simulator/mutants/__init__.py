"""Planted bugs: mistakes that engineers make, as changes of the package's kernels, and the tests that should find them.

`runner` plants one bug at a time in a copy of the package and runs the bug's tests there::

    make mutants ARGS="--only G02 A06"

Data: `gate`, `align`, `dispatch_layout`, `expert_parallel` and `grouped_gemm`, each with a list ``MUTANTS`` of
`mutant.Mutant`.
"""
