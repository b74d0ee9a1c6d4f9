"""What the ranks of the tests run: Megatron-Bridge, in turn with several flags; the reference."""

from __future__ import annotations

import os
from typing import Any

from tests.frameworks.bridge.data import sequences
from tests.frameworks.reference import references
from tests.host.reference import Reference

MODES = ("token_mean", "sample_mean")
STOCK = "stock"


def train(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """What this rank sees without the plugin, and in each of `MODES`."""
    from megatron_loss_agg.mcore.flags import VARIABLE
    from megatron_loss_agg.mcore.install import install
    from tests.frameworks.bridge import recipe

    seen = {STOCK: recipe.main(arguments)}
    for mode in MODES:
        os.environ[VARIABLE] = f"--loss-aggregation {mode}"
        uninstall = install(watch_exit=False)
        seen[mode] = recipe.main(arguments)
        uninstall()
    return seen


def error_of(arguments: list[str]) -> str | None:
    """What training raises with the plugin."""
    from megatron_loss_agg.mcore.flags import VARIABLE
    from megatron_loss_agg.mcore.install import install
    from tests.frameworks.bridge import recipe
    from tests.host import harness

    os.environ[VARIABLE] = "--loss-aggregation token_mean"
    install(watch_exit=False)
    return harness.error_of(recipe.main, arguments)


def reference() -> Reference:
    """Every sample of the step alone, in fp64."""
    from tests.host import gpt

    gpt.initialize()
    model = gpt.build()
    losses = ({"loss": gpt.plain_losses(model, sequence)} for sequence in sequences())
    return references(model, losses)["loss"]
