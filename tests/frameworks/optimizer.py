"""What stands in for a framework's optimizer."""

from __future__ import annotations

from typing import Any

from tests.host.reference import Gradient


class KeepGradients:
    """Keeps the gradient of each step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: list[Gradient] = []
        self.grad_norms_by_group: dict[str, float] = {}
        self.param_groups = [{"lr": 0.0}]

    def zero_grad(self) -> None: ...

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def step(self) -> tuple[bool, float, int]:
        from tests.host import gradients

        self.gradients.append(gradients.of(self.model))
        return True, 0.0, 0
