"""Settings of the hook and of the flags that are one of a few words."""

from __future__ import annotations

from megatron_loss_agg.errors import ModeError

CHOICES: dict[str, tuple[str, ...]] = {
    "empty_step": ("step", "error", "skip"),  # what is done about a step without any token
    "unmeasured": ("refuse", "trust"),  # and about a host whose averaging cannot be measured
    "mask": ("batch", "model"),  # who makes the loss mask
    "mtp": ("host", "same"),  # losses of multi-token prediction: the host's, or as the main loss
    "moe": ("host", "step"),  # who weighs the auxiliary losses of routers
}
"""The values of each; the first is the default."""


def checked_choices(**given: str) -> dict[str, str]:
    """``given``, a value for each setting.

    Raises:
        ModeError: a value that the setting does not have.
    """
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise ModeError(f"{name}={value!r}; expected one of {', '.join(CHOICES[name])}")
    return given
