"""Megatron's distillation losses as a second term, beside the language loss.

The script's loss function masks, sums and mixes the two losses by itself. It is called as it is,
and the token losses of the teacher are recorded on their way into its sum.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_loss_agg.aggregation import LossAggregation, Term
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.mcore.call import model_chunks, replaced
from megatron_loss_agg.mcore.checks.loss_function import fits_masked_sum
from megatron_loss_agg.mcore.forward_step import TermLosses, TokenLoss, bound_mask
from megatron_loss_agg.mcore.reports import token_mean_pair
from megatron_loss_agg.weighted_sum import weighted_sum

if TYPE_CHECKING:
    from megatron_loss_agg.mcore.hook import LossHook

KD = "kd"
"""The name of the term of the teacher; the language loss has any other name, and comes first."""

_Recorded = list[tuple[Tensor, bool]]
"""Distillation losses before their reduction: [samples, seq], and whether each is of this rank's part
of the vocabulary, so that tensor-parallel ranks' are to be summed."""


def distillation_terms(
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


def distilled(hook: LossHook, hooked: Callable[..., Any]) -> Callable[..., Any]:
    """A hooked schedule whose forward steps may return Megatron's distillation loss functions.

        hook = LossHook({"language": Term(agg, 1 - alpha), "kd": Term(agg, alpha)})
        forward_backward = distilled(hook, hook.wrap(get_forward_backward_func()))

    They become a `TokenLoss` of both terms; other loss functions stay as they are. In evaluation
    Megatron has no teacher, and computes the first term alone.

    Args:
        hooked: what ``hook.wrap`` returned.

    Raises:
        OptionError: the hook's terms are not two, of which the second is ``kd``.
        HostError: when called: a loss function that is not the weighted sum of both terms.
    """
    if [*hook.terms][1:] != [KD]:
        raise OptionError(
            f"distilled needs a hook of two terms, of which the second is the teacher's, {KD!r}, got "
            f"{[*hook.terms]}. Give LossHook({{'language': Term(...), {KD!r}: Term(...)}})."
        )
    has_compared = False  # the loss of the script with that of the terms

    def distillation_loss(loss_function: Callable[..., Any], mask: Tensor) -> TokenLoss:
        call, plans, language = hook.call, hook.plans, next(iter(hook.terms))
        assert call is not None and plans is not None  # while a call runs

        def compute(output: Tensor) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
            nonlocal has_compared
            with torch.no_grad(), _recorded() as recorded:
                *loss, report = loss_function(output)
            losses = {language: output}
            if call.trains:
                losses[KD] = _teacher_losses(recorded)
                if not has_compared:
                    has_compared = _check_mixture(losses, mask, hook.terms, loss[0])
            if "lm loss" in report:
                pair = token_mean_pair(call, plans[language], TermLosses(output, mask))
                report = {**report, "lm loss": pair}
            return losses, report

        return TokenLoss(compute, mask)

    @functools.wraps(hooked)
    def schedule(**arguments: Any) -> Any:
        script_step = arguments["forward_step_func"]
        _check_config(arguments["model"])

        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss_function = script_step(*args, **kwargs)
            is_aggregated = hook.plans is not None  # this call, and on this stage
            mask = bound_mask(loss_function)
            if not is_aggregated or mask is None:
                return output, loss_function
            return output, distillation_loss(loss_function, mask)

        return hooked(**{**arguments, "forward_step_func": forward_step})

    return schedule


def _check_config(model: Any) -> None:
    from megatron.core.utils import get_model_config

    config = get_model_config(model_chunks(model)[0])
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        raise HostError(
            "distillation needs the student's logits, got --cross-entropy-fusion-impl te, which "
            "overwrites them before they are compared with the teacher's. Choose native."
        )


def _teacher_losses(recorded: _Recorded) -> Tensor:
    """The teacher's token losses [samples, seq]; the whole vocabulary's on every rank.

    A part's gradient is right as it is: its softmax sums over ranks in the backward pass, too.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    if len(recorded) != 1:
        raise HostError(
            f"a loss function must compute one distillation loss, got {len(recorded)}. Use Megatron's "
            "LossFuncCallable (--logits-load-dir), or ModelOpt's compute_kd_loss without "
            "intermediate_layer_pairs (--export-kd-teacher-load), with the model in training mode; or "
            "return a TokenLoss with the losses of both terms."
        )
    ((losses, is_part),) = recorded
    if is_part:
        return reduce_from_tensor_model_parallel_region(losses)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise HostError(
            "ModelOpt's top-k loss needs one tensor-parallel rank, got several, whose gather adds up "
            "their equal gradients. Leave out logit_kl_topk."
        )
    return losses


def _check_mixture(
    losses: Mapping[str, Tensor], mask: Tensor, terms: Mapping[str, Term], returned: Tensor
) -> bool:
    """Raise HostError unless the script's loss is the sum of both, each times its multiplier.

    Waits for the device.

    Returns:
        whether a wrong multiplier would have shown. The small loss of a student that is still its
        teacher fits any.
    """
    sums = [weighted_sum(mask.reshape(-1), x.detach().reshape(-1)) for x in losses.values()]
    flat = [x.detach().reshape(-1).float() * terms[name].multiplier for name, x in losses.items()]
    fits, _ = fits_masked_sum(returned, torch.stack(flat).sum(dim=0), mask, may_be_mean=False)
    if not fits:
        terms_in_words = " + ".join(f"{term.multiplier:g} * {name}" for name, term in terms.items())
        raise HostError(
            f"the distillation loss function must return the masked sum of {terms_in_words}, got "
            f"{returned.item():.6g}. Give the terms its own multipliers (1 - alpha and alpha), and of "
            "ModelOpt a sum, not a mean, with skip_lm_loss on (Megatron-LM 0.15 or later); or return a "
            "TokenLoss."
        )
    return bool(min(sums) > 0.1 * max(sums))


@contextmanager
def _recorded() -> Iterator[_Recorded]:
    """The token losses of all distillation losses that are computed inside, with gradients."""
    recorded: _Recorded = []
    with ExitStack() as stack:
        if megatron := sys.modules.get("megatron.training.distillation.cached_logits_loss"):
            cls = megatron.CachedLogitsKDLoss
            call = _recording_cached(cls.__call__, recorded)
            stack.enter_context(replaced(cls, "__call__", call))
        if modelopt := sys.modules.get("modelopt.torch.distill.distillation_model"):
            cls = modelopt.DistillationModel
            call = _recording_modelopt(cls.compute_kd_loss, recorded)
            stack.enter_context(replaced(cls, "compute_kd_loss", call))
        yield recorded


def _recording_cached(compute: Callable[..., Tensor], recorded: _Recorded) -> Callable[..., Tensor]:
    def call(self: Any, student_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Megatron's loss shifts fp32 logits in place itself; what came before it is of interest.
        if student_logits.dtype == torch.float32 and student_logits._version:
            raise HostError(
                "distillation needs the student's logits, got fp32 ones, which Megatron's cross entropy "
                "has overwritten with probabilities. Train a model in half precision (--bf16)."
            )
        with torch.enable_grad():
            losses = compute(self, student_logits, *args, **kwargs)
        recorded.append((losses, True))
        return losses.detach()

    return call


def _recording_modelopt(compute: Callable[..., Any], recorded: _Recorded) -> Callable[..., Any]:
    def compute_kd_loss(
        self: Any, student_loss: Any = None, loss_reduction_fn: Any = None, **options: Any
    ) -> Any:
        def reduce(losses: Any) -> Any:
            recorded.append(losses[:2] if isinstance(losses, tuple) else (losses, False))
            with torch.no_grad():
                return losses if loss_reduction_fn is None else loss_reduction_fn(losses)

        with torch.enable_grad():
            return compute(self, student_loss, reduce, **options)

    return compute_kd_loss
