"""The experts' matrix products: one launch for all groups of rows, FP8 or bf16, on Hopper's tensor cores."""
