"""Kernels inside of models: methods, files, a DataLoader's workers, hooks of accelerate, mixed precision, DDP, functional calls."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

import fusegen as fg
from tests.unit.patching.importable import WIDTH, Model, scaled


def _pair() -> tuple[Model, Model]:
    """A plain model and a patched one with the same weights."""
    torch.manual_seed(0)
    plain = Model()
    patched = copy.deepcopy(plain)
    fg.patch(patched)
    return plain, patched


def _is_kernel(model: nn.Module) -> bool:
    """True if all layers of a patched model have run as kernels."""
    calls = [vars(layer).get("_old_forward") or vars(layer)["forward"] for layer in model.layers]
    return all(call.kinds and not any(isinstance(kind, str) for kind in call.kinds.values()) for call in calls)


# Methods.


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(float(WIDTH)))

    @fg.kernel
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.scale * x)


def test_a_kernel_on_a_method() -> None:
    first, second = Gate(), Gate()
    with torch.no_grad():
        second.scale.neg_()
    x = torch.randn(5, WIDTH)
    for gate in (first, second):
        torch.testing.assert_close(gate(x), x * torch.sigmoid(gate.scale * x))
        (found,) = torch.autograd.grad(gate(x).sum(), gate.scale)
        (wanted,) = torch.autograd.grad((x * torch.sigmoid(gate.scale * x)).sum(), gate.scale)
        torch.testing.assert_close(found, wanted)


# Files.

_READER = """
import sys, torch
import fusegen as fg
model, x, expected = torch.load(sys.argv[1], weights_only=False)
report_words = str(type(vars(model.layers[0])["forward"]).__name__)
torch.testing.assert_close(model(x), expected)
fg.unpatch(model)
assert "forward" not in vars(model.layers[0])
torch.testing.assert_close(model(x), expected)
print(report_words)
"""


def test_a_saved_model_runs_in_another_process(tmp_path: Path) -> None:
    _, model = _pair()
    x = torch.randn(5, WIDTH)
    torch.save((model, x, model(x).detach()), tmp_path / "model.pt")
    command = [sys.executable, "-c", _READER, str(tmp_path / "model.pt")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "FusedForward"


# Workers.


class Scaled(Dataset[Tensor]):
    """Items that a kernel computes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return scaled(torch.full((WIDTH,), float(index)), 0.5)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.deep)])
def test_workers_of_a_data_loader_call_kernels(method: str) -> None:
    data = Scaled()
    expected = torch.stack([data[index] for index in range(len(data))])
    loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method)
    torch.testing.assert_close(torch.cat(list(loader)), expected)


# Hooks of accelerate.


class AlignDevicesHook:
    """A hook as accelerate's of this name: it takes the arguments to a device before the call."""

    offload = False

    def __init__(self) -> None:
        self.input_device: torch.device | None = None

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.input_device = args[0].device
        return tuple(each.to("cpu", non_blocking=False) if hasattr(each, "to") else each for each in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


class Offloading(AlignDevicesHook):
    """As accelerate's hook with `offload`: the parameters have values during the call alone."""

    offload = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls = 0
        self.values = dict(module.named_parameters(recurse=False))
        self.post_forward(module, None)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.calls += 1
        for name, value in self.values.items():
            module._parameters[name] = nn.Parameter(value.detach().clone())
        return super().pre_forward(module, *args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for name, value in self.values.items():
            module._parameters[name] = nn.Parameter(value.detach().to("meta"))
        return output


def add_hook_to_module(module: Any, hook: AlignDevicesHook) -> None:
    """As accelerate's function of this name does it."""
    old_forward = module.forward
    module._old_forward, module._hf_hook = old_forward, hook

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old_forward)


def remove_hook_from_module(module: Any) -> None:
    """As accelerate's function of this name does it."""
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _dispatch(model: nn.Module) -> list[AlignDevicesHook]:
    """Hooks on every module that has parameters of its own, and on the layers, as a device map makes them."""
    hooks: list[AlignDevicesHook] = []
    for path, module in model.named_modules():
        if _has_own_parameters(module) or fnmatchcase(path, "layers.?"):
            hooks.append(AlignDevicesHook())
            add_hook_to_module(module, hooks[-1])
    return hooks


def test_hooks_of_accelerate_before_a_patch() -> None:
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    hooks = _dispatch(model)
    report = fg.patch(model)
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(model(x), plain(x))
    assert _is_kernel(model) and hooks[0].input_device == torch.device("cpu")
    report.undo()
    torch.testing.assert_close(model(x), plain(x))
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            remove_hook_from_module(module)
    torch.testing.assert_close(model(x), plain(x))


def test_hooks_of_accelerate_after_a_patch() -> None:
    plain, model = _pair()
    hooks = _dispatch(model)
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(model(x), plain(x))
    assert _is_kernel(model) and hooks[0].input_device == torch.device("cpu")
    fg.unpatch(model)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("is_patched_first", [False, True])
def test_weights_that_accelerate_offloads(is_patched_first: bool) -> None:
    plain = Model()
    model = copy.deepcopy(plain)
    if is_patched_first:
        report = fg.patch(model)
    hooks = []
    for module in model.modules():
        if _has_own_parameters(module):
            hooks.append(Offloading(module))
            add_hook_to_module(module, hooks[-1])
    if not is_patched_first:
        report = fg.patch(model)
    for rows in (5, 6):
        x = torch.randn(rows, WIDTH)
        torch.testing.assert_close(model(x), plain(x))
    assert {hook.calls for hook in hooks} == {2}
    assert "accelerate's hook" in str(report)


# Precision.


def _losses(model: nn.Module, steps: int = 10) -> list[float]:
    """Those of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    x, wanted = torch.randn(8, WIDTH), torch.randint(3, (8,))
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ten_steps_of_training() -> None:
    plain, patched = _pair()
    assert _losses(patched) == pytest.approx(_losses(plain), rel=0, abs=1e-5)
    assert _is_kernel(patched)


def _scaled_losses(model: nn.Module) -> list[float]:
    """Losses in float16 of autocast, with a GradScaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    torch.manual_seed(1)
    x, wanted = torch.randn(8, WIDTH), torch.randint(3, (8,))
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), wanted)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def test_float16_with_a_grad_scaler() -> None:
    plain, patched = _pair()
    assert _scaled_losses(patched) == pytest.approx(_scaled_losses(plain), rel=0, abs=5e-3)
    assert _is_kernel(patched)
    assert all(parameter.dtype is torch.float32 for parameter in patched.parameters())


# Processes and functional calls.


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel() -> None:
    plain, patched = _pair()
    wrapped = nn.parallel.DistributedDataParallel(patched)
    assert _losses(wrapped, 3) == pytest.approx(_losses(plain, 3), rel=0, abs=1e-5)
    assert _is_kernel(patched)


def _grads(function: Callable[..., Tensor], given: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    leaves = {name: value.detach().requires_grad_() for name, value in given.items()}
    return list(torch.autograd.grad(function(leaves, x).square().sum(), list(leaves.values())))


def test_functional_call_takes_the_given_parameters() -> None:
    plain, patched = _pair()
    x = torch.randn(5, WIDTH)
    before = patched(x)
    given = {name: value + 0.1 for name, value in plain.named_parameters()}

    def found(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(patched, leaves, (x,))

    def wanted(leaves: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(plain, leaves, (x,))

    torch.testing.assert_close(found(given, x), wanted(given, x))
    torch.testing.assert_close(_grads(found, given, x), _grads(wanted, given, x))
    torch.testing.assert_close(patched(x), before)
    assert _is_kernel(patched)
