"""What a patched framework for RL is held to: its batch, its runs, and the table of their errors.

A run trains on two checkouts, or copies, of the framework: without and with our patch.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import oracle
from tests.frameworks.harness import DIVISOR, KL, Terms, grpo, references, token_values, total
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, relative_error
from tests.host.steps import VOCAB, Places

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


def answers(table: str) -> tuple[Answer, ...]:
    """A line: prompt and its length, rollout, mask of the answer, reward, and if it is removed."""
    return tuple(map(_answer, table.strip().splitlines()))


# Six rollouts a step: two samples of one rollout, a prompt with one token, samples without tokens
# and removed ones.
ROLLOUTS = 6
Batch = tuple[tuple[Answer, ...], ...]
STEPS: Batch = (
    answers("""
        0 3 10 1111101110 1.5
        0 3 10 0110 -0.5
        0 3 11 11 1.0
        1 5 12 01000 2.0
        1 5 13 0000 1.0
        2 6 14 11111111111111 -1.0
        2 6 15 11111 0.7 removed
        2 6 15 111 -1.2
    """),
    answers("""
        3 2 20 110111 -0.7
        3 2 21 1 1.1
        4 9 22 0111111111 0.4
        4 9 23 11111 1.3
        4 9 23 00 0.2
        5 4 24 100 -1.4
        5 4 25 1111111 0.9 removed
        4 9 22 1011 -0.3
    """),
)


def weights(
    mode: str,
    step: Sequence[Answer],
    rejected: str = "",
    places: Places | None = None,
    **options: Any,
) -> Weights:
    """By `tests.oracle`: of every sample's answer tokens.

    Args:
        rejected: ``skip`` or ``count`` for removed samples; otherwise they are without tokens.
        places: samples by rank and microbatch; by default all in one.
        options: of the oracle.
    """
    if mode == "constant":
        options.setdefault("divisor", DIVISOR)
    chosen = tuple(i for i, a in enumerate(step) if not (rejected == "skip" and a.removed))
    places = places or ((chosen,),)
    masks = [tuple(map(float, a.mask)) if rejected == "count" else a.kept() for a in step]
    samples = [
        oracle.Sample(mask, a.prompt, a.rollout) for a, mask in zip(step, masks, strict=True)
    ]
    nested = [[[samples[i] for i in place] for place in rank] for rank in places]
    found = iter(
        w for rank in oracle.step_weights(mode, nested, **options) for place in rank for w in place
    )
    by_sample = {i: next(found) for rank in places for place in rank for i in place}
    return [[0.0] * len(a.mask) if a.removed else by_sample[i] for i, a in enumerate(step)]


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
Losses = Callable[[Tensor, Tensor, Tensor, Tensor, float], Terms]
"""(log-probabilities, entropy, old, reference, reward) of a sample's tokens -> `loss`, metrics."""
Case = tuple[Losses, list[Weights]]
"""With the weights of each step."""


