"""Compares the tokens in a model's calls with the tokens of the counted batches.

In the first step this verifies the declared split over context-parallel ranks, and the order of the
microbatches. Sums of masks cannot verify either of them for certain, since two samples may have
equal sums. As long as the compared tokens fit several splits, later microbatches are also compared
if their weights depend on the split. Padding is not compared.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.collectives import broadcast_result, gather_objects
from megatron_loss_agg.errors import DataError
from megatron_loss_agg.mcore.batches import HOW_TO_READ, model_inputs_in
from megatron_loss_agg.mcore.call import Call, innermost, replaced
from megatron_loss_agg.mcore.checks.before import check_logits_are_split
from megatron_loss_agg.mcore.split import SPLITS, is_by_token, rank_layout
from megatron_loss_agg.microbatch import (
    Microbatch,
    MicrobatchShape,
    TermMicrobatches,
    holds_integers,
    term_microbatches,
)
from megatron_loss_agg.plan import StepPlan, plan_of_first_term, token_shape


class TokenNotes:
    """The tokens of one step: of its batches, and of the model's calls.

    Args:
        is_first_step: note every microbatch; otherwise only those that differ between the splits.
        splits: the splits that fit the tokens of all earlier steps; None if none were compared.
    """

    def __init__(self, is_first_step: bool, splits: set[str] | None) -> None:
        self._is_first_step = is_first_step
        self._splits = splits
        self._is_open = splits is None or len(splits) > 1
        self._whole: dict[int, _WholeTokens] = {}  # by microbatch; empty on ranks that read none
        # The model's inputs by microbatch; None: the model was not called.
        self._inputs: dict[int, Sequence[Tensor] | None] = {}

    def note_batch(self, i: int, microbatch: TermMicrobatches, batch: Any = None) -> None:
        """Copy the tokens of microbatch ``i``, once.

        Args:
            batch: the batch that it was read from; None if there is none, as in `LossHook.step`.
        """
        if i not in self._whole and self._is_open_for(_token_microbatch(microbatch).shape):
            self._whole[i] = _WholeTokens.of(microbatch, batch)

    def may_differ(self, call: Call, plans: Mapping[str, StepPlan]) -> bool:
        """True if the step may decide between splits that earlier tokens fit.

        The result is the same on all ranks, since they compare in a collective.
        """
        if self._is_first_step:
            return True
        if call.groups.dp_cp is not None:  # each rank has different microbatches
            return self._is_open
        microbatches = range(len(plan_of_first_term(plans).sizes))
        return any(self._is_open_for(token_shape(plans, i)) for i in microbatches)

    def _is_open_for(self, shape: MicrobatchShape) -> bool:
        """True if the remaining splits differ in a rank's tokens of such a microbatch."""
        if self._is_first_step:
            return True
        if not self._is_open:
            return False
        if shape.local_cp_size is not None:
            return shape.local_cp_size > 1
        if "contiguous" in (self._splits or SPLITS):
            return True
        # Both kinds of zigzag are the same for rows, and for a lone sequence that fills its pack.
        starts = shape.starts
        return starts is not None and (len(starts) > 2 or int(starts[-1]) != shape.mask[-1])

    @contextlib.contextmanager
    def observing(self, call: Call, plans: Mapping[str, StepPlan], i: int) -> Iterator[None]:
        """Note the inputs of the model's call for microbatch ``i``, and check how it was packed.

        Raises:
            DataError: the model got a different pack, or different ranks, than the batch.
            HostError: the model gathers its logits and computes its loss.
        """
        with _observed_calls(call) as calls:
            yield
        last = calls[-1] if calls else _ModelCall()
        self._inputs[i] = last.integers
        _check_packing(call, last.packing, plans, i)
        if last.labels is not None:
            check_logits_are_split(call)

    def compare(
        self,
        call: Call,
        plans: Mapping[str, StepPlan],
        dependent: Collection[int],
        is_declared: bool,
        earlier_splits: set[str] | None,
    ) -> set[str] | None:
        """Raise unless each rank's model was called with its part of the planned tokens.

        All ranks of the last stage must call; the tensor-parallel ranks that read batches compare.

        Args:
            dependent: microbatches with weights that are right under only one split.
            is_declared: ``call.split`` comes from the user or the launcher, not from the default.
            earlier_splits: the splits that fit all tokens compared before; None if none were.

        Returns:
            the splits that fit all tokens compared in this step and before; None if none were.

        Raises:
            DataError: a different split, or different microbatches.
        """
        rows = plan_of_first_term(plans).microbatch_rows.tolist()
        numbers = {row: i for i, row in enumerate(rows)}  # this rank's microbatches

        def findings() -> _RankFindings:
            whole = self._whole
            return _RankFindings(
                {rows[i]: _shared_values(plans, i, x.shape) for i, x in whole.items()},
                {
                    rows[i]: _finding(call, whole, i, x)
                    for i, x in self._inputs.items()
                    if i in whole
                },
                {rows[i] for i in dependent},
                {rows[i] for i, x in whole.items() if call.groups.cp_rank_in(x.shape).size > 1},
            )

        def compare_findings() -> set[str] | None:
            ranks = gather_objects(findings, call.groups.split_group, "comparing tokens")
            splits = {}
            for row in sorted({row for rank in ranks for row in rank.splits}):
                sharing = [rank for rank in ranks if row in rank.shared]
                for name, x in sharing[0].shared[row].items():
                    if any(rank.shared[row][name] != x for rank in sharing):
                        raise _other_batches(name)
                row_findings = [rank.splits.get(row) for rank in sharing]
                i = numbers.get(row, row)
                splits[row] = _common_splits(i, [x for x in row_findings if x is not None])
            are_split = {row for rank in ranks for row in rank.are_split}
            compared = [x for row, x in splits.items() if x is not None and row in are_split]
            if earlier_splits is not None:
                compared.append(earlier_splits)
            fitting = set.intersection(*compared) if compared else None
            for row in sorted({row for rank in ranks for row in rank.dependent}):
                row_splits = splits.get(row)
                check_split(
                    numbers.get(row, row),
                    fitting if row_splits is None else row_splits,
                    call.split,
                    is_declared,
                )
            return fitting

        return broadcast_result(compare_findings, call.groups.tp, "comparing tokens")


