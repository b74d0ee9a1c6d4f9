"""The host's contract: a call of its schedule, its process groups, and what it does to a loss.

With ``n_mb`` microbatches, ``d`` data-parallel and ``c`` context-parallel ranks, Megatron-Core 0.13
to 0.19 multiplies the gradient of what a loss function returns, summed over ranks, by:

=================== ========= ================================================================
loss function gives per token factor
=================== ========= ================================================================
(loss, report)      off       ``c / n_mb`` in the schedule, ``1 / (d c)`` in DDP
(loss, n, report)   off       ``1 / (max(n, 1) n_mb)``, ``1 / (d c)``: not used here
(loss, n, report)   on        ``1 / max(sum of n over microbatches and ranks, 1)`` in finalize
(loss, report)      on        the token total stays 0: not used here
(loss, report)      off       ``1`` with ``loss_is_normalized`` (`patches/megatron-lm`)
=================== ========= ================================================================

Where every context-parallel rank returns the loss of all tokens (`TokenLoss.whole`), the sum over
ranks has ``c`` copies of the loss. Of each parameter's gradient it has one copy if the losses were
gathered without a sum in the backward pass, since each rank's copy reaches only the rank's own part
of the tokens, and ``c`` copies if with one.

Only this file undoes the division by the number of microbatches, and these copies.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.aggregation import Term
from megatron_loss_agg.errors import HostError
from megatron_loss_agg.mcore.splits import Splits
from megatron_loss_agg.report import RunningMean

GATHERS = ("local_grad", "reduced_grad")
"""How whole losses are gathered: without a sum over ranks in the backward pass, or with one."""

_MOST_TOKENS = 2**31 - 1  # the host adds up token counts as int32


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that take part in a step's loss, under Megatron's names."""

    dp: dist.ProcessGroup  # without context parallelism
    cp: dist.ProcessGroup
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    last_stage: bool  # whether this rank is on the pipeline stage that computes the loss

    @classmethod
    def of(cls, pg_collection: Any = None) -> ParallelGroups:
        """From ``pg_collection`` if the schedule got one, else from Megatron's globals."""
        from megatron.core import parallel_state

        if pg_collection is not None:
            names = "dp", "cp", "tp", "pp"
            groups: dict[str, Any] = {x: getattr(pg_collection, x, None) for x in names}
            if missing := [name for name, group in groups.items() if group is None]:
                raise HostError(
                    f"pg_collection, a {type(pg_collection).__name__}, has no "
                    f"{', '.join(missing)}; expected the groups dp, cp, tp and pp of one module: "
                    "set them, or leave it out"
                )
            stages = dist.get_world_size(groups["pp"])
            return cls(**groups, last_stage=dist.get_rank(groups["pp"]) == stages - 1)
        return cls(
            # Gloo's where the host has one beside NCCL's: counts then wait for no kernel.
            dp=getattr(parallel_state, "_DATA_PARALLEL_GROUP_GLOO", None)
            or parallel_state.get_data_parallel_group(with_context_parallel=False),
            cp=parallel_state.get_context_parallel_group(),
            tp=parallel_state.get_tensor_model_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )

    @functools.cached_property
    def reads_data(self) -> bool:
        """Whether this rank reads the step's batches for its tensor-parallel group."""
        return dist.get_rank(self.tp) == 0

    @functools.cached_property
    def cp_size(self) -> int:
        return dist.get_world_size(self.cp)

    @functools.cached_property
    def cp_rank(self) -> int:
        return dist.get_rank(self.cp)

    def cp_part(self, tokens: Any) -> Any:
        """This `cp` rank's part of ``tokens``; parts add up, and differ by 1 at most."""
        return (tokens + self.cp_rank) // self.cp_size


@dataclass(frozen=True)
class HostScale:
    """The host's own averaging in one call of its schedule on this rank."""

    num_microbatches: int  # of this rank
    data_parallel_size: int  # without context parallelism
    context_parallel_size: int
    per_token: bool  # config.calculate_per_token_loss
    normalized: bool = False  # config.loss_is_normalized: the host only sums

    def returned(
        self,
        loss: Tensor,
        num_tokens: int | Tensor,
        total_tokens: int,
        report: dict[str, Any],
        gather: str | None = None,
    ) -> tuple[Any, ...]:
        """What a loss function returns to get the gradient of ``loss`` summed over the step.

        Args:
            num_tokens: this rank's part of the microbatch's tokens. It must be the true count,
                since the host scales MoE and MTP losses by the total.
            total_tokens: ``num_tokens`` summed over microbatches, data- and context-parallel ranks.
            gather: one of `GATHERS` if ``loss`` is of all context-parallel ranks' tokens.
        """
        if self.per_token and total_tokens > _MOST_TOKENS:
            raise HostError(
                f"a step of {total_tokens} tokens under calculate_per_token_loss, which the host "
                f"counts as int32; expected at most {_MOST_TOKENS}: turn the flag off"
            )
        # A new tensor even times 1: the host scales it in place.
        loss = loss * self.multiplier(total_tokens, gather)
        if not self.per_token:
            return loss, report
        if not isinstance(num_tokens, Tensor):
            num_tokens = torch.full((), num_tokens, device=loss.device)
        return loss, num_tokens.to(torch.int), report

    def multiplier(self, total_tokens: int, gather: str | None = None) -> float:
        """The reciprocal of the host's factor on the loss summed over ranks and microbatches."""
        summed = self.context_parallel_size if gather == "reduced_grad" else 1
        if self.per_token:
            return max(total_tokens, 1) / summed
        if self.normalized:
            return 1 / summed
        return self.num_microbatches * self.data_parallel_size / summed


