"""Functions for ``--loss-aggregation-batch``."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore import LateMicrobatch, read_batch

_calls = itertools.count()


def reject_all_after_two(batch: Any) -> Microbatch:
    """Two microbatches as they are, and then nothing but rejected samples."""
    microbatch = read_batch(batch)
    rejected = torch.full((microbatch.num_samples,), next(_calls) >= 2)
    return dataclasses.replace(microbatch, rejected=rejected)


def after_image(batch: Any) -> Microbatch:
    """The mask of a model that puts three positions of an image before the text."""
    return Microbatch(torch.nn.functional.pad(batch["loss_mask"], (3, 0)))


def number_of_rows(batch: Any) -> LateMicrobatch:
    return LateMicrobatch(len(batch["tokens"]))