def dependent_microbatches(
    call: Call, plans: Mapping[str, StepPlan], gathered: Collection[int]
) -> list[int]:
    """The step's microbatches with weights that are right under only one split.

    Args:
        gathered: microbatches with losses that were gathered in the order of the split.
    """
    indices = range(len(plan_of_first_term(plans).sizes))
    return [i for i in indices if _depends_on_split(call, plans, i, i in gathered)]


def _depends_on_split(call: Call, plans: Mapping[str, StepPlan], i: int, is_gathered: bool) -> bool:
    shape = plan_of_first_term(plans).shapes[i]
    if call.groups.cp_rank_in(shape).size == 1:
        return False
    has_tokens_with_loss = any(_has_tokens_with_loss(plan, i) for plan in plans.values())
    return has_tokens_with_loss and (is_gathered or _has_several_samples(plans, i))


def _has_tokens_with_loss(plan: StepPlan, i: int) -> bool:
    sequences = plan.sequences[i]
    has_loss = bool(plan.coefficients(i).any())
    # A loss by sample may have only padding as its tokens: no split makes it wrong.
    return has_loss and (sequences is None or bool(sequences.mask_sum.any()))


def _has_several_samples(plans: Mapping[str, StepPlan], i: int) -> bool:
    """True if microbatch ``i`` is a pack of several samples.

    A lone sample has one coefficient, so its weights are wrong only if its mask sum is, too.
    """
    starts = token_shape(plans, i).starts
    return starts is not None and len(starts) > 2


