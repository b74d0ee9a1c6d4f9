"""A teacher's loss in addition to the language loss, with the same token weights.

In a launch, from the root of this repository:

    PYTHONPATH=$PWD/examples/extensions torchrun ... -m megatron_loss_agg pretrain_gpt.py ... --bf16 \
        --logits-load-dir LOGITS --logits-load-kd-loss-alpha 0.5 \
        --loss-aggregation MODE \
        --loss-aggregation-extension distillation:Distillation

In a loop whose forward step returns Megatron's distillation loss function:

    hook = LossHook(LossAggregation(mode="sample_mean"), extensions=[Distillation(alpha=0.5)])

With the weights ``w_t`` of the language loss, the loss of a step is

    L = (1 - alpha) * sum_t w_t * language_t + alpha * sum_t w_t * kd_t

where ``kd_t`` is the KL divergence of token ``t`` from the teacher. Reports get ``kd loss``, the
second sum, and ``loss``, both together; ``<mode> loss`` is the first sum, and ``lm loss`` stays the
mean of the language loss over tokens.

The script's loss function masks, adds up and mixes both losses. The hook calls it without gradients
for its report. While it runs, `Distillation` records the teacher's token losses, with gradients,
before they are added up.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_loss_agg import StepPlan, weighted_sum
from megatron_loss_agg.errors import HostError, OptionError
from megatron_loss_agg.mcore import Call, Extension, MicrobatchLoss

_TOLERANCE = 1e-3
"""Relative tolerance of the script's loss."""
_ROUNDING = 16
"""Allowed rounding error of its sums, in machine epsilons of the sum of absolute values."""


class Distillation(Extension):
    """Adds the losses of Megatron's ``LossFuncCallable`` or of ModelOpt's ``compute_kd_loss``.

    Evaluations are unchanged, since Megatron has no teacher in them. Losses that earlier extensions
    have added are also multiplied by ``1 - alpha``.

    Args:
        alpha: the teacher's share, as in the script's loss function; by default from Megatron's
            flags: ``--logits-load-kd-loss-alpha``, or 1 with ``--export-kd-teacher-load`` (ModelOpt's
            default).

    Raises:
        OptionError: in a call, the hook has several terms, or the flags name no teacher.
        HostError: in a call, the loss function is not the weighted sum of both losses.
    """

    def __init__(self, alpha: float | None = None) -> None:
        self._alpha = alpha
        self._has_compared = False
        # The teacher's losses of this microbatch before their reduction, [samples, seq], and True if
        # they cover only this rank's part of the vocabulary.
        self._recorded: list[tuple[Tensor, bool]] = []

    @contextlib.contextmanager
    def around(self, call: Call, plans: Mapping[str, StepPlan] | None) -> Iterator[None]:
        if not call.trains:
            yield
            return
        if self._alpha is None:
            self._alpha = _alpha_from_flags()
        _check_call(call)
        self._recorded.clear()  # there may be losses from a call that failed
        with _recording(self._recorded):
            yield

    def on_loss(self, microbatch: MicrobatchLoss) -> None:
        if not microbatch.call.trains:
            return
        assert self._alpha is not None  # during a call
        ((name, term),) = microbatch.terms.items()
        if microbatch.stock_loss is None:
            raise HostError(
                "Distillation needs a script's loss function that adds both losses up, got a TokenLoss. "
                "Drop Distillation, and return a TokenLoss with the losses of both terms."
            )
        kd_losses = _kd_losses(self._recorded)
        self._recorded.clear()
        if not self._has_compared:
            self._has_compared = _check_mixture(
                self._alpha, term.losses, kd_losses, term.mask, microbatch.stock_loss
            )
        microbatch.stock_loss = None  # compared above, since it is not the language loss alone
        kd = weighted_sum(microbatch.weights[name].reshape(-1), kd_losses.reshape(-1))
        microbatch.report("kd loss", microbatch.pair(kd))
        language = 0.0 if self._alpha == 1 else (1 - self._alpha) * microbatch.total
        microbatch.total = language + self._alpha * kd
        microbatch.report("loss", microbatch.pair(microbatch.total))


