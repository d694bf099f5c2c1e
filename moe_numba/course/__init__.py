"""Everything that only the notebooks, the benchmarks and the documentation need."""