def check_split(i: int, fitting: Collection[str] | None, split: str, is_declared: bool) -> None:
    """Raise DataError unless the declared split, which microbatch ``i`` depends on, fits.

    Args:
        fitting: the splits that fit the compared tokens; None if none were compared.
    """
    if fitting is None and not is_declared:
        raise DataError(
            f"the split of microbatch {i} must be verified, but the model is not called with "
            "labels or tokens of the batch. Declare it: --loss-aggregation-split "
            f"{{{','.join(SPLITS)}}} (LossHook(split=)), or give Microbatch(model_inputs=...)."
        )
    if fitting is None or split in fitting:
        return
    if not fitting:
        raise DataError(
            f"microbatch {i} must be split over context-parallel ranks as one of "
            f"{', '.join(SPLITS)}, got tokens that are not part of the batch under any of them. "
            "Split every sequence as CPLayout does, or give Microbatch(model_inputs=...) with the "
            "tensors of the model's calls."
        )
    names = " or ".join(sorted(fitting))
    raise DataError(
        f"microbatch {i} must be split over context-parallel ranks as declared, {split}, got {names}. "
        f"Give --loss-aggregation-split {names} (LossHook(split=))."
    )


class _WholeTokens(NamedTuple):
    """The tokens of one microbatch, before context parallelism."""

    inputs: list[Tensor]  # integers that the model is called with: copies, on the CPU
    shape: MicrobatchShape  # of the tokens, see `token_shape`
    is_real: Tensor  # False at padding; in the shape of the mask

    @classmethod
    def of(cls, microbatch: TermMicrobatches, batch: Any) -> _WholeTokens:
        tokens = _token_microbatch(microbatch)
        inputs = tokens.model_inputs or model_inputs_in(batch, tokens.loss_mask)
        if not is_by_token(tokens.shape):
            inputs = ()
        distinctive = [x for x in inputs if not _are_equal(x) and not _are_positions(x)]
        copies = [x.detach().cpu().clone() for x in distinctive]
        return cls(copies, tokens.shape, _is_real(tokens))


def _token_microbatch(microbatch: TermMicrobatches) -> Microbatch:
    """The microbatch of the term that reveals most about the split, as chosen by `token_shape`.

    For losses by sample, the microbatch of its sequences.
    """
    several = [x if x.sequences is None else x.sequences for x in term_microbatches(microbatch)]
    packs = [x for x in several if x.cu_seqlens is not None]
    return (packs or several)[0]


