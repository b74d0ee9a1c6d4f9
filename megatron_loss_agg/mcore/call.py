"""One call of Megatron's schedule: its arguments, process groups and scaling."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.scale import MegatronScale
from megatron_loss_agg.microbatch import MicrobatchShape


class CPRank(NamedTuple):
    """This rank among the context-parallel ranks that share the tokens of a microbatch."""

    size: int
    rank: int


@dataclass(frozen=True)
class ProcessGroups:
    """The process groups that take part in a step's loss, under Megatron's names."""

    dp: dist.ProcessGroup  # without context parallelism
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    is_last_stage: bool  # True if this rank is on the pipeline stage that computes the loss
    dp_cp: dist.ProcessGroup | None = None  # None without dynamic context parallelism
    is_end_counted: bool = False  # each model replica counts alone, see `stream`

    @classmethod
    def of(cls, pg_collection: Any = None, is_dynamic: bool = False) -> ProcessGroups:
        """The groups in ``pg_collection`` if the schedule got one, else Megatron's global groups.

        Args:
            is_dynamic: each microbatch has its own context-parallel ranks.
        """
        from megatron.core import parallel_state

        if pg_collection is None:
            return cls(
                dp=_data_parallel_group(with_cp=False),
                cp=parallel_state.get_context_parallel_group(),
                tp=parallel_state.get_tensor_model_parallel_group(),
                pp=parallel_state.get_pipeline_model_parallel_group(),
                is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
                dp_cp=_data_parallel_group(with_cp=True) if is_dynamic else None,
            )
        names = ("dp", "cp", "tp", "pp", *(["dp_cp"] if is_dynamic else []))
        groups = {name: getattr(pg_collection, name, None) for name in names}
        if missing := [name for name, group in groups.items() if group is None]:
            raise HostError(
                f"pg_collection must have the groups {', '.join(names)} of one module, got a "
                f"{type(pg_collection).__name__} without {', '.join(missing)}. Set them, or leave "
                "pg_collection out."
            )
        pp: Any = groups["pp"]
        is_last_stage = dist.get_rank(pp) == dist.get_world_size(pp) - 1
        return cls(**groups, is_last_stage=is_last_stage)  # type: ignore[arg-type]

    @functools.cached_property
    def reads_data(self) -> bool:
        """True if this rank reads the step's batches for its tensor-parallel group."""
        return self.is_last_stage and dist.get_rank(self.tp) == 0

    @property
    def count_group(self) -> dist.ProcessGroup | None:
        """The ranks that count together, since they have different microbatches; None: each alone."""
        if self.dp_cp is not None:
            return self.dp_cp
        return None if self.is_end_counted else self.dp

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """Through these, in order, an error on one rank of the last stage reaches all ranks.

        It reaches the ranks of its stage first, then the other stages, then the other replicas.
        """
        return [self.tp, self.cp, self.pp, self.dp]

    @property
    def counting_groups(self) -> list[dist.ProcessGroup]:
        """The part of `all_groups` through which an error reaches the ranks that count together."""
        return self.all_groups[:-1] if self.count_group is None else self.all_groups

    @functools.cached_property
    def num_counted_ranks(self) -> int:
        """Data- and context-parallel ranks with microbatches that are counted together."""
        return self.cp_size * (1 if self.count_group is None else dist.get_world_size(self.dp))

    @property
    def split_group(self) -> dist.ProcessGroup:
        """The ranks that microbatches are split over."""
        return self.cp if self.dp_cp is None else self.dp_cp

    def cp_rank_in(self, shape: MicrobatchShape) -> CPRank:
        """This rank among the ranks that share a microbatch of this shape."""
        if self.dp_cp is None:
            return CPRank(self.cp_size, self.cp_rank)
        size = shape.local_cp_size or 1
        # Megatron's dynamic process groups are consecutive ranks that begin at a multiple of the size.
        return CPRank(size, dist.get_rank(self.dp_cp) % size)

    def cp_group(self, size: int) -> dist.ProcessGroup:
        """The process group of the ``size`` ranks that share a microbatch with this one."""
        return self.cp if self.dp_cp is None else _dynamic_cp_group(size)

    @functools.cached_property
    def cp_size(self) -> int:
        return dist.get_world_size(self.cp)

    @functools.cached_property
    def cp_rank(self) -> int:
        return dist.get_rank(self.cp)


