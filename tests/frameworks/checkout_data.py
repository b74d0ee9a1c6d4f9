"""One generation batch of two optimizer steps, and its gradients in one fp64 process.

For the frameworks that are run from a checkout (`ci/frameworks.sh`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import oracle
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, relative_error

CLIP, KL, ENTROPY = 0.2, 0.3, 0.05
VOCAB = 32  # of tests.host.gpt
DIVISOR = 7.0
MODES = ("token_mean", "sample_mean", "rollout_mean", "prompt_mean", "constant")


@dataclass(frozen=True)
class Answer:
    """A sample: prompt tokens, then answer tokens, of which ``mask`` says which are trained."""

    prompt_length: int
    mask: tuple[int, ...]
    prompt: int
    rollout: int
    reward: float
    removed: bool = False

    def kept(self) -> tuple[float, ...]:
        """The mask, 0 for a removed sample."""
        return tuple(float(m and not self.removed) for m in self.mask)

    def tokens(self) -> Tensor:
        """Those of the prompt are the same for all its samples."""
        prompt, answer = (torch.Generator().manual_seed(x) for x in (self.prompt, self.seed))
        return torch.cat(
            [
                torch.randint(VOCAB, (self.prompt_length,), generator=prompt),
                torch.randint(VOCAB, (len(self.mask),), generator=answer),
            ]
        )

    @property
    def seed(self) -> int:
        return 100 * self.rollout + len(self.mask)


def _answer(line: str) -> Answer:
    prompt, length, rollout, mask, reward, *removed = line.split()
    bits = tuple(map(int, mask))
    return Answer(int(length), bits, int(prompt), int(rollout), float(reward), bool(removed))


# Prompt and its length, rollout, mask of the answer, reward. Six rollouts a step: two samples of
# one rollout, a prompt with one token, samples without tokens and removed ones.
ROLLOUTS = 6
STEPS: tuple[tuple[Answer, ...], ...] = tuple(
    tuple(map(_answer, block.strip().splitlines()))
    for block in (
        """0 3 10 1111101110 1.5
           0 3 10 0110 -0.5
           0 3 11 11 1.0
           1 5 12 01000 2.0
           1 5 13 0000 1.0
           2 6 14 11111111111111 -1.0
           2 6 15 11111 0.7 removed
           2 6 15 111 -1.2""",
        """3 2 20 110111 -0.7
           3 2 21 1 1.1
           4 9 22 0111111111 0.4
           4 9 23 11111 1.3
           4 9 23 00 0.2
           5 4 24 100 -1.4
           5 4 25 1111111 0.9 removed
           4 9 22 1011 -0.3""",
    )
)


def weights(mode: str, step: Sequence[Answer], rejected: str = "") -> list[list[float]]:
    """By `tests.oracle`: of every sample's answer tokens.

    Args:
        rejected: ``skip`` or ``count`` for removed samples; otherwise they are without tokens.
    """
    divisor = DIVISOR if mode == "constant" else None
    chosen = [a for a in step if not (rejected == "skip" and a.removed)]
    masks = [tuple(map(float, a.mask)) if rejected == "count" else a.kept() for a in chosen]
    samples = [
        oracle.Sample(mask, a.prompt, a.rollout) for a, mask in zip(chosen, masks, strict=True)
    ]
    found = iter(oracle.step_weights(mode, [[samples]], divisor=divisor)[0][0])
    by_sample = {id(a): next(found) for a in chosen}
    zero = [0.0]
    return [zero * len(a.mask) if a.removed else by_sample[id(a)] for a in step]


class Expected(NamedTuple):
    """Of one step."""

    gradient: Gradient
    metrics: dict[str, float]


class LogProbs(NamedTuple):
    """fp32, of every sample's answer tokens: of the policy that generated, and of the reference."""

    old: list[Tensor]
    ref: list[Tensor]


Weights = list[list[float]]
"""Of one step: of every sample's answer tokens."""
Losses = Callable[[Tensor, Tensor, Tensor, Tensor, float], dict[str, Tensor]]
"""(log-probabilities, entropy, old, reference, reward) of a sample's tokens -> `loss`, metrics."""


