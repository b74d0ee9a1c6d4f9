"""The comparison of a framework for RL: its batch, its runs, and the errors of each.

A run is a training of two copies of the framework, which may be the same: as it is; and with our
adapter in the processes that train, and a seam's patch where it has one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_loss_agg.launch.flags import VARIABLE
from tests.frameworks.harness import (
    DIVISOR,
    ENTROPY,
    FP32,
    KL,
    Terms,
    attempt,
    grpo,
    token_values,
)
from tests.host.harness import run_host_ranks
from tests.host.reference import Gradient, of_samples, relative_error
from tests.host.steps import VOCAB, Places, Weights, weights_with
from tests.oracle import Sample

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

    def trained_mask(self) -> tuple[float, ...]:
        """The mask, 0 for a removed sample."""
        return tuple(float(m and not self.removed) for m in self.mask)

    def tokens(self) -> Tensor:
        """Those of the prompt are the same for all its samples."""
        length = len(self.mask)
        parts = (self.prompt, self.prompt_length), (100 * self.rollout + length, length)
        seeded = [(torch.Generator().manual_seed(seed), n) for seed, n in parts]
        return torch.cat([torch.randint(VOCAB, (n,), generator=x) for x, n in seeded])


def answers(table: str) -> tuple[Answer, ...]:
    """A line: prompt and its length, rollout, mask of the answer, reward, and if it is removed."""

    def answer(line: str) -> Answer:
        prompt, length, rollout, mask, reward, *removed = line.split()
        bits = tuple(map(int, mask))
        return Answer(int(length), bits, int(prompt), int(rollout), float(reward), bool(removed))

    return tuple(map(answer, table.strip().splitlines()))


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


class LogProbs(NamedTuple):
    """fp32, of every sample's answer tokens: of the policy that generated, and of the reference."""

    old: list[Tensor]
    ref: list[Tensor]


class Step(NamedTuple):
    """The result of an optimizer step, or the expected one."""

    gradient: Gradient
    metrics: dict[str, float]


Losses = Callable[[Tensor, Tensor, Tensor, Tensor, float], Terms]
"""(log-probabilities, entropy, old, reference, reward) of a sample's tokens -> `loss`, metrics."""


