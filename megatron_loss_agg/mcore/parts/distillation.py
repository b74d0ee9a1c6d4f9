"""Megatron's distillation losses as a second term, beside the language loss.

The script's loss function masks, sums and mixes the two losses by itself. It is called as it is,
and the token losses of the teacher are taken on their way into its sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.mcore.extension import Extension
from megatron_loss_agg.mcore.extensions.masked_sum import fits_masked_sum
from megatron_loss_agg.mcore.host import Call, replaced
from megatron_loss_agg.mcore.token_loss import TokenLoss, token_masks
from megatron_loss_agg.weighted_sum import weighted_sum

KD = "kd"
"""The name of the term of the teacher; the language loss has any other name, and comes first."""

_Found = list[tuple[Tensor, bool]]
"""What distillation losses computed before their reduction: losses [samples, seq], and whether of
this rank's part of the vocabulary, so that tensor-parallel ranks' are to be summed."""


def terms_from(
    args: Any, aggregation: LossAggregation
) -> LossAggregation | dict[str, Term | LossAggregation]:
    """``aggregation`` of both losses, where Megatron's flags ask for a teacher.

    ``--logits-load-dir``: ``(1 - alpha) * language + alpha * kd`` with the alpha of
    ``--logits-load-kd-loss-alpha``. ``--export-kd-teacher-load``: ``kd`` alone, ModelOpt's default.
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

    In evaluation the host has no teacher, and computes the first term alone.
    """

    def __init__(self) -> None:
        self._verified = False

    def start(self, call: Call) -> None:
        if [*call.terms][1:] != [KD]:
            raise OptionError(
                f"Distillation() with a loss of the terms {[*call.terms]}; expected two, the "
                f"second the teacher's: LossHook({{'language': Term(...), {KD!r}: Term(...)}})"
            )
        config = call.config
        if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
            raise HostError(
                "distillation with --cross-entropy-fusion-impl te, which overwrites the student's "
                "logits before they are compared with the teacher's; expected native"
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
            losses = {language: output, KD: _per_token(found)}
            if not self._verified:
                _check_mixture(losses, mask, call.terms, returned[0])
                # A small loss, as of a student that is still its teacher, fits any coefficient.
                sums = [weighted_sum(mask, x.detach().view_as(mask)) for x in losses.values()]
                self._verified = bool(min(sums) > 0.1 * max(sums))
            return losses, returned[-1]

        return TokenLoss(compute, mask), names


def _per_token(found: _Found) -> Tensor:
    """The teacher's token losses [samples, seq]; the whole vocabulary's on every rank.

    A part's gradient is right as it is: its softmax sums over ranks in the backward pass, too.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    if len(found) != 1:
        raise HostError(
            f"the loss function computed {len(found)} distillation losses; expected one of a model "
            "in training mode, by Megatron's LossFuncCallable (--logits-load-dir) or ModelOpt's "
            "compute_kd_loss without intermediate_layer_pairs (--export-kd-teacher-load): "
            "otherwise return a TokenLoss with the losses of both terms"
        )
    ((losses, is_part),) = found
    if is_part:
        return reduce_from_tensor_model_parallel_region(losses)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise HostError(
            "ModelOpt's top-k loss over tensor-parallel ranks, whose gather adds up their equal "
            "gradients; expected one rank: or leave out logit_kl_topk"
        )
    return losses


def _check_mixture(
    losses: Mapping[str, Tensor], mask: Tensor, terms: Mapping[str, Term], returned: Tensor
) -> None:
    """Raise HostError unless the host's loss is the sum of both, each times its coefficient."""
    flat = [x.detach().reshape(-1).float() * terms[name].coefficient for name, x in losses.items()]
    fits, _ = fits_masked_sum(returned, torch.stack(flat).sum(dim=0), mask, may_be_mean=False)
    if not fits:
        said = " + ".join(f"{term.coefficient:g} * {name}" for name, term in terms.items())
        raise HostError(
            f"the distillation loss function returned {returned.item():.6g}, which is not the "
            f"masked sum of {said}; expected its own coefficients (1 - alpha and alpha), and of "
            "ModelOpt a sum, not a mean, with skip_lm_loss on (Megatron-LM 0.15 or later): "
            "otherwise return a TokenLoss"
        )


@contextmanager
def _recorded() -> Iterator[_Found]:
    """The token losses of all distillation losses that are computed inside, with gradients."""
    found: _Found = []
    with ExitStack() as stack:
        if megatron := sys.modules.get("megatron.training.distillation.cached_logits_loss"):
            cls = megatron.CachedLogitsKDLoss
            call = _recording_cached(cls.__call__, found)
            stack.enter_context(replaced(cls, "__call__", call))
        if modelopt := sys.modules.get("modelopt.torch.distill.distillation_model"):
            cls = modelopt.DistillationModel
            call = _recording_modelopt(cls.compute_kd_loss, found)
            stack.enter_context(replaced(cls, "compute_kd_loss", call))
        yield found


def _recording_cached(stock: Callable[..., Tensor], found: _Found) -> Callable[..., Tensor]:
    def call(self: Any, student_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The host shifts fp32 logits in place itself; what came before it is of interest.
        if student_logits.dtype == torch.float32 and student_logits._version:
            raise HostError(
                "fp32 logits, which Megatron's cross entropy has overwritten with probabilities "
                "before the distillation loss; expected a model in half precision: add --bf16"
            )
        with torch.enable_grad():
            losses = stock(self, student_logits, *args, **kwargs)
        found.append((losses, True))
        return losses.detach()

    return call


def _recording_modelopt(stock: Callable[..., Any], found: _Found) -> Callable[..., Any]:
    def compute_kd_loss(
        self: Any, student_loss: Any = None, loss_reduction_fn: Any = None, **options: Any
    ) -> Any:
        def reduce(given: Any) -> Any:
            found.append(given[:2] if isinstance(given, tuple) else (given, False))
            with torch.no_grad():
                return given if loss_reduction_fn is None else loss_reduction_fn(given)

        with torch.enable_grad():
            return stock(self, student_loss, reduce, **options)

    return compute_kd_loss
