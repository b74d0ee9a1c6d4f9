"""Parts of a run beside its loss: wrappers and extensions on public names."""
