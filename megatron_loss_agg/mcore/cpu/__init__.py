"""Real Megatron-Core on CPU over gloo, for trials and tests.

GPU runs never import this. ``enable()`` patches ``torch`` and Megatron for the rest of the process
and cannot be undone. Supports data, context, tensor, sequence, pipeline and expert parallelism and
packed sequences. Does not support features of Transformer Engine, nor a sliding window combined with
context parallelism or packing.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os

__all__ = ["CPU_FLAGS", "enable", "set_default_flags"]

CPU_FLAGS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-gradient-accumulation-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-masked-softmax-fusion": None,
    "--no-rope-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
}
"""Megatron flags required on CPU: the backend, layers without Transformer Engine, and no fused
kernels. None: the flag takes no value.
"""


@functools.cache
def enable() -> None:
    """Make the Megatron-Core that is first on ``sys.path`` run on CPU.

    Call it before Megatron is first imported. Further calls do nothing.
    """
    # Megatron requires launch scripts to set this, for the order of kernels on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron_loss_agg.mcore.cpu import device

    device.install()
    # These import Megatron, so the stand-ins must be in place.
    from megatron_loss_agg.mcore.cpu import attention, restrictions

    attention.install()
    restrictions.install()
    # Megatron would warn that random numbers come from the CPU's generator.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    atexit.register(_leave)


def set_default_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `CPU_FLAGS` the defaults of Megatron's ``parser``, and return it.

    A release may lack some of the flags. Command-line flags still take precedence.
    """
    actions = parser._option_string_actions  # argparse has no public lookup
    for flag, value in CPU_FLAGS.items():
        if flag in actions:
            action = actions[flag]
            parser.set_defaults(**{action.dest: action.const if value is None else value})
    return parser


def _leave() -> None:
    """Stop gloo's threads, which abort the process if they outlive the interpreter.

    Megatron's scripts do not destroy their process groups.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