@dataclass(frozen=True)
class Call:
    """One call of Megatron's schedule under a `LossHook`."""

    arguments: Mapping[str, Any]  # the schedule's, by name, including defaults
    terms: Mapping[str, Term]  # the hook's when the call began
    split: str  # how the script splits tokens over context-parallel ranks, see `split.SPLITS`
    groups: ProcessGroups
    scale: MegatronScale
    config: Any  # the model's configuration
    chunks: tuple[Any, ...]  # this rank's model chunks, in order
    first_index: int = 0  # index in the step of the call's first microbatch
    ends_step: bool = True  # True if this is the step's last call

    @classmethod
    def of(cls, arguments: Mapping[str, Any], terms: Mapping[str, Term], split: str) -> Call:
        """The call with the schedule's ``arguments``.

        Raises:
            HostError: an argument is missing, or there is no microbatch.
        """
        from megatron.core.utils import get_model_config

        required = ("forward_step_func", "data_iterator", "model", "num_microbatches")
        if missing := [name for name in required if name not in arguments]:
            raise HostError(
                f"the schedule needs Megatron's arguments by keyword, got none for "
                f"{', '.join(missing)}. Add them to the call."
            )
        if arguments["num_microbatches"] < 1:
            raise HostError(
                "num_microbatches must be at least 1, since Megatron's schedules run one in any case, "
                f"got {arguments['num_microbatches']}. Leave out the call."
            )
        chunks = model_chunks(arguments["model"])
        config = get_model_config(chunks[0])
        groups = ProcessGroups.of(arguments.get("pg_collection"), _is_dynamic(config))
        scale = MegatronScale(
            num_microbatches=arguments["num_microbatches"],
            data_parallel_size=dist.get_world_size(groups.dp),
            per_token=config.calculate_per_token_loss,
            normalized=getattr(config, "loss_is_normalized", False),
        )
        return cls(arguments, dict(terms), split, groups, scale, config, chunks)

    @property
    def pg_collection(self) -> Any:
        """The script's process groups; None if it uses Megatron's global ones."""
        return self.arguments.get("pg_collection")

    @functools.cached_property
    def draws_samples(self) -> bool:
        """True if the schedule draws the whole step as one item of samples.

        Megatron's hybrid context parallelism does. In newer releases its flag is an alias of the
        dynamic kind, in which the schedule draws microbatches.
        """
        is_hybrid = getattr(self.config, "hybrid_context_parallel", False)
        return bool(is_hybrid) and not getattr(self.config, "dynamic_context_parallel", False)

    @functools.cached_property
    def trains(self) -> bool:
        return not self.arguments.get("forward_only")

    def parameters(self) -> Iterator[Any]:
        """The parameters of all model chunks on this rank."""
        return (x for chunk in self.chunks for x in chunk.parameters())

    @functools.cached_property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        for parameter in self.parameters():
            return torch.device(parameter.device)
        # All chunks of this rank are empty pipeline stages.
        accelerator = torch.accelerator.current_accelerator()
        is_available = torch.accelerator.is_available()
        return accelerator if accelerator and is_available else torch.device("cpu")

    @property
    def begins_step(self) -> bool:
        """True if this is the step's first call."""
        return self.first_index == 0

    @functools.cached_property
    def data_iterator(self) -> Any:
        """The last chunk's iterator, since it computes the loss; None on ranks without data."""
        iterators = self.arguments["data_iterator"]
        return iterators[-1] if isinstance(iterators, list) else iterators

    def arguments_with(
        self, forward_step: Callable[..., Any], data_iterator: Any
    ) -> dict[str, Any]:
        """The schedule's arguments with this forward step, and this iterator for the last chunk."""
        iterators = self.arguments["data_iterator"]
        if isinstance(iterators, list):
            data_iterator = [*iterators[:-1], data_iterator]
        changed = {"forward_step_func": forward_step, "data_iterator": data_iterator}
        return {**self.arguments, **changed}


@contextlib.contextmanager
def without_reduction(chunks: Iterable[Any], config: Any) -> Iterator[None]:
    """Keep a schedule from reducing and scaling the gradients of ``chunks``.

    Gradients already reduced would be reduced again together with those of the step's next call.
    """
    with contextlib.ExitStack() as stack:
        # The schedule leaves ``no_sync_func`` at its last microbatch; this stays entered for all.
        for chunk in chunks:
            if hasattr(chunk, "no_sync"):
                stack.enter_context(chunk.no_sync())
        for name in ("no_sync_func", "grad_sync_func"):
            stack.enter_context(replaced(config, name, None))
        # Not None: the schedule would then also leave out deferred gradients of the output layer.
        stack.enter_context(replaced(config, "finalize_model_grads_func", _do_nothing))
        yield


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces Megatron's finalization of gradients."""


def innermost(model: Any) -> Any:
    """The model itself, without Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _dynamic_cp_group(size: int) -> dist.ProcessGroup:
    """Megatron's process group of ``size`` ranks, including this one, that share a microbatch."""
    from megatron.core import parallel_state

    name = "get_dynamic_data_context_parallel_groups"
    groups = getattr(parallel_state, name, None)  # exists in releases with the dynamic kind
    groups = groups or parallel_state.get_hybrid_data_context_parallel_groups
    group: dist.ProcessGroup = groups(group_size=size)
    return group


def _data_parallel_group(with_cp: bool) -> dist.ProcessGroup:
    """The data-parallel group; a Gloo one, if Megatron has it, to gather counts without the GPU."""
    from megatron.core import parallel_state

    name = "_DATA_PARALLEL_GROUP_WITH_CP_GLOO" if with_cp else "_DATA_PARALLEL_GROUP_GLOO"
    gloo: dist.ProcessGroup | None = getattr(parallel_state, name, None)
    return gloo or parallel_state.get_data_parallel_group(with_context_parallel=with_cp)


def _is_dynamic(config: Any) -> bool:
    """True if each microbatch has its own context-parallel ranks."""
    names = ("hybrid_context_parallel", "dynamic_context_parallel")
    return any(getattr(config, name, False) for name in names)


def model_chunks(model: Any) -> tuple[Any, ...]:
    """This rank's model chunks, from the schedule's argument ``model``."""
    return tuple(model) if isinstance(model, list) else (model,)


def default_arguments(schedule: Callable[..., Any]) -> dict[str, Any]:
    """The default values of the arguments of ``schedule``."""
    # A signature includes the arguments that a `functools.partial` has bound.
    parameters = inspect.signature(schedule).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


ORIGINAL = "megatron_original"
"""Attribute of a wrapper of a Megatron function: (the wrapper, Megatron's function)."""


def original(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's own function, if ``schedule`` is a wrapper with the attribute `ORIGINAL`."""
    wrapper, function = getattr(schedule, ORIGINAL, (None, schedule))
    # Compare, since `functools.wraps` copies the attribute to wrappers of this wrapper.
    return function if wrapper is schedule else schedule


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a Megatron object inside the context, and restore it afterwards."""
    is_on_instance, before = name in vars(holder), getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_on_instance:
            setattr(holder, name, before)
        else:  # the attribute belongs to its class
            delattr(holder, name)
