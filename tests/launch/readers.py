"""Functions for ``--loss-aggregation-batch``."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from megatron_loss_agg import Microbatch
from megatron_loss_agg.mcore.batches import read_batch

_calls = itertools.count()


def reject_all_after_two(batch: Any) -> Microbatch:
    """Two microbatches as they are, and then nothing but rejected samples."""
    microbatch = read_batch(batch)
    rejected = torch.full((microbatch.num_samples,), next(_calls) >= 2)
    return dataclasses.replace(microbatch, rejected=rejected)
