"""Extensions of the package, and ids through packing schedulers, on public names."""