def grpo(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> dict[str, Tensor]:
    """With a k3 KL term and an entropy bonus."""
    ratio = (lp - old).exp()
    policy = -torch.minimum(ratio * reward, ratio.clamp(1 - CLIP, 1 + CLIP) * reward)
    kl = (ref - lp).exp() - 1 - (ref - lp)
    loss = policy + KL * kl - ENTROPY * entropy
    return {"loss": loss, "pg_loss": policy, "kl_loss": kl, "entropy_loss": entropy}


def grpo_with_score(
    lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float
) -> dict[str, Tensor]:
    """Without entropy; the KL term has the gradient through the sampling probability too."""
    terms = grpo(lp, entropy, old, ref, reward)
    return {"loss": terms["pg_loss"] + KL * terms["kl_loss"] * (lp - lp.detach()).exp()}


def nll(lp: Tensor, *_: Any) -> dict[str, Tensor]:
    return {"loss": -lp}


def reference(
    cases: dict[str, tuple[Losses, list[Weights]]], rope: bool = True
) -> tuple[list[LogProbs], dict[str, list[Expected]]]:
    """Of each step: log-probabilities near the model's, and what each case's weights make of it.

    Args:
        rope: whether the model knows positions.
    """
    return tuple(run_host_ranks(_reference, 1, cases, rope)[0])


def _reference(cases: dict[str, tuple[Losses, list[Weights]]], rope: bool) -> Any:
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build()
    if not rope:
        model.position_embedding_type = "none"
    given, found = [], {name: [] for name in cases}
    for number, step in enumerate(STEPS):
        tokens = [_token_values(model, answer) for answer in step]
        near = partial(_near, torch.Generator().manual_seed(number))
        log_probs = LogProbs([near(lp) for lp, _ in tokens], [near(lp) for lp, _ in tokens])
        given.append(log_probs)
        for name, (losses, by_step) in cases.items():
            terms: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
            for answer, values, old, ref, w in zip(
                step, tokens, *log_probs, by_step[number], strict=True
            ):
                of_sample = losses(*values, old.double(), ref.double(), answer.reward)
                for key, x in of_sample.items():
                    terms[key] = terms[key] + (torch.tensor(w, dtype=torch.float64) * x).sum()
            names, parameters = zip(*model.named_parameters(), strict=True)
            gradient = torch.autograd.grad(terms["loss"], parameters, retain_graph=True)
            metrics = {key: float(x) for key, x in terms.items()}
            found[name].append(Expected(dict(zip(names, gradient, strict=True)), metrics))
    return given, found


def _token_values(model: Any, answer: Answer) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the answer's tokens, fp64."""
    tokens = answer.tokens()
    logits = model(tokens.unsqueeze(0), torch.arange(len(tokens)).unsqueeze(0), None).squeeze(0)
    log_p = logits[answer.prompt_length - 1 : -1].log_softmax(-1)
    chosen = log_p.gather(-1, tokens[answer.prompt_length :, None]).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)


def _near(generator: torch.Generator, log_probs: Tensor) -> Tensor:
    noise = 0.1 * torch.randn(log_probs.shape, generator=generator, dtype=torch.float64)
    return (log_probs + noise).detach().float()


def errors(got: list[tuple[Gradient, dict[str, float]]], expected: list[Expected]) -> list[float]:
    """The largest of all steps: of the gradient, norm-wise, and of any metric, both relative.

    A metric's error is relative to the step's largest metric, since the terms of a loss cancel.
    """
    of_gradients, of_metrics = [], []
    for (gradient, metrics), e in zip(got, expected, strict=True):
        of_gradients.append(relative_error(gradient, e.gradient))
        largest = max(map(abs, e.metrics.values()))
        shared = metrics.keys() & e.metrics.keys()
        of_metrics.append(max(abs(metrics[k] - e.metrics[k]) for k in shared) / largest)
    return [max(of_gradients), max(of_metrics)]
