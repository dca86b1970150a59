"""Modules of `fusegen.nn` against the modules that they replace."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

import fusegen as fg
import fusegen.nn as fnn
from tests.unit.eager import same
from tests.unit.nn.twins import TWINS, gradients, pair, results

ONE_OF_EACH_KIND = (
    "LayerNorm",
    "AddRMSNorm",
    "GELU",
    "GatedMLP",
    "LayerNormLinear",
    "Embedding",
    "LinearCrossEntropyLoss",
    "Attention",
)
"""One result, two, no parameters, submodules, two results of parameters, integers, a loss, a whole block."""


@pytest.mark.parametrize("name", TWINS)
def test_results_are_those_of_the_twin(name: str) -> None:
    ours, theirs, arguments = pair(name)
    same(ours(*arguments), theirs(*arguments), name)


@pytest.mark.parametrize("name", TWINS)
def test_gradients_are_those_of_the_twin(name: str) -> None:
    ours, theirs, arguments = pair(name)
    same(gradients(ours, arguments), gradients(theirs, arguments), name)


@pytest.mark.parametrize("name", TWINS)
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs, _ = pair(name)
    state = {key: torch.full_like(value, 0.5) for key, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    assert {key: value.shape for key, value in theirs.state_dict().items()} == {key: value.shape for key, value in state.items()}
    assert all((value == 0.5).all() for value in theirs.parameters())


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_they_are_inlined_in_a_kernel(name: str) -> None:
    ours, _, arguments = pair(name)

    @fg.kernel
    def doubled(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * each for each in results(ours(*values)))

    same(doubled(*arguments), tuple(2 * each for each in results(ours(*arguments))), name)
    for parameter in ours.parameters():
        parameter.data = parameter.data * 2
    same(doubled(*arguments), tuple(2 * each for each in results(ours(*arguments))), name)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND[:-1])
def test_they_train_under_torch_compile(name: str) -> None:
    ours, theirs, arguments = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    same(compiled(*arguments), theirs(*arguments), name)
    same(gradients(compiled, arguments), gradients(theirs, arguments), name)


def test_attention_is_one_operator_under_torch_compile() -> None:
    ours, theirs, arguments = pair("Attention")
    targets: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        compiled = torch.compile(ours, fullgraph=True, backend=aot_autograd(fw_compiler=look))
        same(compiled(*arguments), theirs(*arguments))
    assert [target.rpartition("_")[0] for target in targets] == ["fusegen.attention"]


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_autocast_gives_the_dtypes_that_torch_gives(name: str) -> None:
    ours, theirs, arguments = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = results(ours(*arguments)), results(theirs(*arguments))
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    for ours_, theirs_ in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=3e-2, atol=0.25)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_copies_and_files_compute_the_same(name: str) -> None:
    ours, _, arguments = pair(name)
    torch.save(ours, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert type(other) is type(ours) and repr(other) == repr(ours)
        assert all(one is not two for one, two in zip(other.parameters(), ours.parameters(), strict=True))
        same(other(*arguments), ours(*arguments), name)


def test_dtype_and_device_are_those_of_the_constructor() -> None:
    settings = {"dtype": torch.bfloat16, "device": "meta"}
    modules = (
        fnn.LayerNorm(8, **settings),
        fnn.RMSNorm(8, **settings),
        fnn.AddRMSNorm(8, **settings),
        fnn.BiasGELU(8, **settings),
        fnn.BiasDropoutAdd(8, **settings),
        fnn.MLP(8, 16, **settings),
        fnn.GatedMLP(8, 16, **settings),
        fnn.Embedding(4, 8, **settings),
        fnn.LinearCrossEntropyLoss(8, 4, **settings),
        fnn.LayerNormLinear(8, 4, **settings),
        fnn.LayerNormMLP(8, 4, **settings),
        fnn.FusedQKVLinear(8, 2, **settings),
        fnn.Attention(8, 2, qk_norm=True, **settings),
    )
    for module in modules:
        assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}, module


def test_they_are_modules_of_torch_and_say_what_they_are() -> None:
    for name in ("LayerNorm", "RMSNorm", "Softmax", "LogSoftmax", "GELU", "SiLU", "GLU", "Embedding", "CrossEntropyLoss"):
        assert issubclass(getattr(fnn, name), getattr(nn, name))
    assert (
        repr(fnn.RMSNorm(8, 1e-6, casting_mode="llama"))
        == "RMSNorm((8,), eps=1e-06, elementwise_affine=True, casting_mode='llama')"
    )
    assert repr(fnn.LayerNorm(8)) == repr(nn.LayerNorm(8))


def test_every_module_has_a_twin() -> None:
    has_tests_of_its_own = {"FusedTransformerLayer"}
    assert {type(twin.ours()).__name__ for twin in TWINS.values()} == set(fnn.__all__) - has_tests_of_its_own
