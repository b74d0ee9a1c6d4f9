"""Counts a step: a rank's samples, their table, and one exchange over all ranks."""
