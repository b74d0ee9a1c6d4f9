"""Tensors on other devices, and devices that collectives take: fake ones stand in for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_loss_agg import Microbatch, weighted_sum
from megatron_loss_agg.collectives import fitting
from megatron_loss_agg.masks import brought_to_cpu
from megatron_loss_agg.microbatch import tensors_in
from megatron_loss_agg.weights import described, is_plain, token_weights_of


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("starts", [None, [0, 2]])
def test_weights_and_sums_are_made_of_fake_tensors(device, starts):
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask = torch.ones(2, 3, device=device)
        if starts is not None:
            mask, starts = mask.view(-1), torch.tensor([0, 2, 6], device=device)
        microbatch = Microbatch(mask, starts)
        assert is_plain(mask) and microbatch.num_samples == 2
        w = token_weights_of(torch.ones(2, dtype=torch.float64), mask, starts, torch.float32)
        loss = torch.ones_like(mask, requires_grad=True)
        total = weighted_sum(w, loss)
    assert w.shape == mask.shape and w.device.type == total.device.type == device
    assert total.requires_grad


def test_a_subclass_of_tensors_is_one():
    class Named(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2).as_subclass(Named)
    assert is_plain(x) and described(x) == "a torch.float32 tensor of shape (2,)"
    assert is_plain(torch.ones(2, device="meta"))


def test_what_has_no_plain_numbers_is_named():
    refused = {
        "a list": [1.0],
        "a torch.float32 tensor of shape (2,)": torch.ones(2).to_sparse(),
        "a torch.complex64 tensor of shape (2,)": torch.ones(2, dtype=torch.complex64),
    }
    for text, x in refused.items():
        assert not is_plain(x) and described(x) == text


def test_a_step_is_brought_to_the_cpu_in_one_wait(monkeypatch):
    waits = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("wait"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    blocking, to = [], torch.Tensor.to

    def copied(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        blocking.append(not options.get("non_blocking"))
        return to(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", copied)
    with FakeTensorMode():
        ids = torch.zeros(3, dtype=torch.int64, device="cuda")
        on_gpu = [Microbatch(torch.ones(3, 2, device="cuda"), prompt_ids=ids) for _ in range(4)]
        here = Microbatch(torch.ones(3, 2))
        step: list[Any] = [*on_gpu, {"a": on_gpu[0], "b": on_gpu[0], "c": here}]
        *moved, of_terms = brought_to_cpu(step)
        assert waits == ["wait"]
        assert all(x.is_cpu for m in moved for x in (m.loss_mask, m.prompt_ids))
        assert of_terms["a"] is of_terms["b"]
        assert of_terms["c"].loss_mask is here.loss_mask
        assert not on_gpu[0].loss_mask.is_cpu
        brought_to_cpu([here])
    assert waits == ["wait"] and blocking and not any(blocking)


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
    ],
)
def test_collectives_take_the_cpu_if_the_backend_does_and_else_the_accelerator(
    config, device, monkeypatch
):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with FakeTensorMode():
        here, there = torch.ones(2), torch.ones(2, device="cuda")
        assert fitting(here, object()).device.type == device
        stays = "cuda:nccl" in config
        assert fitting(there, object()).device.type == ("cuda" if stays else "cpu")


def test_tensors_are_found_in_any_nest():
    x, y, z = torch.ones(3).unbind()
    nest = {"a": [x, (y, {"b": z})], "c": [1, 2], "d": "text", "e": None, "f": []}
    found = tensors_in(nest)
    assert len(found) == 3 and all(a is b for a, b in zip(found, (x, y, z), strict=True))
