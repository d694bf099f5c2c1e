"""Casts to FP8 and back, with a scale per block of a row."""

FP8_SCALE_BLOCK = 128  # elements of a row, and rows of a weight, that share a scale
