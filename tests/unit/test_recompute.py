"""The rule for what a backward pass computes again: the same gradients, of more or fewer saved bytes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import fusegen as fg
from fusegen.errors import ArgumentError
from fusegen.options import Options
from tests.unit.eager import randn

Rule = Literal["auto", "all", "none"]
RULES: tuple[Rule, ...] = ("all", "auto", "none")  # by the bytes that they save
ROWS, WIDTH = 12, 32


def chain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, seed: int) -> Tensor:
    norm = F.layer_norm(x, (x.shape[-1],), weight, bias)
    return residual + fg.dropout(F.gelu(norm, approximate="tanh"), 0.25, seed=seed)


def drawn(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(F.rms_norm(x, (x.shape[-1],), weight), 0.5) * torch.amax(x * 2, -1, keepdim=True)


def products(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up) @ down


def softmax_of_16_bits(x: Tensor, y: Tensor) -> Tensor:
    return F.softmax(x.half() * 3, -1).float() * torch.sigmoid(y)


@fg.kernel(recompute="none")
def declared(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 2)


def plain(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 2)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class Declared(Norm):
    forward = fg.kernel(Norm.forward, recompute="none")


def leaves(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(randn(*shape).requires_grad_() for shape in shapes)


def of_chain() -> tuple[Tensor, ...]:
    return leaves((ROWS, WIDTH), (WIDTH,), (WIDTH,), (ROWS, WIDTH))


def gradients(function: Callable[..., Tensor], by: tuple[Tensor, ...], *further: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    y = function(*by, *further)
    return torch.autograd.grad(y, by, torch.linspace(-1, 1, y.numel()).view(y.shape))


def saved_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The bytes of the storages that autograd saves for a call."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*arguments)
    return sum(storages.values())


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], tuple[Any, ...]]] = {
    "a chain": (chain, of_chain, (5,)),
    "random bits of a key": (drawn, lambda: leaves((ROWS, WIDTH), (WIDTH,)), ()),
    "products": (products, lambda: leaves((ROWS, WIDTH), (WIDTH, 48), (48, 8)), ()),
    "casts": (softmax_of_16_bits, lambda: leaves((ROWS, WIDTH), (ROWS, 1)), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_by_each_rule(name: str) -> None:
    function, make, further = CASES[name]
    found = [gradients(fg.kernel(function, recompute=rule), make(), *further) for rule in RULES]
    for each in (found[0], found[2]):
        torch.testing.assert_close(each, found[1], rtol=1e-5, atol=1e-3 if name == "casts" else 1e-5)


@pytest.mark.parametrize("name", ["a chain", "random bits of a key", "products"])
def test_rules_save_more_and_more_bytes(name: str) -> None:
    function, make, further = CASES[name]
    few, some, many = (saved_bytes(fg.kernel(function, recompute=rule), *make(), *further) for rule in RULES)
    assert few <= some < many


def test_all_saves_arguments_alone() -> None:
    x, weight, bias, residual = of_chain()
    arguments = sum(t.untyped_storage().nbytes() for t in (x, weight, bias))
    assert saved_bytes(fg.kernel(chain, recompute="all"), x, weight, bias, residual, 5) == arguments


@pytest.mark.deep
def test_compiled_calls_follow_the_rule_with_operators_of_their_own() -> None:
    names: list[str] = []

    def look(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        names.extend(target for target in targets if target.startswith("fusegen.chain"))
        return make_boxed_func(graph.forward)

    sizes = []
    wanted = gradients(fg.kernel(chain), of_chain(), 5)
    for rule in RULES:
        torch._dynamo.reset()
        compiled = torch.compile(fg.kernel(chain, recompute=rule), fullgraph=True, backend=aot_autograd(fw_compiler=look))
        sizes.append(saved_bytes(compiled, *of_chain(), 5))
        torch.testing.assert_close(gradients(compiled, of_chain(), 5), wanted, rtol=1e-5, atol=1e-5)
    assert sizes[0] <= sizes[1] < sizes[2]
    assert len(names) == len(set(names)) == 6


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_explain_lists_what_is_saved(target: str) -> None:
    shapes = [torch.empty(t.shape, device="meta") for t in of_chain()]
    texts = [fg.vjp(fg.kernel(chain, recompute=rule), *shapes, 5, target=target).forward.lower().explain() for rule in RULES]
    arguments = "\n   x: f32 (12, 32), 1.5 KiB, an argument\n   weight: f32 (32,), 128 B, an argument\n"
    assert "saved for the backward pass: 1.8 KiB, 0 B besides arguments and results" + arguments in texts[0]
    assert "1.8 KiB, 96 B besides arguments and results" + arguments in texts[1]
    assert "\n   rsqrt: f32 (12, 1), 48 B" in texts[1]
    assert "\n   ge: bool (12, 32), 384 B" in texts[2]


def test_explain_tells_a_result() -> None:
    text = fg.vjp(fg.kernel(lambda x: torch.exp(x)), torch.empty(8, 4, device="meta"), target="cpu").forward.lower().explain()
    assert text.endswith(
        "saved for the backward pass: 128 B, 0 B besides arguments and results\n   exp: f32 (8, 4), 128 B, a result"
    )


def test_copies_keep_the_rule_and_the_name() -> None:
    double = fg.kernel(plain, recompute="all")
    for copied in (copy.deepcopy(double), pickle.loads(pickle.dumps(double))):
        assert copied.options.recompute == "all"
        assert copied.lower(torch.ones(4)).program.graph.name == "plain"
    named = fg.Kernel(plain, name="other", options=Options(recompute="none"))
    for copied in (copy.deepcopy(named), pickle.loads(pickle.dumps(named))):
        assert copied.options.recompute == "none"
        assert copied.lower(torch.ones(4)).program.graph.name == "other"
    assert pickle.loads(pickle.dumps(declared)) is declared


def test_passes_of_a_copied_kernel_keep_the_rule() -> None:
    passes = fg.vjp(fg.kernel(lambda x: torch.sigmoid(torch.sin(x)) * 2, recompute="all"), torch.ones(4))
    for forward in (passes.forward, copy.deepcopy(passes.forward)):
        _, saved = forward(torch.ones(4))
        assert len(saved.tensors) == 1 and torch.equal(saved.tensors[0], torch.ones(4))


@pytest.mark.parametrize("cls", [Norm, Declared])
def test_modules(cls: type[Norm]) -> None:
    x = randn(ROWS, WIDTH)
    few = fg.kernel(cls(), recompute="all")
    counts = [saved_bytes(module, x) for module in (few, copy.deepcopy(few), pickle.loads(pickle.dumps(few)))]
    assert len(set(counts)) == 1
    assert counts[0] < saved_bytes(fg.kernel(cls(), recompute="none"), x)


def test_a_declared_forward_keeps_its_rule() -> None:
    x = randn(ROWS, WIDTH)
    assert saved_bytes(fg.kernel(Declared()), x) == saved_bytes(fg.kernel(Norm(), recompute="none"), x)


REFUSED: dict[str, Callable[[], object]] = {
    "of a function": lambda: fg.kernel(plain, recompute="some"),
    "of a decorator": lambda: fg.kernel(recompute=None),
    "of a module": lambda: fg.kernel(Norm(), recompute=["all"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_rule_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)fg\.kernel: recompute is .*try: give one of 'auto', 'all', 'none'"):
        REFUSED[name]()
