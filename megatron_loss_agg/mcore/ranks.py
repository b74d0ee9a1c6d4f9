"""This rank's place in the host's process groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_loss_agg.errors import HostError


@dataclass(frozen=True)
class Ranks:
    """The groups that a step's loss concerns."""

    data: dist.ProcessGroup  # data parallel, without context parallelism
    context: dist.ProcessGroup
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    last_stage: bool  # whether this rank is on the pipeline stage that computes the loss

    @classmethod
    def of(cls, pg_collection: Any = None) -> Ranks:
        """From the schedule's own collection where it got one, else from Megatron's globals."""
        from megatron.core import parallel_state

        if pg_collection is not None:
            try:
                groups = [getattr(pg_collection, name) for name in ("dp", "cp", "tp", "pp")]
            except AttributeError as error:
                raise HostError(
                    f"the schedule's {type(pg_collection).__name__} lacks a group ({error}); "
                    "expected dp, cp, tp and pp"
                ) from error
            data, context, tensor, pipeline = groups
            last_stage = dist.get_rank(pipeline) == dist.get_world_size(pipeline) - 1
            return cls(data, context, tensor, pipeline, last_stage)
        if not parallel_state.model_parallel_is_initialized():
            raise HostError(
                "Megatron's model parallel groups do not exist yet; "
                "call parallel_state.initialize_model_parallel first"
            )
        return cls(
            data=parallel_state.get_data_parallel_group(with_context_parallel=False),
            context=parallel_state.get_context_parallel_group(),
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        )

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads the step's batches for its tensor-parallel group."""
        return dist.get_rank(self.tensor) == 0
