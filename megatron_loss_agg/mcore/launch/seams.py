"""The functions of the host that the plugin wraps."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron_loss_agg.errors import HostError


class Seam(NamedTuple):
    """A public function of the host, and the module or class that holds it."""

    holder: Any
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(self.holder, self.name)


class SeamsOfTraining(NamedTuple):
    """Those of `megatron.training`."""

    add_arguments: Seam  # to Megatron's parser
    get_schedule: Seam
    setup: Seam  # of model and optimizer
    say: Seam | None  # prints evaluations; a fork may lack it


class Seams(NamedTuple):
    """What `install` wraps."""

    schedules: list[Seam]  # what `get_forward_backward_func` returns, to whoever imported it
    optimizer: Seam  # construction
    steps: list[Seam]  # of every optimizer class
    training: SeamsOfTraining | None


def seams() -> Seams:
    """What `install` wraps in the host that is importable; without `megatron.training` its core.

    Raises:
        HostError: a function is missing.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    variants = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")
    classes = [cls for cls in _subclasses(MegatronOptimizer) if "step" in vars(cls)]
    return Seams(
        [_seam(schedules, f"forward_backward_{variant}") for variant in variants],
        Seam(MegatronOptimizer, "__init__"),
        [Seam(cls, "step") for cls in classes],
        _seams_of_training(),
    )


def _seams_of_training() -> SeamsOfTraining | None:
    try:
        arguments = importlib.import_module("megatron.training.arguments")
        training = importlib.import_module("megatron.training.training")
    except ImportError:  # a script that needs it will say why
        return None
    return SeamsOfTraining(
        _seam(arguments, "add_megatron_arguments"),
        _seam(training, "get_forward_backward_func"),
        _seam(training, "setup_model_and_optimizer"),
        Seam(training, "print_rank_last") if hasattr(training, "print_rank_last") else None,
    )


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
    return Seam(holder, name)
