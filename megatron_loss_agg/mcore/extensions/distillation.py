"""Megatron's distillation losses as a second term, beside the language loss.

The script's loss function masks, sums and mixes the two losses by itself. It is called as it is,
and the token losses of the teacher are taken on their way into its sum.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.errors import HostError, ModeError
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss
from megatron_loss_agg.mcore.extensions.masked_sum import fits_masked_sum
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep
from megatron_loss_agg.mcore.token_loss import TokenLoss, token_masks

KD = "kd"
"""The name of the term of the teacher; the language loss has any other name, and comes first."""

_CACHED = "megatron.training.distillation.cached_logits_loss"
_MODELOPT = "modelopt.torch.distill.distillation_model"


class _Found(NamedTuple):
    """What a distillation loss computed for one microbatch, before its reduction."""

    losses: Any  # [samples, seq]
    is_part: bool  # of this rank's part of the vocabulary: to be summed over tensor-parallel ranks


def terms_from(
    args: Any, aggregation: LossAggregation
) -> LossAggregation | dict[str, Term | LossAggregation]:
    """``aggregation`` of both losses, where Megatron's flags ask for a teacher.

    ``--logits-load-dir``: ``(1 - alpha) * language + alpha * kd`` with the alpha of
    ``--logits-load-kd-loss-alpha``. ``--export-kd-teacher-load``: ``kd`` alone, ModelOpt's default.

    Args:
        args: Megatron's parsed flags; absent ones are off.
    """
    if getattr(args, "logits_load_dir", None) is not None:
        alpha = args.logits_load_kd_loss_alpha
    elif getattr(args, "export_kd_teacher_load", None) is not None:
        alpha = 1.0
    else:
        return aggregation
    return {aggregation.label: Term(aggregation, 1 - alpha), KD: Term(aggregation, alpha)}


class Distillation(Extension):
    """Reads the host's distillation loss functions as losses of two terms; `TokenLoss` as it is.

    In evaluation the host has no teacher, and computes the first term alone. The first training
    step checks that a loss function returned the sum of both terms, each times its coefficient, and
    waits for the device.
    """

    def __init__(self) -> None:
        self._verified = False

    def settings(self) -> Mapping[str, object]:
        return {"distillation": True}

    def start(self, call: Call) -> None:
        if [*call.terms][1:] != [KD]:
            raise ModeError(
                f"Distillation() with a loss of the terms {[*call.terms]}; expected two, of which "
                f"the second is named {KD!r}, the teacher's: LossHook({{'language': Term(...), "
                f"{KD!r}: Term(...)}}, extensions=[Distillation()])"
            )

    def adapt(
        self, call: Call, loss_func: Callable[..., Any], names: Sequence[str]
    ) -> tuple[Callable[..., Any], Sequence[str]]:
        if isinstance(loss_func, TokenLoss):
            return loss_func, names
        language = names[0]
        if not call.trains:
            return loss_func, [language]
        mask = token_masks(loss_func, [language])[language]

        def compute(output: Tensor) -> tuple[dict[str, Tensor], Any]:
            with torch.no_grad(), _recorded() as found:
                returned = loss_func(output)
            losses = {language: output, KD: _per_token(found, returned, names)}
            if not self._verified:
                _check_mixture(losses, mask, call.terms, returned[0])
            return losses, returned[-1]

        return TokenLoss(compute, mask), names

    @contextlib.contextmanager
    def around(
        self, call: Call, plan: PlannedStep | None
    ) -> Iterator[Callable[[MicrobatchLoss], None] | None]:
        yield None
        if call.trains and plan is not None and not plan.is_empty:  # masked tokens tell nothing
            self._verified = True


def _per_token(found: list[_Found], returned: Any, names: Sequence[str]) -> Tensor:
    """The teacher's token losses [samples, seq]; the whole vocabulary's on every rank.

    A part's gradient is right as it is: its softmax sums over ranks in the backward pass, too.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    if not found:
        raise HostError(
            f"the loss function computed no distillation loss for the terms {[*names]}; expected "
            "Megatron's LossFuncCallable (--logits-load-dir) or ModelOpt's compute_kd_loss "
            "(--export-kd-teacher-load), with the model in training mode: otherwise return a "
            "TokenLoss with the losses of both"
        )
    if len(found) > 1:
        raise HostError(
            f"the loss function computed {len(found)} distillation losses, and ModelOpt balances "
            "them by their values in each microbatch, which is no weighted sum of tokens; expected "
            "the logits' alone: drop intermediate_layer_pairs, or return a TokenLoss"
        )
    if len(returned) != 3:
        raise HostError(
            f"the distillation loss function returned {len(returned)} values: it divides by tokens "
            "and reports the means of ranks; expected (loss, number of tokens, report), as of "
            "Megatron-LM from 0.15 on: update the script, or return a TokenLoss with both losses"
        )
    losses, is_part = found[0]
    if is_part:
        return reduce_from_tensor_model_parallel_region(losses)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise HostError(
            "ModelOpt's top-k distillation loss (logit_kl_topk) over tensor-parallel ranks: its "
            "gather adds up the equal gradients of all ranks; expected one rank, or "
            "logit_kl_topk left out"
        )
    return losses


