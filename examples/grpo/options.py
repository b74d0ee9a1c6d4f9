"""The flags of `train.py`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from examples.grpo import task
from megatron_loss_agg import aggregation

# Modes that need at most the prompts' ids and a divisor.
MODES = [
    name
    for name, mode in aggregation.MODES.items()
    if name not in ("nested_mean", "custom") and {*mode.path} <= {"microbatch", "prompt", "sample"}
]

_MIN_VALUES = {
    "steps": 1,
    "save_every": 1,
    "prompts": 1,
    "answers": 2,  # the advantage of a single answer is 0
    "updates": 1,
    "warmup": 0,
    "context_parallel": 1,
    "hidden": 1,
    "layers": 1,
}


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run. Sizes are those of the whole step, over all ranks.

    Raises:
        ValueError: a bad value; the error names its flag.
    """

    cpu: bool = _flag(False, "run on CPUs over gloo")
    output: Path = _flag(Path("build/grpo/run"), "folder of all that is written")  # noqa: RUF009
    resume: bool = _flag(False, "go on from the newest checkpoint in the output folder")
    mode: str = _flag("prompt_mean", "aggregation of the policy loss")
    seed: int = _flag(1, "of weights, prompts and samples")
    steps: int = _flag(160, "batches of rollouts")
    save_every: int = _flag(40, "steps from one checkpoint to the next")
    largest: int = _flag(4, "largest number in a prompt, one digit")
    prompts: int = _flag(16, "prompts a batch of rollouts")
    answers: int = _flag(16, "answers sampled to each prompt")
    updates: int = _flag(2, "optimizer steps a batch of rollouts; each takes whole prompts")
    token_budget: int = _flag(384, "tokens of a microbatch, padding included")
    warmup: int = _flag(50, "supervised steps before all else, too few to learn the sums")
    warmup_lr: float = _flag(3e-3, "learning rate of the warm-up")
    context_parallel: int = _flag(2, "context-parallel ranks; the others are data-parallel")
    hidden: int = _flag(64, "width of the model")
    layers: int = _flag(2, "layers of the model")
    lr: float = _flag(3e-3, "learning rate of the first step; it falls linearly to 0")
    clip: float = _flag(0.2, "clip of the importance ratio")
    kl: float = _flag(0.01, "coefficient of the divergence from the model after the warm-up")
    entropy: float = _flag(0.003, "coefficient of the entropy bonus")

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"--mode {self.mode}; expected one of {', '.join(MODES)}")
        for name, least in _MIN_VALUES.items():
            self._check(name, getattr(self, name) >= least, f"at least {least}")
        self._check("largest", 0 <= self.largest <= 9, "one digit")
        sums = (self.largest + 1) ** 2
        self._check("prompts", self.prompts <= sums, f"at most the {sums} of --largest")
        if self.prompts % self.updates:
            raise ValueError(
                f"--prompts {self.prompts} cannot be dealt to --updates {self.updates} optimizer "
                "steps; expected a multiple"
            )
        # A sample is padded so that it can be split over the context-parallel ranks.
        multiple = 2 * self.context_parallel
        longest = -(-(task.PROMPT + task.MAX_ANSWER) // multiple) * multiple
        text = f"at least {longest}, the longest sample"
        self._check("token_budget", self.token_budget >= longest, text)

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{_as_flag(name)} {getattr(self, name)}; expected {expected}")

    def training(self) -> dict[str, Any]:
        """The flags that a run's results depend on."""
        return {k: v for k, v in vars(self).items() if k not in ("output", "resume", "save_every")}


def parse(arguments: list[str] | None = None) -> Options:
    """`Options` from the command line."""
    parser = argparse.ArgumentParser(
        prog="train.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for entry in fields(Options):
        flag, text = _as_flag(entry.name), entry.metadata["help"]
        if isinstance(entry.default, bool):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = type(entry.default) if entry.name != "output" else Path
            parser.add_argument(flag, type=kind, default=entry.default, help=text)
    values = parser.parse_args(arguments)
    try:
        return Options(**vars(values))
    except ValueError as error:
        parser.error(str(error))