class _ModelCall(NamedTuple):
    """The arguments of a model's call."""

    integers: list[Tensor] | None = None  # None: the model was not called
    packing: Any = None  # Megatron's ``packed_seq_params``; None: rows
    labels: Any = None

    @classmethod
    def of(cls, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> _ModelCall:
        arguments = [*args, *kwargs.values()]
        packing = next((x for x in arguments if hasattr(x, "qkv_format")), None)
        bound = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        integers = [x for x in arguments if holds_integers(x)]
        return cls(integers, packing, bound.get("labels"))


@contextlib.contextmanager
def _observed_calls(call: Call) -> Iterator[list[_ModelCall]]:
    """The calls of the model chunk that computes the loss."""
    model = innermost(call.chunks[-1])  # a script may call what Megatron's wrappers hold
    calls: list[_ModelCall] = []

    def before_forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(_ModelCall.of(module.forward, args, kwargs))

    def build_observed_plan(*args: Any, **kwargs: Any) -> Any:
        calls.append(_ModelCall.of(build_plan, args, kwargs))
        return build_plan(*args, **kwargs)

    # Schedules that overlap the communication of experts build a plan instead of calling forward.
    build_plan: Any = getattr(model, "build_schedule_plan", None)
    with contextlib.ExitStack() as stack:
        handle = model.register_forward_pre_hook(before_forward, with_kwargs=True)
        stack.callback(handle.remove)
        if build_plan is not None:
            stack.enter_context(replaced(model, "build_schedule_plan", build_observed_plan))
        yield calls


def _check_packing(call: Call, packing: Any, plans: Mapping[str, StepPlan], i: int) -> None:
    """Raise DataError if the model's pack or its context-parallel ranks are not as planned.

    Args:
        packing: Megatron's ``packed_seq_params``, or None for rows.
    """
    if packing is None or packing.qkv_format != "thd":
        return
    shape = token_shape(plans, i)
    local_cp_size = getattr(packing, "local_cp_size", None)
    expected = call.groups.cp_rank_in(shape).size
    if local_cp_size not in (None, expected):
        raise DataError(
            f"microbatch {i} must have the {expected} context-parallel ranks that were planned, got "
            f"local_cp_size={int(local_cp_size)} in the model's call. Set hybrid_context_parallel "
            "or dynamic_context_parallel in the model's configuration if samples have their own "
            "groups."
        )
    ignores_samples = all(x.aggregation.ignores_samples for x in plans.values())
    if ignores_samples or not is_by_token(shape):
        return
    if shape.starts is not None:
        _check_starts(packing, shape)
        return
    is_one_sample = shape.mask[0] == 1 and len(packing.cu_seqlens_q) == 2
    if not is_one_sample:
        raise DataError(
            "a batch of packed sequences must have 'cu_seqlens', since the model is called with "
            f"them, got none. Add that key, or {HOW_TO_READ}."
        )


def _check_starts(packing: Any, shape: MicrobatchShape) -> None:
    """Raise DataError for a batch with the real offsets of a padded pack but no padded ones."""
    assert shape.starts is not None
    ends_early = int(shape.starts[-1]) < math.prod(shape.mask)
    names = ("cu_seqlens_q_padded", "cu_seqlens_q")
    offsets = next((x for name in names if (x := getattr(packing, name, None)) is not None), None)
    if not ends_early or offsets is None:
        return
    sequences, samples = offsets[:-1].cpu(), shape.starts[:-1]
    # One extra sequence may be padding. With other numbers, they cannot be compared one by one.
    if len(sequences) not in (len(samples), len(samples) + 1):
        return
    sequences = sequences[: len(samples)]
    if bool((sequences >= samples).all()) and not torch.equal(sequences.to(samples), samples):
        raise DataError(
            "the samples of a pack must begin where the model's sequences do, "
            f"{sequences.tolist()}, got {samples.tolist()}. Give the batch key 'cu_seqlens_padded' "
            "too."
        )


class _SplitFinding(NamedTuple):
    """The splits of one microbatch that fit a rank's model inputs."""

    splits: Sequence[str]  # with these, the inputs are this rank's part of the microbatch
    others: Sequence[int]  # if there are no such splits: the microbatches that the inputs do fit


class _RankFindings(NamedTuple):
    """The findings of one context-parallel rank, by the row of the microbatch in the step."""

    shared: dict[int, dict[str, Any]]  # see `_shared_values`
    splits: dict[int, _SplitFinding | None]  # None: nothing can be compared
    dependent: Collection[int]  # rows with weights that are right under only one split
    are_split: Collection[int]  # rows that several ranks hold


def _other_batches(difference: str) -> DataError:
    return DataError(
        f"all context-parallel ranks must read the same batches, got different {difference}. Split "
        "every batch by sequence, not by sample, and draw nothing at random on one rank alone."
    )


def _common_splits(i: int, findings: Sequence[_SplitFinding]) -> set[str] | None:
    """The splits that fit on all ranks with distinctive tokens; None if there is no such rank.

    Raises:
        DataError: tokens of other microbatches, or ranks with parts of different splits.
    """
    if not findings:
        return None
    common = set.intersection(*({*x.splits} for x in findings))
    misfits = [x for x in findings if not x.splits]
    if misfits and all(x.others for x in misfits):
        raise DataError(
            f"the model must be called with the tokens of microbatch {i} of the step in its turn, got "
            f"those of {misfits[0].others[0]}. Give microbatches in the order of the forward steps "
            "(read_step, hook.step), with new tensors in each, since all are drawn before the first "
            "forward pass."
        )
    if not common and any(x.splits for x in findings):
        raise DataError(
            f"every context-parallel rank must have its own part of the tokens of microbatch {i}, got "
            f"parts of the splits {[[*x.splits] for x in findings]} on different ranks. Split every "
            f"sequence as one of {', '.join(SPLITS)} does (CPLayout)."
        )
    return common


def _finding(
    call: Call, tokens: Mapping[int, _WholeTokens], i: int, inputs: Sequence[Tensor] | None
) -> _SplitFinding | None:
    """The splits that fit this rank's inputs of microbatch ``i``; None if nothing can be compared."""
    whole = tokens[i]
    if not whole.inputs:
        return None
    on_rank = [x.detach().cpu() for x in inputs or () if not _are_positions(x)]
    # Also compare equal tokens: they may be padding, all that this rank holds under one split.
    splits = [split for split in SPLITS if _fits(call, whole, on_rank, split)]
    if splits:
        return _SplitFinding(splits, [])
    distinctive = [x for x in on_rank if not _are_equal(x)]
    if not distinctive:
        return None
    others = [
        j for j, x in tokens.items() if any(_fits(call, x, distinctive, split) for split in SPLITS)
    ]
    return _SplitFinding([], others)


def _fits(call: Call, tokens: _WholeTokens, on_rank: Sequence[Tensor], split: str) -> bool:
    """True if one of this rank's tensors is its part of a microbatch's, except at padding."""
    shape = tokens.shape
    try:
        cp = call.groups.cp_rank_in(shape)
        layout = rank_layout(shape, split, cp.size, cp.rank)
    except DataError:  # the length cannot be split in this way
        return False
    is_padding = ~layout.shard(tokens.is_real)
    for whole in tokens.inputs:
        part = layout.shard(whole.reshape(shape.mask))
        same_size = (x.reshape(part.shape) for x in on_rank if x.numel() == part.numel())
        if any(bool(((x == part) | is_padding).all()) for x in same_size):
            return True
    return False


def _is_real(microbatch: Microbatch) -> Tensor:
    """True at tokens of a sample, False at padding: bool in the shape of the mask, on the CPU.

    In rows, all tokens after the last active one count as padding.
    """
    sample_index = microbatch.sample_index()
    if sample_index is not None:
        is_real = sample_index < microbatch.num_samples
    else:
        is_active = microbatch.loss_mask.detach() != 0
        is_real = is_active.flip(-1).cummax(dim=-1).values.flip(-1)
    return is_real.reshape(microbatch.loss_mask.shape).cpu()


def _shared_values(plans: Mapping[str, StepPlan], i: int, shape: MicrobatchShape) -> dict[str, Any]:
    """By name, values that must be equal on all ranks of a microbatch.

    Each depends on those before it, so the first that differs is the cause.
    """
    return {
        "shapes of masks": shape.mask,
        "offsets": None if shape.starts is None else shape.starts.tolist(),
        "masks": [x.mask_sums(i).tolist() for x in plans.values()],
        "ids or weights of samples": [x.coefficients(i).tolist() for x in plans.values()],
    }


def _are_equal(x: Tensor) -> bool:
    """True if all numbers are equal."""
    flat = x.reshape(-1)
    return not flat.numel() or bool((flat == flat[0]).all())


def _are_positions(x: Tensor) -> bool:
    """True if each row is 0, 1, 2 and so on: a script may make these itself under any split."""
    row = x if x.dim() else x.reshape(1)
    return bool((row == torch.arange(row.shape[-1], device=x.device)).all())
