"""One bad microbatch in a step is found, and named by its place, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from megatron_loss_agg import Microbatch, StepPlan
from megatron_loss_agg.errors import AggregationError, GroupError, MaskError
from tests.core.steps import aggregation

F64 = torch.float64
ONE = torch.tensor([0, 2, 4])


def pack(tokens: torch.Tensor, offsets: object, padded: object = None) -> Microbatch:
    offsets, padded = (None if x is None else torch.as_tensor(x) for x in (offsets, padded))
    return Microbatch(tokens, offsets, cu_seqlens_padded=padded)


GOOD = {
    "rows": Microbatch(torch.ones(2, 3)),
    "wide rows": Microbatch(torch.ones(2, 4)),
    "pack": pack(torch.ones(4), ONE),
    "padded pack": pack(torch.tensor([1.0, 1, 0, 1, 1, 0]), ONE, 3 * ONE // 2),
    "no rows": Microbatch(torch.ones(0, 3)),
    "no samples": pack(torch.zeros(2), [0]),
    "no tokens": Microbatch(torch.ones(2, 0)),
}
LONG = Microbatch(torch.ones(3, 30_000))  # more tokens than are read at once
# Were these read, the process would die.
FAR = [0, 2**63 - 1, -2]
BAD = {
    "negative": (Microbatch(torch.tensor([[-1.0, 2.0]])), MaskError),
    "NaN": (pack(torch.tensor([torch.nan, 1, 1, 1]), ONE), MaskError),
    "infinite": (Microbatch(torch.full((2, 3), torch.inf)), MaskError),
    "beyond fp32": (Microbatch(torch.full((1, 2), 1e39, dtype=F64)), MaskError),
    "first offset": (pack(torch.zeros(6), ONE + 1), GroupError),
    "padded first offset": (pack(torch.zeros(9), ONE, ONE + 1), GroupError),
    "padded decreasing": (pack(torch.zeros(9), 0 * ONE, [0, 3, 1]), GroupError),
    "decreasing": (pack(torch.zeros(4), [0, 3, 1]), GroupError),
    "wrapping": (pack(torch.ones(8), [*FAR, 8]), GroupError),
    "padded wrapping": (pack(torch.zeros(9), ONE, FAR), GroupError),
    "beyond the mask": (pack(torch.zeros(3), ONE), GroupError),
    "far beyond the mask": (pack(torch.ones(4), [0, 2, 2**40]), GroupError),
    "outside of samples": (pack(torch.ones(5), ONE), MaskError),
    "padding": (pack(torch.ones(8), ONE, 2 * ONE), MaskError),
    "padded place": (pack(torch.zeros(9), ONE, ONE // 2), GroupError),
}


def error_of(step: list[Microbatch]) -> AggregationError:
    with pytest.raises(AggregationError) as error:
        StepPlan.build(aggregation("sample_mean"), step)
    return error.value


@pytest.mark.parametrize("bad", BAD)
def test_the_first_bad_microbatch_is_named(bad):
    microbatch, kind = BAD[bad]
    alone = error_of([microbatch])
    assert isinstance(alone, kind)
    assert str(alone).startswith("microbatch 0: ")
    alike = GOOD["padded pack" if microbatch.cu_seqlens_padded is not None else "pack"]
    if microbatch.cu_seqlens is None:
        alike = Microbatch(torch.ones_like(microbatch.loss_mask))
    steps = {
        0: [*GOOD.values()],
        2: [*GOOD.values()],
        3: [LONG, *[GOOD["rows"]] * 4, LONG],
        4: [*[GOOD["no tokens"]] * 2, *[alike] * 3],
        5: [*GOOD.values()],
    }
    for place, step in steps.items():
        step[place:place] = [microbatch]
        # Neither the neighbours nor what comes later is taken for it.
        error = error_of([*step, BAD["negative"][0]])
        assert (type(error), str(error)) == (
            kind,
            str(alone).replace("microbatch 0", f"microbatch {place}"),
        )


def test_padded_offsets_that_decrease_are_named():
    text = "cu_seqlens_padded must start at 0 and not decrease"
    assert text in str(error_of([BAD["padded decreasing"][0]]))


def test_masks_that_are_large_together_are_good():
    large = Microbatch(torch.full((1, 2), 1e38))
    assert StepPlan.build(aggregation("sample_mean"), [large] * 8).weights(7).sum() > 0


def test_a_microbatch_whose_sum_is_beyond_fp32_is_named():
    error = error_of([GOOD["rows"], Microbatch(torch.full((2, 64), 4e36))])
    assert isinstance(error, MaskError)
    assert str(error).startswith("microbatch 1: loss_mask sums to 5.12e+38, beyond fp32")