class Loop(NamedTuple):
    """What the loop around the schedule does; by default a loop of the user's own.

    Args:
        of_megatron: it is Megatron's training loop. Batches of the next step are then drawn while
            this one computes (`Prefetch`), and evaluation is aggregated as training is. In another
            loop, a forward-only call is left alone if its loss functions carry no mask.
        averages_quotients: its evaluation divides every microbatch's report before it averages
            (Megatron's under ``--sft``; up to 0.15 its training, too). Reports stay exact: of
            Megatron's loop those of the whole evaluation, of another one those of each call.
    """

    of_megatron: bool = False
    averages_quotients: bool = False


@dataclass(frozen=True)
class Call:
    """One call of the schedule, and what the hook says of it."""

    arguments: Mapping[str, Any]  # of the schedule, by name; with its defaults
    groups: ParallelGroups
    scale: HostScale
    config: Any  # of the model
    chunks: tuple[Any, ...]  # model chunks of this rank, in their order
    terms: Mapping[str, Term]  # of the loss that is aggregated
    loop: Loop
    settings: Mapping[str, object]  # of the hook and its extensions: the same on every rank
    extensions: Sequence[Any]
    total_name: str | None  # under which the sum of several terms is reported
    splits: Splits  # that the script may use
    first_index: int = 0  # of the call's first microbatch in its step
    ends_step: bool = True  # no further call belongs to the step
    running_means: Mapping[str, RunningMean] | None = None  # by report; see `Loop`

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **of_hook: Any) -> Call:
        """From the schedule's ``arguments``; ``of_hook``: fields from ``terms`` to ``splits``."""
        from megatron.core.utils import get_model_config

        required = ("forward_step_func", "data_iterator", "model", "num_microbatches")
        if missing := [name for name in required if name not in arguments]:
            raise HostError(
                f"the schedule was called without {', '.join(missing)}=; expected Megatron's "
                "arguments, by keyword: add what is missing"
            )
        groups = ParallelGroups.of(arguments.get("pg_collection"))
        chunks = chunks_of(arguments["model"])
        config = get_model_config(chunks[0])
        scale = HostScale(
            num_microbatches=arguments["num_microbatches"],
            data_parallel_size=dist.get_world_size(groups.dp),
            context_parallel_size=groups.cp_size,
            per_token=config.calculate_per_token_loss,
            normalized=getattr(config, "loss_is_normalized", False),
        )
        return cls(arguments, groups, scale, config, chunks, **of_hook)

    @property
    def pg_collection(self) -> Any:
        """None: Megatron's global groups."""
        return self.arguments.get("pg_collection")

    @property
    def data_iterator(self) -> Any:
        """Of the last chunk, which computes the loss; None on ranks without data."""
        iterators = self.arguments["data_iterator"]
        return iterators[-1] if isinstance(iterators, list) else iterators

    @functools.cached_property
    def trains(self) -> bool:
        return not self.arguments.get("forward_only")

    @property
    def begins_step(self) -> bool:
        """Whether no earlier call belongs to the step."""
        return self.first_index == 0

    @property
    def may_lack_mask(self) -> bool:
        """Custom loops compute log-probabilities, for one, in forward-only calls without a loss."""
        return not (self.trains or self.loop.of_megatron)

    def run(
        self, schedule: Callable[..., Any], forward_step: Callable[..., Any], data_iterator: Any
    ) -> Any:
        """Run ``schedule`` with this forward step, and this iterator for the last chunk."""
        iterators = self.arguments["data_iterator"]
        if isinstance(iterators, list):
            data_iterator = [*iterators[:-1], data_iterator]
        replaced = {"forward_step_func": forward_step, "data_iterator": data_iterator}
        return schedule(**{**self.arguments, **replaced})

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep the host from reducing and scaling gradients, as only a step's last call may."""
        names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
        saved = {name: getattr(self.config, name) for name in names}
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                if hasattr(chunk, "no_sync"):
                    stack.enter_context(chunk.no_sync())
            stack.callback(vars(self.config).update, saved)
            vars(self.config).update(dict.fromkeys(names))
            yield


def defaults_of(schedule: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that ``schedule`` is called with if it is given none."""
    # Those of a `functools.partial`, too.
    parameters = inspect.signature(schedule).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def chunks_of(model: Any) -> tuple[Any, ...]:
    """The model chunks of this rank, from what the schedule is given as its model."""
    return tuple(model) if isinstance(model, list) else (model,)


STOCK = "stock_schedule"


def stock(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """The host's own function, if ``schedule`` wraps it, as its attribute `STOCK` says.

    The attribute is (the wrapper, the host's function).
    """
    itself, own = getattr(schedule, STOCK, (None, schedule))
    return own if itself is schedule else schedule  # a loop's wrapper copies the attribute


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the host's during a call, and restore what it was."""
    is_own, before = name in vars(holder), getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, before)
        else:  # of its class
            delattr(holder, name)
