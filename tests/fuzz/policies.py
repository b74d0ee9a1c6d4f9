"""Per-token losses on one process: value and gradient, one token at a time in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from megatron_loss_agg import policy, weighted_sum
from tests.fuzz.draw import F64, Draw
from tests.fuzz.judge import called, require
from tests.fuzz.reading import listed

BOUND = 20.0
HUGE = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 1e-40, 0.0)
Number = tuple[float, float]  # value and slope


def ratio_of(x: float) -> float:
    return math.exp(min(max(x, -BOUND), BOUND))


def spec_ppo(o: dict[str, Any], lp: float, old: float, a: float) -> Number:
    r, inside = ratio_of(lp - old), abs(lp - old) <= BOUND
    limit = min(max(r, 1 - o["clip_low"]), 1 + o["clip_high"])
    loss, slope = (-a * r, -a * r * inside) if -a * r >= -a * limit else (-a * limit, 0.0)
    dual = o.get("dual_clip")
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, slope


def spec_cispo(o: dict[str, Any], lp: float, old: float, a: float) -> Number:
    weight = min(max(ratio_of(lp - old), 1 - o["clip_low"]), 1 + o["clip_high"])
    return -weight * a * lp, -weight * a


def spec_kl(o: dict[str, Any], lp: float, ref: float) -> Number:
    x = lp - ref
    if o["estimator"] == "k1":
        return x, 1.0
    if o["estimator"] == "k2":
        return x * x / 2, x
    y = min(max(x, -BOUND), BOUND)
    return math.expm1(-y) + y, -math.expm1(-y) * (x == y)


def spec_value(o: dict[str, Any], v: float, old: float, r: float) -> Number:
    near = min(max(v, old - o["clip"]), old + o["clip"])
    if (near - r) ** 2 > (v - r) ** 2:
        return (near - r) ** 2 / 2, 0.0
    return (v - r) ** 2 / 2, v - r


def spec_weight(o: dict[str, Any], lp: float, rollout: float) -> Number:
    return min(ratio_of(lp - rollout), o["cap"]), 0.0


CLIPS = (0.0, 0.2, 0.28, 1.0, 5, math.inf)
BAD = (-0.1, math.nan, 1e300, 1e-320, 3e38)
LOSSES: dict[
    str, tuple[Callable[..., Any], Callable[..., Number], int, dict[str, tuple[Any, ...]]]
] = {
    "ppo": (
        policy.clipped_policy_loss,
        spec_ppo,
        3,
        {"clip_low": CLIPS, "clip_high": CLIPS, "dual_clip": (None, 3.0, 1.5)},
    ),
    "cispo": (policy.cispo_loss, spec_cispo, 3, {"clip_low": CLIPS, "clip_high": CLIPS}),
    "kl": (policy.kl_penalty, spec_kl, 2, {"estimator": ("k1", "k2", "k3")}),
    "value": (policy.clipped_value_loss, spec_value, 3, {"clip": CLIPS}),
    "weight": (policy.truncated_importance_weight, spec_weight, 2, {"cap": (0.5, 2, math.inf)}),
}


def policy_loss(draw: Draw) -> None:
    """Masked positions hold anything; at active ones huge numbers are shown or exact."""
    function, spec, arity, choices = LOSSES[draw.choice([*LOSSES])]
    options = {name: draw.option(draw.choice(of), *BAD) for name, of in choices.items()}
    count, dtype = draw.randrange(6), draw.choice((F64, torch.float32))
    weights = [draw.choice((0.0, 1.0, 0.5)) for _ in range(count)]
    wild = draw.flag(0.3)
    given = []
    for _ in range(arity):
        values = [
            draw.choice(HUGE) if (w == 0 or wild) and draw.flag() else draw.uniform(-2, 2)
            for w in weights
        ]
        given.append(draw.maybe(draw.dressed(torch.tensor(values, dtype=dtype)).detach()))
    if isinstance(given[0], torch.Tensor) and given[0].is_floating_point():
        given[0] = given[0].detach().requires_grad_()
    out = called(lambda: function(*given, **options), strange=draw.strange)
    losses = getattr(out, "losses", out)
    if draw.strange and losses.shape != (count,):
        return
    w = torch.tensor(weights, dtype=losses.dtype)
    leaf = given[0]
    total = weighted_sum(w, losses)
    if total.requires_grad:
        total.backward()
    grads = listed(leaf.grad) if leaf.grad is not None else [0.0] * count
    of_token = zip(*(listed(x) for x in given), strict=True)
    rounding = torch.finfo(leaf.dtype).eps  # the gradient is in its dtype
    for token, weight, loss, grad in zip(of_token, weights, listed(losses), grads, strict=True):
        if weight == 0:
            require(grad == 0, f"gradient {grad} at a masked token {token}")
        else:
            _check(token, spec, options, loss, grad / weight, rounding)


def entropy(draw: Draw) -> None:
    """`token_entropy`: exact for finite logits, and no gradient at masked rows."""
    rows, vocab = draw.randrange(4), draw.randrange(1, 5)
    numbers = [draw.choice((*HUGE, 1.0, -2.0, 0.5)) for _ in range(rows * vocab)]
    logits = torch.tensor(numbers, dtype=draw.choice((F64, torch.float32))).view(rows, vocab)
    given = draw.maybe(draw.dressed(logits).detach().requires_grad_())
    found = called(lambda: policy.token_entropy(given), strange=draw.strange)
    if draw.strange:
        return
    weights = torch.tensor([draw.choice((0.0, 1.0)) for _ in range(rows)], dtype=found.dtype)
    weighted_sum(weights, found).backward()
    for row, w, got, slope in zip(logits, weights, found.tolist(), given.grad, strict=True):
        require(bool(w) or not slope.any(), f"gradient {slope} at a masked row")
        top = row.max().item()
        if not math.isfinite(top):
            require(math.isnan(got), f"entropy {got} of {row}")
            continue
        p = [math.exp(z - top) for z in row.tolist()]
        wanted = -math.fsum(x / sum(p) * math.log(x / sum(p)) for x in p if x / sum(p) > 0)
        require(abs(got - wanted) < 1e-5, f"entropy {got} of {row}, and the oracle {wanted}")
        require(bool(slope.isfinite().all()), f"gradient {slope} of {row}")


def _check(
    token: tuple[float, ...],
    spec: Callable[..., Number],
    options: dict[str, Any],
    loss: float,
    slope: float,
    rounding: float,
) -> None:
    said = f"{options} of {token}: {loss}, {slope}"
    if any(math.isnan(x) for x in token):
        require(math.isnan(loss), said)
        return
    if not all(abs(x) < 1e9 for x in token):
        # Beyond what is exact: never NaN in the gradient.
        require(not math.isnan(slope), said)
        return
    value, wanted = spec(options, *token)
    room = 64 * rounding * (1 + sum(map(abs, token))) ** 2
    scale = max(1.0, abs(value), abs(wanted), math.exp(min(BOUND, abs(token[0] - token[1]))))
    require(abs(loss - value) <= room * scale, f"{said}; the oracle {value}")
    close = abs(slope - wanted) <= room * scale
    # At a kink either slope is right.
    beside = {spec(options, token[0] + d, *token[1:])[1] for d in (-room, room)}
    kinked = any(abs(slope - other) <= room * scale for other in beside)
    require(
        close or kinked or abs(abs(token[0] - token[1]) - BOUND) < room,
        f"{said}; the oracle slope {wanted}",
    )
