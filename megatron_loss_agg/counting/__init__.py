"""Counts a step: samples of all ranks, one exchange, the coefficients of every mode."""
