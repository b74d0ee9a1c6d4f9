"""slime: replaces the denominators that slime ships with its samples, see `denominators`.

Relies on ``--rollout-data-postprocess-path``: slime calls this function on every rank that trains,
with the rank's data for all optimizer steps of a rollout.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from megatron_loss_agg.frameworks import is_installed, required_release
from megatron_loss_agg.frameworks.denominators import OLDEST_SLIME, Package, replace_denominators

SETTINGS = """\
--rollout-data-postprocess-path megatron_loss_agg.frameworks.slime.postprocess
--train-env-vars '{"MEGATRON_LOSS_AGG_FLAGS":"--loss-aggregation=prompt_mean"}'
"""
SLIME = Package(
    "slime",
    batch_kind="slime",
    sizes_key="global_batch_sizes",
    upgrade_hint=f"Use slime of {OLDEST_SLIME} or later.",
    patch_hint="apply patches/slime/624b824.patch to slime",
)

if is_installed("slime"):  # not where this module is imported only to read it
    with required_release("slime", "slime", OLDEST_SLIME):
        importlib.import_module("slime.utils.dp_schedule")


def postprocess(args: Namespace, rollout_id: Any = None, rollout_data: Any = None) -> None:
    """Replace the denominators in ``rollout_data``; do nothing without an aggregation.

    Raises:
        HostError: slime is too old, or has a setting with which it reduces a loss differently.
        OptionError: the aggregation needs more than slime's samples have.
    """
    replace_denominators(args, rollout_data, SLIME)
