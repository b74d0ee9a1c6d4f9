"""The package's extensions, and the ids of samples in Megatron's packing schedulers."""
