"""Real Megatron-Core on a CPU over gloo, for demonstrations and tests.

Nothing here is imported on a GPU. ``enable()`` changes ``torch`` and Megatron for the rest of the
process and cannot be undone. Context, tensor (with sequence), pipeline, expert and data
parallelism run, packed sequences too; what needs Transformer Engine does not, nor a sliding window
together with context parallelism or packing.
"""

from __future__ import annotations

import argparse
import atexit
import os

__all__ = ["CPU_FLAGS", "enable", "set_default_flags"]

# Flags of Megatron's scripts that a CPU needs: the backend, layers without Transformer Engine, and
# no fused kernel. None: the flag takes no value.
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

_enabled = False


def enable() -> None:
    """Make Megatron-Core run on the CPU, the one that is first on ``sys.path`` at this time.

    Call it before Megatron is first imported. A further call does nothing.
    """
    global _enabled
    if _enabled:
        return
    _enabled = True
    # Megatron demands it of launch scripts, for the order of kernels on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron_loss_agg.mcore.cpu import collectives, device

    device.install()
    collectives.install()
    # These import Megatron, which must find the stand-ins in place.
    from megatron_loss_agg.mcore.cpu import attention, refusals

    attention.install()
    refusals.install()
    atexit.register(_leave)


def set_default_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `CPU_FLAGS` the defaults of Megatron's ``parser``, as far as it knows them; return it.

    A flag that the user gives still wins.
    """
    known = parser._option_string_actions  # argparse has no public way to find a flag's action
    for flag, value in CPU_FLAGS.items():
        if flag in known:
            action = known[flag]
            parser.set_defaults(**{action.dest: action.const if value is None else value})
    return parser


def _leave() -> None:
    """End gloo's threads, which abort the process if the interpreter goes first.

    Megatron's scripts leave their process groups to the end of the process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