def _check_mixture(
    losses: Mapping[str, Tensor], mask: Tensor, terms: Mapping[str, Term], returned: Tensor
) -> None:
    """Raise HostError unless the host's loss is the sum of both, each times its coefficient."""
    flat = [x.detach().reshape(-1).float() * terms[name].coefficient for name, x in losses.items()]
    if not fits_masked_sum(returned, torch.stack(flat).sum(dim=0), mask, may_be_mean=False):
        said = " + ".join(f"{term.coefficient:g} * {name}" for name, term in terms.items())
        raise HostError(
            f"the distillation loss function returned {returned.item():.6g}, which is not the "
            f"masked sum of {said}; expected its own mixture as coefficients: for "
            "--logits-load-dir 1 - alpha and alpha. With skip_lm_loss off, ModelOpt weighs the "
            "teacher by the values of both losses, which no coefficients do: turn it on, or "
            "return a TokenLoss"
        )


def _recording_cached(stock: Callable[..., Any], found: list[_Found]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(self: Any, student_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The host shifts fp32 logits in place itself; what came before it is of interest.
        if student_logits.float() is student_logits and student_logits._version:
            raise HostError(
                f"logits in {student_logits.dtype}, changed in place before the distillation loss: "
                "Megatron's cross entropy leaves probabilities there; expected a model in half "
                "precision: add --bf16"
            )
        with torch.enable_grad():
            losses = stock(self, student_logits, *args, **kwargs)
        found.append(_Found(losses, True))
        return losses.detach()

    return call


def _recording_modelopt(stock: Callable[..., Any], found: list[_Found]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compute_kd_loss(
        self: Any,
        student_loss: Any = None,
        loss_reduction_fn: Callable[[Any], Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def reduce(given: Any) -> Any:
            losses, is_part = given[:2] if isinstance(given, tuple) else (given, False)
            found.append(_Found(losses, is_part))
            with torch.no_grad():
                return given if loss_reduction_fn is None else loss_reduction_fn(given)

        with torch.enable_grad():
            return stock(self, student_loss, reduce, *args, **kwargs)

    return compute_kd_loss


@contextlib.contextmanager
def _recorded() -> Iterator[list[_Found]]:
    """The token losses of every distillation loss that is computed inside, with gradients."""
    found: list[_Found] = []
    with contextlib.ExitStack() as stack:

        def record(cls: type, name: str, recording: Callable[..., Any]) -> None:
            stock = vars(cls)[name]
            setattr(cls, name, recording(stock, found))
            stack.callback(setattr, cls, name, stock)

        if _CACHED in sys.modules:
            record(sys.modules[_CACHED].CachedLogitsKDLoss, "__call__", _recording_cached)
        if _MODELOPT in sys.modules:
            modelopt = sys.modules[_MODELOPT].DistillationModel
            record(modelopt, "compute_kd_loss", _recording_modelopt)
        yield found
