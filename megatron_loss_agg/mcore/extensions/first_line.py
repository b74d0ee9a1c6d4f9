"""The first line of the log: how the hook reads the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_loss_agg.describe import formula, terms_in_words
from megatron_loss_agg.mcore.extension import Extension, MicrobatchLoss, Watch
from megatron_loss_agg.mcore.host import Call
from megatron_loss_agg.mcore.step import PlannedStep


class FirstLine(Extension):
    """Says on one rank what was understood of the first training step with an active token."""

    def __init__(self) -> None:
        self._said = False

    @contextmanager
    def around(self, call: Call, plan: PlannedStep | None) -> Iterator[Watch | None]:
        groups, splits = call.groups, set[str]()
        speaks = groups.last_stage and not any(
            map(dist.get_rank, (groups.dp, groups.cp, groups.tp))
        )
        if self._said or not speaks or not call.trains or plan is None:
            yield None
            return

        def on_loss(x: MicrobatchLoss) -> None:
            if x.copies > 1:
                splits.add("every context-parallel rank has the losses of all tokens")
            elif (split := x.local[x.first].split) is not None:
                splits.add(f"context-parallel split: {split}")

        yield on_loss
        if call.ends_step and not plan.is_empty:
            formulas = [
                formula(term.aggregation, None if plan.is_late else n.tokens, n.across)
                for term, n in ((call.terms[name], x.counts) for name, x in plan.terms.items())
            ]
            said = [terms_in_words(call.terms), *formulas, _step(call, plan), *sorted(splits)]
            said += [x.words() for x in call.extensions]
            print(f"loss aggregation: {'; '.join(filter(None, said))}", flush=True)
            self._said = True


def _step(call: Call, plan: PlannedStep) -> str:
    first, ranks = plan.first, call.scale.data_parallel_size
    kinds = {"rows" if x.starts is None else "packed sequences" for x in first.shapes}
    counts = first.counts
    counted = [f"{counts.samples} samples ({' and '.join(sorted(kinds, reverse=True))})"]
    for unit in ("rollouts", "prompts", "datasets"):
        number = getattr(counts, unit)
        counted += [] if number is None else [f"{number} {unit.replace('datasets', 'data sets')}"]
    tokens = f"{counts.tokens:.10g} tokens"
    if plan.is_late:
        tokens = "masks that the model makes"
    elif counts.active_tokens not in (None, counts.tokens):
        tokens = f"{counts.active_tokens} tokens whose masks sum to {counts.tokens:.10g}"
    return (
        f"a step of {counts.microbatches} microbatches on {ranks} data-parallel "
        f"rank{'s' if ranks > 1 else ''}, {', '.join(counted)}, {tokens}"
    )