def _alpha_from_flags() -> float:
    from megatron.training import get_args

    args = get_args()
    if getattr(args, "logits_load_dir", None) is not None:
        return float(args.logits_load_kd_loss_alpha)
    if getattr(args, "export_kd_teacher_load", None) is not None:
        return 1.0
    raise OptionError(
        "Distillation needs a teacher, got neither --logits-load-dir nor --export-kd-teacher-load. "
        "Add one, give Distillation(alpha=), or drop the extension."
    )


def _check_call(call: Call) -> None:
    if len(call.terms) != 1 or any(term.multiplier != 1 for term in call.terms.values()):
        raise OptionError(
            f"Distillation needs a hook of one term with multiplier 1, got {dict(call.terms)}. Give "
            "LossHook one LossAggregation, or return a TokenLoss with the losses of all terms."
        )
    if call.config.cross_entropy_loss_fusion and call.config.cross_entropy_fusion_impl == "te":
        raise HostError(
            "distillation needs the student's logits, got --cross-entropy-fusion-impl te, which "
            "overwrites them before they are compared with the teacher's. Choose native."
        )


def _kd_losses(recorded: list[tuple[Tensor, bool]]) -> Tensor:
    """The teacher's token losses over the whole vocabulary, [samples, seq], on every rank.

    The gradient of a part needs no further sum, since its softmax also sums over ranks in backward.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    if len(recorded) != 1:
        raise HostError(
            f"a loss function must compute one distillation loss, got {len(recorded)}. Use Megatron's "
            "LossFuncCallable (--logits-load-dir), or ModelOpt's compute_kd_loss without "
            "intermediate_layer_pairs (--export-kd-teacher-load), with the model in training mode; or "
            "drop Distillation, and return a TokenLoss with the losses of both terms."
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
    alpha: float, language: Tensor, kd: Tensor, mask: Tensor, stock_loss: Tensor
) -> bool:
    """Raise HostError unless the script's loss is the masked sum of both losses. Waits for the device.

    Returns:
        True if a different alpha would not have fit. Any alpha fits while the student equals its
        teacher.
    """
    mask, language, kd = (x.detach().reshape(-1).double() for x in (mask, language, kd))
    mixture = (1 - alpha) * language + alpha * kd
    expected, size = weighted_sum(mask, mixture), weighted_sum(mask, mixture.abs())
    rounding = _ROUNDING * torch.finfo(stock_loss.dtype).eps * size
    difference = (stock_loss.detach().double() - expected).abs()
    if stock_loss.isfinite() and difference > _TOLERANCE * expected.abs() + rounding:
        raise HostError(
            f"the distillation loss function must return the masked sum of {1 - alpha:g} * language + "
            f"{alpha:g} * kd, got {stock_loss.item():.6g}. Give Distillation(alpha=) the alpha of the "
            "loss function, and of ModelOpt a sum, not a mean, with skip_lm_loss on (Megatron-LM 0.15 "
            "or later); or return a TokenLoss."
        )
    sums = [float(weighted_sum(mask, x)) for x in (language, kd)]
    return min(sums) > 0.1 * max(sums)


@contextlib.contextmanager
def _recording(recorded: list[tuple[Tensor, bool]]) -> Iterator[None]:
    """Record the token losses of every distillation loss that is computed inside, with gradients."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # before Megatron-Core 0.19
            from megatron.training.distillation.cached_logits_loss import CachedLogitsKDLoss

            call = _recording_cached(CachedLogitsKDLoss.__call__, recorded)
            stack.enter_context(mock.patch.object(CachedLogitsKDLoss, "__call__", call))
        # Not imported here, since that takes long: a script that uses ModelOpt has imported it.
        if modelopt := sys.modules.get("modelopt.torch.distill.distillation_model"):
            cls = modelopt.DistillationModel
            compute = _recording_modelopt(cls.compute_kd_loss, recorded)
            stack.enter_context(mock.patch.object(cls, "compute_kd_loss", compute))
        yield


def _recording_cached(
    compute: Callable[..., Tensor], recorded: list[tuple[Tensor, bool]]
) -> Callable[..., Tensor]:
    def call(self: Any, student_logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Before this call, Megatron's cross entropy may have written into the logits. The
        # distillation loss itself writes later.
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


def _recording_modelopt(
    compute: Callable[..., Any], recorded: list[tuple[Tensor, bool]]
) -> Callable[..., Any]:
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
