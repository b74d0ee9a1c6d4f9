"""weighted_sum: the value, no NaN from positions of weight 0, and the autograd path kept."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_loss_agg import predicting_mask, weighted_sum
from tests.fuzz.meaning import called, exact_or_refused, listed, products
from tests.fuzz.strategies import changes, weighed, with_changes

F64 = torch.float64


def sum_and_gradient(w: list[float], loss: list[float]) -> tuple[float, list[float]]:
    leaf = torch.tensor(loss, requires_grad=True)
    total = weighted_sum(torch.tensor(w), leaf)
    total.backward()
    assert total.shape == ()
    return total.item(), leaf.grad.tolist()


@given(weighed(), changes(["w", "token_loss"]))
@settings(max_examples=300, deadline=None)
@exact_or_refused
def test_value_and_gradient_are_those_of_a_loop(drawn, changes):
    given = with_changes(dict(zip(("token_loss", "w"), drawn, strict=True)), changes)
    total = called(weighted_sum, changes=changes, **given)
    w, losses = given["w"], given["token_loss"]
    floats = [x.dtype for x in (w, losses) if x.is_floating_point()] or [torch.float32]
    assert total.dtype == torch.promote_types(floats[0], floats[-1]) and total.dim() == 0
    terms, limit = products(losses, w), torch.finfo(total.dtype)
    size = sum(map(abs, terms))
    if size < limit.max / 4:
        room = 16 * limit.eps * size + limit.smallest_normal
        assert total.item() == pytest.approx(math.fsum(terms), rel=0, abs=room)
    if losses.requires_grad and not changes:
        (grad,) = torch.autograd.grad(total, losses)
        assert listed(grad) == pytest.approx(listed(w), rel=2 * torch.finfo(losses.dtype).eps)


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_masks_of_any_kind_are_weights_and_move(dtype):
    mask = torch.tensor([0, 1, 1]).to(dtype)
    for losses in (torch.tensor([5, 6, 7]), torch.tensor([5.0, 6.0, 7.0])):
        assert weighted_sum(mask, losses).item() == 13
    assert predicting_mask(mask, torch.tensor([0, 2, 3])).tolist() == [1, 0, 0]


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
    total = weighted_sum(*(torch.tensor(x, dtype=torch.uint8) for x in ([2, 3], [200, 100])))
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_without_values_add_up(device):
    with FakeTensorMode():
        loss = torch.ones(2, 3, device=device, requires_grad=True)
        total = weighted_sum(torch.ones(2, 3, device=device), loss)
    assert total.device.type == device and total.requires_grad
