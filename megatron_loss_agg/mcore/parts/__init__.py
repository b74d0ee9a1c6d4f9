"""The package's extensions, and sample ids for Megatron's packing schedulers."""
