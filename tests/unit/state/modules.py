"""torch's modules."""

from __future__ import annotations

from torch import Tensor, nn

from tests.unit.eager import randn
from tests.unit.state.cases import Case, case, frozen


@case
def dropout_that_is_switched() -> Case:
    module = nn.Dropout(1.0).eval()

    def function(x: Tensor) -> Tensor:
        return module(x) if not module.training else x * 0

    return Case(function, module.train)


@case
def batch_norm_eps() -> Case:
    module = frozen(nn.BatchNorm1d(4).eval())
    return Case(lambda x: module(x), lambda: setattr(module, "eps", 0.5))


@case
def activation_of_a_module() -> Case:
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    return Case(lambda x: module(x - 4), lambda: module.__setitem__(0, nn.Sigmoid()))


@case
def parameter_rebound() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "weight", nn.Parameter(randn(4, 4), requires_grad=False)))


@case
def bias_removed() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "bias", None))


@case
def buffer_rebound() -> Case:
    module = nn.Module()
    module.register_buffer("scale", randn(4))
    return Case(lambda x: x * module.scale, lambda: setattr(module, "scale", randn(4)))


@case
def module_list_that_changes() -> Case:
    layers = nn.ModuleList([frozen(nn.Linear(4, 4))])

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return Case(function, lambda: layers.append(frozen(nn.Linear(4, 4))))


@case
def hook_registered_later() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: module.register_forward_hook(lambda m, args, y: y * 2))


@case
def forward_replaced() -> Case:
    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: setattr(module, "forward", lambda x: x * 2))


@case
def parametrized_later() -> Case:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    module = frozen(nn.Linear(4, 4))
    return Case(lambda x: module(x), lambda: nn.utils.parametrize.register_parametrization(module, "weight", Doubled()))


@case
def bound_forward() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(4), requires_grad=False)
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale

    model = Model()
    return Case(model.forward, lambda: setattr(model, "scale", 3.0))
