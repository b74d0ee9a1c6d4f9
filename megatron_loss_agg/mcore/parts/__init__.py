"""What a run may do besides its loss, as wrappers and extensions on public names."""
