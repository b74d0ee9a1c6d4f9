"""`install`, under the path that scripts import."""

from megatron_loss_agg.mcore.launch.install import hook_from_args, install

__all__ = ["hook_from_args", "install"]
