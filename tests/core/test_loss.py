"""weighted_sum: the value, no NaN from positions of weight 0, and the autograd path kept."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_loss_agg import predicting_mask, weighted_sum
from megatron_loss_agg.errors import MaskError

F64 = torch.float64


def sum_and_gradient(w: list[float], loss: list[float]) -> tuple[float, list[float]]:
    leaf = torch.tensor(loss, requires_grad=True)
    total = weighted_sum(torch.tensor(w), leaf)
    total.backward()
    assert total.shape == ()
    return total.item(), leaf.grad.tolist()


weights = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1e-3, 2.0])


@given(st.lists(st.tuples(weights, st.floats(-1e6, 1e6)), max_size=20))
@settings(deadline=None)
def test_value_and_gradient_are_those_of_a_loop(pairs):
    w, loss = (torch.tensor([pair[k] for pair in pairs], dtype=F64) for k in (0, 1))
    total = weighted_sum(w, loss.requires_grad_())
    total.backward()
    size = sum(abs(a * b) for a, b in pairs)
    assert total.item() == pytest.approx(math.fsum(a * b for a, b in pairs), abs=1e-14 * size)
    assert torch.equal(loss.grad, w)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_positions_of_weight_zero_are_not_read(poison):
    assert sum_and_gradient([0.5, 0.0, 0.5], [1.0, poison, 3.0]) == (2.0, [0.5, 0.0, 0.5])
    assert sum_and_gradient([-0.5, -0.0, 2.0], [4.0, poison, 1.0]) == (0.0, [-0.5, 0.0, 2.0])


def test_a_finite_sum_on_a_cpu_needs_no_repair():
    with mock.patch("megatron_loss_agg.weights.where_weighted", side_effect=AssertionError):
        assert sum_and_gradient([0.5, 0.0], [1.0, 2.0]) == (0.5, [0.5, 0.0])


def test_nan_at_a_position_that_counts_is_shown():
    assert math.isnan(sum_and_gradient([1.0, 0.0], [math.nan, 1.0])[0])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1, 0), (3,)])
def test_no_tokens_keep_the_autograd_path(shape):
    # A rank without tokens must still run backward, or its peers hang in the attention's
    # collectives.
    parameter = torch.ones(shape, requires_grad=True)
    total = weighted_sum(torch.zeros(shape), parameter * 2)
    assert total.item() == 0 and total.grad_fn is not None
    total.backward()
    assert torch.equal(parameter.grad, torch.zeros(shape))


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3), (3,)), ((3,), (2, 3)), ((1, 3), (3, 1)), ((6,), (2, 3)), ((), (1,))],
)
def test_shapes_must_be_equal(left, right):
    with pytest.raises(MaskError) as error:
        weighted_sum(torch.ones(left), torch.ones(right))
    assert str(left) in str(error.value) and str(right) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_masks_of_any_kind_are_weights_and_move(dtype):
    mask = torch.tensor([0, 1, 1]).to(dtype)
    for losses in (torch.tensor([5, 6, 7]), torch.tensor([5.0, 6.0, 7.0])):
        assert weighted_sum(mask, losses).item() == 13
    assert predicting_mask(mask, torch.tensor([0, 2, 3])).tolist() == [1, 0, 0]


def test_complex_losses_are_refused():
    with pytest.raises(MaskError, match=r"token_loss is a torch\.complex64 .*; expected a real"):
        weighted_sum(torch.ones(1), torch.ones(1, dtype=torch.complex64))


def test_the_wider_dtype_is_summed_and_the_gradient_keeps_the_losses():
    # 4096 terms of 1 in bf16 would stop at 256.
    loss = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
    total = weighted_sum(torch.full((4096,), 1 / 4096), loss)
    assert total.dtype == torch.float32 and total.item() == 1.0
    total.backward()
    assert loss.grad.dtype == torch.bfloat16
    in_fp64 = weighted_sum(torch.full((2,), 1 / 3, dtype=F64), torch.ones(2, requires_grad=True))
    assert in_fp64.item() == pytest.approx(2 / 3, rel=1e-15)
    # 200 * 2 + 100 * 3 = 700, which uint8 cannot hold.
    integers = (torch.tensor(x, dtype=torch.uint8) for x in ([2, 3], [200, 100]))
    total = weighted_sum(*integers)
    assert total.item() == 700 and total.dtype == torch.float32


@pytest.mark.parametrize("number", [2**12, 2**16, 2**22])
def test_many_tokens_add_up_whatever_the_cpu(number):
    loss = torch.rand(number, generator=torch.Generator().manual_seed(0)) + 1
    w = torch.full_like(loss, 1 / number)
    exact = float(loss.double().mean())
    assert float(weighted_sum(w, loss)) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("poison", [1.0, math.nan])
def test_it_compiles_as_one_graph(poison):
    w = torch.tensor([0.0, 0.5, 2.0])
    loss = torch.tensor([poison, 2.0, 3.0], requires_grad=True)
    total = torch.compile(weighted_sum, fullgraph=True, backend="aot_eager")(w, loss)
    total.backward()
    assert total.item() == 7.0
    assert torch.equal(loss.grad, w)