def with_entropy(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    terms = grpo(lp, entropy, old, ref, reward)
    loss = terms["pg_loss"] + KL * terms["kl_loss"] - ENTROPY * terms["entropy_loss"]
    return {"loss": loss, **terms}


def with_score(lp: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, reward: float) -> Terms:
    """Without entropy; the KL term has the gradient through the sampling probability too."""
    terms = grpo(lp, entropy, old, ref, reward)
    return {"loss": terms["pg_loss"] + KL * terms["kl_loss"] * (lp - lp.detach()).exp()}


def nll(lp: Tensor, *_: Any) -> Terms:
    return {"loss": -lp}


@dataclass(frozen=True)
class Run:
    """A training of a framework's code, and its expected result.

    With neither ``losses`` nor ``refusal``, it is there for others to be compared with.
    """

    flags: str = ""  # ours; none for stock code
    options: dict[str, Any] = field(default_factory=dict)  # the framework's own
    losses: Losses | None = None  # of tokens; the run computes their sum by ``weights``
    weights: tuple[Weights, ...] = ()  # by step
    refusal: str = ""  # a pattern that its error must match from the start
    near: str = ""  # the stock run that it must differ from; or see `Report.near`
    flagged_rank: int | None = None  # the only rank with the flags; None if all have them


Runs = dict[str, Run]


def flags(mode: str, rejected: str = "", empty: str = "count", divisor: float = DIVISOR) -> str:
    """For MEGATRON_LOSS_AGG_FLAGS."""
    text = f"--loss-aggregation {mode}"
    text += f" --loss-aggregation-divisor {divisor}" if mode == "constant" else ""
    text += f" --loss-aggregation-empty {empty}" if empty != "count" else ""
    return text + (f" --loss-aggregation-rejected {rejected}" if rejected else "")


def key(text: str) -> dict[str, Any]:
    """The `flags` as a framework's configuration has them."""
    words = text.split()
    names = [word.removeprefix("--loss-aggregation").strip("-") or "mode" for word in words[::2]]
    values: dict[str, Any] = dict(zip(names, words[1::2], strict=True))
    return values | ({"divisor": float(values["divisor"])} if "divisor" in values else {})


def exact(
    losses: Losses,
    mode: str,
    rejected: str = "",
    *,
    batch: Batch = STEPS,
    divisor: float = DIVISOR,
    empty: str = "count",
    places: Callable[[Sequence[Answer]], Places] | None = None,
    our_flags: str | None = None,
    near: str = "",
    **options: Any,
) -> Run:
    """A run that must be exact, with the weights of `tests.oracle`.

    Args:
        our_flags: in place of those of the mode and its options.
        rejected: ``skip`` or ``count`` for removed samples; otherwise they are without tokens.
        places: a step's samples by rank and microbatch; by default all in one.
    """
    oracle_options = {"divisor": divisor if mode == "constant" else None, "empty": empty}

    def weights(step: Sequence[Answer]) -> Weights:
        masks = [
            tuple(map(float, a.mask)) if rejected == "count" else a.trained_mask() for a in step
        ]
        present = tuple(i for i, a in enumerate(step) if not (rejected == "skip" and a.removed))
        at = places(step) if places else ((present,),)
        samples = [Sample(m, a.prompt, a.rollout) for m, a in zip(masks, step, strict=True)]
        sample_weights = weights_with(mode, at, lambda i, _: samples[i], **oracle_options)
        return [(i, w) for i, w in sample_weights if not step[i].removed]

    if our_flags is None:
        our_flags = flags(mode, rejected, empty, divisor)
    return Run(our_flags, options, losses, tuple(map(weights, batch)), near=near)


stock = partial(exact, our_flags="")
"""Code without our flags that has the mode as one of its own."""


def refused(mode: str, rejected: str = "", **options: Any) -> Run:
    return Run(flags(mode, rejected), options, refusal=r"\w+Error:")


def reweighed(run: Run, factor: Callable[[int], float]) -> Run:
    """The run with each token's weight times a factor of its place in the answer."""
    changed = (
        [(i, [x * factor(t) for t, x in enumerate(sample)]) for i, sample in step]
        for step in run.weights
    )
    return replace(run, weights=tuple(changed))


ON_ONE_RANK: Runs = {
    "on one rank alone": Run(
        flags("token_mean"),
        refusal=r"OptionError: .* got none on rank\(s\) \[0",
        flagged_rank=1,
    )
}
"""Runs that would wait for ever: the other ranks would not count."""

REFUSALS = (ValueError, NotImplementedError)
"""The errors with which a framework, or an adapter, refuses a run."""
METRICS = 1e-5  # bound of a metric's error in fp32, in which terms cancel
WRONG = 1e-3  # the least error of stock code, where the page says that its mean is another


@dataclass
class Report:
    """Collects rows of the table, and failures.

    Args:
        use: lets a process import the framework from a folder.
        train: (log-probabilities, our key for its configuration, **options) -> steps, on a rank.
            The option ``configured`` of a run says that the key has our flags, and not the
            environment.
        checkouts: of the stock code and of ours, which are the same where nothing is patched.
        own: runs of the stock code.
        runs: of our code.
        bound: of a gradient's error, besides four times that of the stock code.
        mtp: settings of MTP, whose losses are then a part of every loss.
        ranks: how many train.
        sizes: of process groups, under Megatron's names.
        adapt: lets a process that trains our code take the adapter, after ``use`` and before
            anything else.
    """

    use: Callable[[str], None]
    train: Callable[..., list[Step]]
    checkouts: tuple[str, str]
    own: Runs
    runs: Runs
    bound: float = FP32
    batch: Batch = STEPS
    vocab: int = VOCAB
    mtp: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    sizes: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[], None] | None = None
    rows: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    references: dict[bool, Any] = field(default_factory=dict)

    def compare(
        self, place: str, cp: int, rope: bool = True, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All runs, with further options of the framework; ``rope`` if the model knows positions.

        Returns:
            All steps, or errors, by name: of the stock code, and of ours.
        """
        log_probs, expected = self.reference(rope)

        def trained(checkout: str, adapt: Callable[[], None] | None, *runs: Run) -> list[Any]:
            changed = [replace(run, options={**run.options, **options}) for run in runs]
            sizes = {"cp": cp, **self.sizes}
            given = self.use, adapt, self.train, checkout, sizes, self.vocab, changed, log_probs
            by_rank = run_host_ranks(_train, self.ranks, *given)
            for steps, run in zip(zip(*by_rank, strict=True), runs, strict=True):
                refused = [bool(re.match(run.refusal, str(x))) for x in steps]
                alone = run.flagged_rank is None or all(refused)
                self.check(alone, f"{place}, on rank {run.flagged_rank} alone: {steps!s:.500}")
            # The first rank's: after the reduction it is the same on all.
            return by_rank[0]

        stock_checkout, our_checkout = self.checkouts
        found = iter(trained(our_checkout, self.adapt, *self.own.values(), *self.runs.values()))
        theirs = dict(zip(self.own, trained(stock_checkout, None, *self.own.values()), strict=True))
        own_errors = {}
        for name, steps in theirs.items():
            self.check(same(steps, next(found)), f"{place}, {name} without our flags is not stock")
            if self.own[name].losses:
                own_errors[name], _ = errors(steps, expected[name])
                off = f"{own_errors[name]:.1e}"
                self.check(own_errors[name] < self.bound, f"{place}: stock {name} is {off} off")
                self.rows.append((place, f"stock's own: {name}", "", "", off))
        ours = dict(zip(self.runs, found, strict=True))
        for name, steps in ours.items():
            what, run, near = f"{place}, {name}", self.runs[name], self.near(name)
            if run.refusal or isinstance(steps, str):
                refused = isinstance(steps, str) and run.refusal and re.match(run.refusal, steps)
                self.check(bool(refused), f"{what}: {steps!s:.500}")
            elif run.losses:
                gradient, metrics = errors(steps, expected[name])
                own_error = own_errors.get(near, max(own_errors.values(), default=self.bound))
                holds = gradient < min(self.bound, 4 * own_error) and metrics < METRICS
                off = f"{gradient:.1e}", f"{metrics:.1e}"
                self.check(holds, f"{what}: {off} off; stock {own_error:.1e}")
                own, wrong = self.own[near], ""
                if (own.losses, own.weights) != (run.losses, run.weights):
                    difference, _ = errors(theirs[near], expected[name])
                    wrong = f"{difference:.1e}"
                    self.check(not difference <= WRONG, f"{what}: stock is only {wrong} off")
                self.rows.append((place, name, *off, wrong))
        return theirs, ours

    def near(self, name: str) -> str:
        """The stock run that has the name of ours; or its options; or is the first."""
        run = self.runs[name]
        alike = (x for x, own in self.own.items() if own.options == run.options)
        return run.near or (name if name in self.own else next(alike, next(iter(self.own))))

    def reference(self, rope: bool) -> tuple[list[LogProbs], dict[str, list[Step]]]:
        """Log-probabilities near the model's, by step; and the expected steps of each run.

        Computed once.
        """
        if rope not in self.references:
            runs = [item for of in (self.own, self.runs) for item in of.items() if item[1].losses]
            given = dict(runs), rope, self.batch, self.vocab, self.mtp
            (self.references[rope],) = run_host_ranks(_reference, 1, *given)
        return self.references[rope]  # type: ignore[no-any-return]

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failures.append(what)


def _train(
    use: Callable[[str], None],
    adapt: Callable[[], None] | None,
    train: Callable[..., list[Step]],
    checkout: str,
    sizes: dict[str, Any],
    vocab: int,
    runs: list[Run],
    log_probs: list[LogProbs],
) -> list[list[Step] | str]:
    """On a rank: the steps of each run, or its error."""
    from tests.host import gpt

    use(checkout)
    if adapt is not None:
        adapt()
    gpt.initialize(**sizes)
    gpt.VOCAB = vocab
    found = []
    for run in runs:
        options = dict(run.options)
        configured = options.pop("configured", False)
        has_flags = not configured and run.flagged_rank in (None, dist.get_rank())
        os.environ[VARIABLE] = run.flags if has_flags else ""
        configuration = key(run.flags) if configured else {}
        given = partial(train, log_probs, configuration, **options)
        found.append(attempt(given, errors=REFUSALS))
    return found


def _reference(runs: Runs, rope: bool, batch: Batch, vocab: int, mtp: dict[str, Any]) -> Any:
    """On the only rank: the samples alone, in fp64."""
    from tests.host import gpt

    gpt.initialize()
    gpt.VOCAB = vocab
    model = gpt.build(**mtp)
    if not rope:
        model.position_embedding_type = "none"
    given, found = [], {name: [] for name in runs}
    for number, step in enumerate(batch):
        tokens = [token_values(model, a.tokens(), a.prompt_length) for a in step]
        generator = torch.Generator().manual_seed(number)
        log_probs = LogProbs(*(_noisy([lp for lp, _ in tokens], generator) for _ in range(2)))
        given.append(log_probs)
        zipped = list(zip(step, tokens, *log_probs, strict=True))

        def terms(losses: Losses, zipped: Any = zipped) -> Iterable[Terms]:
            for answer, values, old, ref in zipped:
                sample_terms = losses(*values, old.double(), ref.double(), answer.reward)
                yield _with_mtp(sample_terms, model, answer)

        kinds = {run.losses for run in runs.values()}
        by_losses = {losses: of_samples(model, terms(losses), ["loss"]) for losses in kinds}
        for name, run in runs.items():
            references, w = by_losses[run.losses], run.weights[number]
            metrics = {key: term.loss(w) for key, term in references.items()}
            metrics["loss"] -= metrics.get("aggregated_mtp_loss", 0.0)
            found[name].append(Step(references["loss"].gradient(w), metrics))
    return given, found


def _noisy(log_probs: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    noise = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(lp + 0.1 * noise(lp.shape)).detach().float() for lp in log_probs]


def _with_mtp(terms: Terms, model: Any, answer: Answer) -> Terms:
    """With the losses of MTP: at depth d, position ``t - 1 - d`` predicts token ``t``, too."""
    depths = model.config.mtp_num_layers
    if not depths:
        return terms
    depth_logits = []

    def keep_logits(labels: Tensor, logits: Tensor) -> Tensor:
        depth_logits.append(logits.squeeze(1))
        return torch.zeros_like(labels, dtype=torch.float64)

    tokens = answer.tokens()
    model.compute_language_model_loss = keep_logits
    positions = torch.arange(len(tokens)).unsqueeze(0)
    model(tokens[None], positions, None, mtp_kwargs={"mtp_labels": tokens[None]})
    del model.compute_language_model_loss
    answered = torch.arange(answer.prompt_length, len(tokens))
    losses = torch.zeros(len(answered), dtype=torch.float64)
    for depth, logits in enumerate(depth_logits, start=1):
        predicting = answered - 1 - depth
        log_p = logits[predicting.clamp(min=0)].log_softmax(-1)
        depth_losses = -log_p.gather(-1, tokens[answered, None]).squeeze(-1)
        losses = losses + depth_losses * (predicting >= 0)
    losses = model.config.mtp_loss_scaling_factor / depths * losses
    return {**terms, "loss": terms["loss"] + losses, "aggregated_mtp_loss": losses}


def errors(got: list[Step], expected: list[Step]) -> tuple[float, float]:
    """The largest of all steps: of the gradient, norm-wise, and of any metric, both relative.

    A metric's error is relative to the step's largest metric, since the terms of a loss cancel.
    NaN is the largest.
    """
    gradient_errors, metric_errors = [], [0.0]
    for (gradient, metrics), e in zip(got, expected, strict=True):
        gradient_errors.append(relative_error(gradient, e.gradient))
        largest = max(map(abs, e.metrics.values()))
        known = metrics.keys() & e.metrics.keys()
        metric_errors += [abs(metrics[name] - e.metrics[name]) / largest for name in known]
    # max() of Python would pass over NaN.
    gradient, metric = (
        float(torch.tensor(x, dtype=torch.float64).max()) for x in (gradient_errors, metric_errors)
    )
    return gradient, metric


def same(stock: list[Step], patched: list[Step] | str) -> bool:
    """Bit for bit, where NaN is NaN."""
    if isinstance(patched, str):
        return False
    equal = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    return all(
        a.metrics == b.metrics and all(equal(x, b.gradient[name]) for name, x in a.gradient.items())
        for a, b in zip(stock, patched, strict=True)
    )
