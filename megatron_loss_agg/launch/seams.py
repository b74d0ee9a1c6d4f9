"""The functions of the host that the plugin wraps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from megatron_loss_agg.errors import HostError

Seam = tuple[Any, str]
"""A module or class of the host, and the name of its public function."""


def seams() -> dict[str, list[Seam]]:
    """What `install` wraps in the host that is importable, by the names of its wrappers.

    Without `megatron.training`, whose scripts will say why they need it, there is less.

    Raises:
        HostError: a function is missing.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    variants = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
    found = {
        # What `get_forward_backward_func` returns, to whoever imported it.
        "schedule": [_seam(schedules, f"forward_backward_{variant}") for variant in variants],
        "construct_optimizer": [(MegatronOptimizer, "__init__")],
        "step": [(c, "step") for c in _subclasses(MegatronOptimizer) if "step" in vars(c)],
    }
    try:
        arguments = importlib.import_module("megatron.training.arguments")
        training = importlib.import_module("megatron.training.training")
    except ImportError:
        return found
    return found | {
        "add_arguments": [_seam(arguments, "add_megatron_arguments")],
        "get_schedule": [_seam(training, "get_forward_backward_func")],
        "setup": [_seam(training, "setup_model_and_optimizer")],
    }


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _seam(holder: Any, name: str) -> Seam:
    if not hasattr(holder, name):
        from megatron.core import __version__

        raise HostError(
            f"megatron-core {__version__}: {holder.__name__} has no {name}; expected Megatron-Core "
            "0.14 to 0.19: install one, or wrap forward_backward with LossHook yourself"
        )
    return holder, name