def with_entropy(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """`grpo`, under slime's names."""
    terms = grpo(lp, entropy, old, ref, reward)
    names = {"policy": "pg_loss", "kl": "kl_loss", "entropy": "entropy_loss"}
    return {"loss": total(terms), **{names[key]: x for key, x in terms.items()}}


def with_score(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """Without entropy; the KL term has the gradient through the sampling probability too."""
    terms = grpo(lp, entropy, old, ref, reward)
    return {"loss": terms["policy"] + KL * terms["kl"] * (lp - lp.detach()).exp()}


def nll(lp: Tensor, *_: Any) -> Terms:
    return {"loss": -lp}


def reference(
    cases: dict[str, Case],
    rope: bool = True,
    batch: Batch = STEPS,
    vocab: int = VOCAB,
    mtp: dict[str, Any] | None = None,
) -> tuple[list[LogProbs], dict[str, list[Expected]]]:
    """Of each step: log-probabilities near the model's, and what each case's weights make of it.

    Args:
        rope: whether the model knows positions.
        mtp: settings of MTP, whose losses are then a part of every loss.
    """
    return tuple(run_host_ranks(_reference, 1, cases, rope, batch, vocab, mtp or {})[0])


def _reference(
    cases: dict[str, Case], rope: bool, batch: Batch, vocab: int, mtp: dict[str, Any]
) -> Any:
    from tests.host import gpt

    gpt.initialize()
    gpt.VOCAB = vocab
    model = gpt.build(**mtp)
    if not rope:
        model.position_embedding_type = "none"
    given, found = [], {name: [] for name in cases}
    for number, step in enumerate(batch):
        tokens = [token_values(model, a.tokens(), a.prompt_length) for a in step]
        near = partial(_near, torch.Generator().manual_seed(number))
        log_probs = LogProbs([near(lp) for lp, _ in tokens], [near(lp) for lp, _ in tokens])
        given.append(log_probs)
        zipped = list(zip(step, tokens, *log_probs, strict=True))
        by_losses = {
            losses: references(
                model,
                (
                    _with_mtp(losses(*x, old.double(), ref.double(), a.reward), model, a)
                    for a, x, old, ref in zipped
                ),
            )
            for losses in {losses for losses, _ in cases.values()}
        }
        for name, (losses, by_step) in cases.items():
            terms, w = by_losses[losses], list(enumerate(by_step[number]))
            metrics = {key: term.loss(w) for key, term in terms.items()}
            metrics["loss"] -= metrics.get("aggregated_mtp_loss", 0.0)
            found[name].append(Expected(terms["loss"].gradient(w), metrics))
    return given, found


def _with_mtp(terms: Terms, model: Any, answer: Answer) -> Terms:
    """With the losses of MTP: at depth d, position ``t - 1 - d`` predicts token ``t``, too."""
    depths = model.config.mtp_num_layers
    if not depths:
        return terms
    of_depths = []

    def keep_logits(labels: Tensor, logits: Tensor) -> Tensor:
        of_depths.append(logits.squeeze(1))
        return torch.zeros_like(labels, dtype=torch.float64)

    tokens = answer.tokens()
    model.compute_language_model_loss = keep_logits
    positions = torch.arange(len(tokens)).unsqueeze(0)
    model(tokens[None], positions, None, mtp_kwargs={"mtp_labels": tokens[None]})
    del model.compute_language_model_loss
    answered = torch.arange(answer.prompt_length, len(tokens))
    losses = torch.zeros(len(answered), dtype=torch.float64)
    for depth, logits in enumerate(of_depths, start=1):
        predicting = answered - 1 - depth
        log_p = logits[predicting.clamp(min=0)].log_softmax(-1)
        of_depth = -log_p.gather(-1, tokens[answered, None]).squeeze(-1)
        losses = losses + of_depth * (predicting >= 0)
    losses = model.config.mtp_loss_scaling_factor / depths * losses
    return {**terms, "loss": terms["loss"] + losses, "aggregated_mtp_loss": losses}


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
        differences = (abs(metrics[k] - e.metrics[k]) for k in metrics.keys() & e.metrics.keys())
        of_metrics.append(max(differences, default=0.0) / largest)
    # NaN, which Python's own `max` may pass over, is the largest.
    return [max(found, key=lambda x: (math.isnan(x), x)) for found in (of_gradients, of_metrics)]


Steps = list[tuple[Gradient, dict[str, float]]]
"""Gradient and metrics of each optimizer step."""


class Run(NamedTuple):
    """One training of the framework's code: our flags, and options of its own."""

    flags: str
    options: dict[str, Any]


Train = Callable[[str, int, list[Run], list[LogProbs]], list[Steps | str]]
"""(checkout, cp, runs, log-probabilities) -> of each run its steps, or what refused it."""

REFUSALS = (ValueError, NotImplementedError)
"""By what a framework refuses a run, ours among them."""
BOUND = 1e-6  # of a gradient in fp32
METRICS = 1e-5  # of a metric in fp32, in which terms cancel
WRONG = 1e-3  # what stock code must be off at least, where the page says that it is


def flags(mode: str, rejected: str = "", empty: str = "count") -> str:
    """For MEGATRON_LOSS_AGG_FLAGS."""
    text = f"--loss-aggregation {mode}"
    text += f" --loss-aggregation-divisor {DIVISOR}" if mode.endswith("constant") else ""
    text += f" --loss-aggregation-empty {empty}" if empty != "count" else ""
    return text + (f" --loss-aggregation-rejected {rejected}" if rejected else "")


Held = tuple[Run, Case | str | None]
"""A run and what it is held to: steps, words that its refusal begins with (a pattern), or None: it
must be refused, or if it is stock code is only there to differ from."""


def stock(losses: Losses, mode: str, rejected: str = "", **options: Any) -> Held:
    """Code without our flags that has the mode as one of its own."""
    return Run("", options), (losses, [weights(mode, step, rejected) for step in STEPS])


def exact(
    losses: Losses, mode: str, rejected: str = "", empty: str = "count", **options: Any
) -> Held:
    of_steps = [weights(mode, step, rejected, empty=empty) for step in STEPS]
    return Run(flags(mode, rejected, empty), options), (losses, of_steps)


def refused(mode: str, rejected: str = "", **options: Any) -> Held:
    return Run(flags(mode, rejected), options), None


@dataclass
class Report:
    """Collects rows and what failed.

    Args:
        checkouts: without and with the patch.
        own: runs of the stock code.
        runs: of the patched code.
        near: the stock run that a run is shown to differ from, if not the one with its options;
            None if it is as exact. It needs not differ from one of its own name.
        others: of the patched code, for tests of their own.
        bound: of a gradient's error, besides twice that of the stock code.
        mtp: as in `reference`.
    """

    name: str
    train: Train
    checkouts: tuple[str, str]
    own: dict[str, Held]
    runs: dict[str, Held]
    near: dict[str, str | None] = field(default_factory=dict)
    others: dict[str, Run] = field(default_factory=dict)
    bound: float = BOUND
    batch: Batch = STEPS
    vocab: int = VOCAB
    mtp: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    references: dict[bool, Any] = field(default_factory=dict)

    def compare(self, place: str, cp: int, rope: bool = True, **options: Any) -> dict[str, Any]:
        """All runs, with further options of the framework; ``rope`` as in `reference`.

        Returns:
            All steps, or errors, by name; of a name that both have, those of the stock code.
        """
        given, expected = self.reference(rope)

        def run(checkout: str, runs: list[Run]) -> list[Any]:
            changed = [Run(run.flags, {**run.options, **options}) for run in runs]
            # The first rank's: after the reduction it is the same on all.
            return run_host_ranks(self.train, 2, checkout, cp, changed, given, timeout=300.0)[0]

        own, runs = ([run for run, _ in held.values()] for held in (self.own, self.runs))
        found = iter(run(self.checkouts[1], [*own, *runs, *self.others.values()]))
        theirs = dict(zip(self.own, run(self.checkouts[0], own), strict=True))
        again = {name: next(found) for name in self.own}
        ours = {name: next(found) for name in self.runs}
        own_errors = {}
        for name, steps in theirs.items():
            self.check_same(f"{place}, {name}", steps, again[name])
            if name in expected:
                own_errors[name] = self.check_own(place, name, steps, expected[name])
        for what, steps in ours.items():
            mine, held = self.runs[what]
            if held is None or isinstance(held, str):
                self.check_refused(place, what, steps, held or r"\w+Error:")
                continue
            same = next(
                (name for name, x in self.own.items() if x[0].options == mine.options), None
            )
            near = self.near.get(what, what if what in self.own else same)
            assert near is not None or what in self.near, f"{what}: no stock run is near"
            wrong = theirs[near] if near not in (None, what) else None
            own_error = own_errors.get(same, max(own_errors.values(), default=self.bound))
            self.check_exact(place, what, steps, expected[what], own_error, wrong)
        return {**ours, **dict(zip(self.others, found, strict=True)), **theirs}

    def reference(self, rope: bool) -> Any:
        """Computed once."""
        if rope not in self.references:
            both = {**self.own, **self.runs}
            cases = {name: case for name, (_, case) in both.items() if isinstance(case, tuple)}
            self.references[rope] = reference(cases, rope, self.batch, self.vocab, self.mtp)
        return self.references[rope]

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(f"{self.name}: {what}")

    def check_own(self, place: str, mode: str, got: Steps, expected: list[Expected]) -> float:
        """Stock code in a mode of its own; returns its error."""
        error, _ = errors(got, expected)
        self.check(error < self.bound, f"{place}: stock {mode} is {error:.1e} off")
        self.rows.append((place, f"stock's own: {mode}", "", "", f"{error:.1e}"))
        return error

    def check_exact(
        self,
        place: str,
        what: str,
        got: Steps | str,
        expected: list[Expected],
        own: float,
        stock: Steps | None = None,
    ) -> None:
        """A run of the patched code; ``stock`` is one of the code without, which must be wrong."""
        if isinstance(got, str):
            return self.check(False, f"{place}, {what}: {got}")
        error, metrics = errors(got, expected)
        bound = min(self.bound, 2 * own)
        self.check(error < bound, f"{place}, {what}: {error:.1e} (stock {own:.1e})")
        self.check(metrics < METRICS, f"{place}, {what}: metrics are {metrics:.1e} off")
        wrong = ""
        if stock is not None:
            difference = errors(stock, expected)[0]
            self.check(not difference <= WRONG, f"{place}, {what}: stock is {difference:.1e} off")
            wrong = f"{difference:.1e}"
        self.rows.append((place, what, f"{error:.1e}", f"{metrics:.1e}", wrong))

    def check_same(self, place: str, stock: Steps, patched: Steps | str) -> None:
        """Bit for bit."""
        equal = not isinstance(patched, str) and all(
            a[1] == b[1]
            and all(
                torch.allclose(x, b[0][name], rtol=0, atol=0, equal_nan=True)
                for name, x in a[0].items()
            )
            for a, b in zip(stock, patched, strict=True)
        )
        self.check(equal, f"{place}: the patched code without our flags differs from stock")

    def check_refused(self, place: str, what: str, got: Steps | str, words: str) -> None:
        named = isinstance(got, str) and re.match(words, got) is not None
        self.check(named, f"{place}, {what}: not refused so: {got!s:.200}")

    def close(self, path: str) -> None:
        """Write the table to ``path``; exit with 1 if anything failed."""
        write(path, self.rows, self.failures)


def write(path: str, rows: list[tuple[str, ...]], failures: list[str]) -> None:
    """The table of errors; exit with 1 if anything failed."""
    head = ("ranks", "aggregation", "gradient", "metrics", "stock's gradient")
    lines = [head, ("---",) * len(head), *rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    Path(path).write_text(text)
    sys.exit("\n".join(failures) or None)
