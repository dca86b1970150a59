"""A kernel is one operator in a graph of torch's: torch.compile, torch.export and make_fx."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import fusegen as fg
from fusegen import ops
from fusegen.errors import ArgumentError, GradientError, UnsupportedError
from fusegen.specs import SPECS, materialize
from tests.naming import case
from tests.unit.eager import randn
from tests.unit.test_specs import SMALL

IN_GATE = ("gelu", "gelu_dropout_add", "add_rms_norm", "layer_norm_backward", "linear_bias_gelu")
OUTER = randn(16).requires_grad_()


@fg.kernel
def norm_gelu(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), w, b, eps), approximate="tanh")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(16), nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[1](F.silu(self.layers[0](self.norm(x))))


class Compiled:
    """A function that torch compiles as one graph, and the operators of ours in its graphs, forward and backward."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        torch._dynamo.reset()
        self.operators: list[str] = []
        self.others: list[str] = []
        backend = aot_autograd(fw_compiler=self._look, bw_compiler=self._look)
        self.call = torch.compile(function, fullgraph=True, backend=backend, **settings)

    def _look(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                name = node.target.name()
                (self.operators if name.startswith("fusegen::") else self.others).append(name.rpartition("_")[0])
        return make_boxed_func(graph.forward)


def gradients(result: Any, by: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    floats = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor) and r.is_floating_point()]
    return torch.autograd.grad(floats, by, [torch.randn_like(r) for r in floats], allow_unused=True)


def alike(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n if n in IN_GATE else pytest.param(n, marks=pytest.mark.deep) for n in SPECS])
def test_what_torch_checks_of_an_operator(name: str) -> None:
    spec = SPECS[name]
    given = materialize(spec.example(torch.float32, **{size: SMALL[size] for size in spec.sizes}), torch.device("cpu"))
    bound = inspect.signature(spec.kernel.function).bind(**given)
    bound.apply_defaults()
    operator = spec.fresh().operator(*bound.args, **bound.kwargs)
    tensors = [v.requires_grad_(v.is_floating_point() and spec.gradients is not False) for v in bound.args if isinstance(v, Tensor)]
    further = {f"{n}_number": v for n, v in bound.arguments.items()} | {"random_key": torch.tensor([5])}
    # torch compares no floats of 8 bits on a CPU, as the check of a schema would.
    is_narrow = any(tensor.is_floating_point() and tensor.itemsize == 1 for tensor in tensors)
    checks = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
        *(() if is_narrow else ("test_schema",)),
    )
    arguments = (*tensors, *(further[a.name] for a in operator._schema.arguments if a.name in further))
    opcheck(operator, arguments, test_utils=checks)


def test_a_training_step_is_two_operators() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return norm_gelu(x * 2, w, b) + 1

    compiled = Compiled(step)
    w, b = randn(16).requires_grad_(), randn(16).requires_grad_()
    for rows in (3, 4, 5):
        x = randn(rows, 16).requires_grad_()
        ours, theirs = compiled.call(x, w, b), step(x, w, b)
        alike(ours, theirs)
        alike(gradients(ours, (x, w, b)), gradients(theirs, (x, w, b)))
    kinds = ["fusegen::norm_gelu_forward", "fusegen::norm_gelu_backward"]
    assert compiled.operators == kinds * 2  # for three rows, and for any number of them
    assert not any("layer_norm" in name or "gelu" in name for name in compiled.others)


def test_without_gradients_nothing_is_kept() -> None:
    compiled = Compiled(norm_gelu)
    with torch.no_grad():
        alike(compiled.call(randn(3, 16), OUTER, OUTER).shape, (3, 16))
    assert compiled.operators == ["fusegen::norm_gelu"]


def test_a_module_trains() -> None:
    torch.manual_seed(0)
    plain, other = Block(), Block()
    other.load_state_dict(plain.state_dict())
    compiled = Compiled(fg.kernel(plain))
    both = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, other)]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        x = randn(8, 16)
        for number, (module, optimizer) in enumerate(both):
            loss = (compiled.call if module is plain else module)(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[number].append(loss.item())
    alike(*losses)
    assert compiled.operators == ["fusegen::block_forward", "fusegen::block_backward"]
    plain.norm.weight = nn.Parameter(torch.zeros(16))
    plain.norm.bias = nn.Parameter(torch.zeros(16))
    x = randn(8, 16)
    alike(compiled.call(x), plain(x))  # parameters that were replaced are seen


def test_what_a_kernel_closes_over_is_found() -> None:
    held, settings = randn(16).requires_grad_(), {"scales": [randn(16).requires_grad_()]}

    def helper(x: Tensor) -> Tensor:
        return x * held

    def function(x: Tensor) -> Tensor:
        return torch.tanh(helper(x) * OUTER) + settings["scales"][0]

    kernel = fg.kernel(function)
    compiled = Compiled(lambda x: kernel(x))
    x = randn(4, 16).requires_grad_()
    by = (x, held, OUTER, settings["scales"][0])
    for _ in range(2):
        ours, theirs = compiled.call(x), function(x)
        alike(ours, theirs)
        alike(gradients(ours, by), gradients(theirs, by))
    assert compiled.operators == ["fusegen::function_forward", "fusegen::function_backward"]
    settings["scales"][0] = randn(16).requires_grad_()
    alike(compiled.call(x), function(x))


def test_a_method_is_one_operator() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(randn(16))

        @fg.kernel
        def scaled(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x)

    module, x = Scaled(), randn(4, 16)
    compiled = Compiled(module)
    ours = compiled.call(x)
    alike(ours, torch.tanh(x) * module.scale)
    alike(gradients(ours, module.scale), gradients(torch.tanh(x) * module.scale, module.scale))
    assert compiled.operators == ["fusegen::scaled_forward", "fusegen::scaled_backward"]


def test_results_of_all_kinds() -> None:
    def function(x: Tensor, flag: bool, scale: float = 2.0, *, rows: int = 3) -> dict[str, Any]:
        y = torch.exp(x) * scale
        return {"twice": (y, y), "none": None, "index": y.argmax(-1), "input": x, "sum": y.sum(0) if flag else y[:rows]}

    kernel = fg.kernel(function)
    for settings in ({"flag": True}, {"flag": False, "scale": 3.0}, {"flag": False, "rows": 2}):
        with case(str(settings)):
            x = randn(4, 16).requires_grad_()
            compiled = Compiled(lambda x, settings=settings: kernel(x, **settings))
            ours, theirs = compiled.call(x), function(x, **settings)
            alike(ours, theirs)
            alike(gradients(ours, x), gradients(theirs, x))
            assert compiled.operators == ["fusegen::function_forward", "fusegen::function_backward"]


def test_two_random_calls_draw_twice() -> None:
    @fg.kernel
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * 2

    compiled = Compiled(lambda x: (dropped(x), dropped(x)))
    x = torch.ones(64, 16, requires_grad=True)
    one, other = compiled.call(x)
    assert not torch.equal(one, other)
    assert not torch.equal(one, compiled.call(x)[0])
    (gradient,) = torch.autograd.grad(one.sum(), x)
    assert torch.equal(gradient, one.detach())  # the mask is the same
    assert compiled.operators.count("fusegen::dropped_forward") == 2
    assert not any("dropout" in name or "bernoulli" in name for name in compiled.others)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program(strict: bool) -> None:
    plain = Block()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = fg.kernel(plain)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) * 2

    model = Model()
    program = torch.export.export(model, (randn(4, 16),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict)
    program.graph_module.graph.eliminate_dead_code()  # a strict export leaves what the function itself does, which nothing uses
    names = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert [name.startswith("fusegen.block_") for name in names] == [True, False]
    assert set(program.graph_signature.inputs_to_parameters.values()) == {n for n, _ in model.named_parameters()}
    for rows in (2, 7):
        x = randn(rows, 16).requires_grad_()
        ours, theirs = program.module()(x), plain(x) * 2
        alike(ours, theirs)
        alike(gradients(ours, x), gradients(theirs, x))


def test_a_module_is_exported_and_compiled_by_itself() -> None:
    module, x = fg.kernel(Block()), randn(4, 16)
    name = module.operator(x).name().replace("::", ".")
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == [f"{name}.default"]
    compiled = Compiled(module, dynamic=True)
    alike(compiled.call(x), module(x))
    assert compiled.operators[0] == "fusegen::block_forward"


@pytest.mark.parametrize("name, operands", [("softmax", 1), ("log_softmax", 1), ("add_rms_norm", 2)])
def test_a_default_that_selects_code_beside_sizes_that_change(name: str, operands: int) -> None:
    kernel = getattr(ops, name)
    compiled = Compiled(lambda *xs: kernel(*xs))
    for rows in (3, 5, 7):
        xs = [randn(rows, 16) for _ in range(operands)]
        torch.testing.assert_close(compiled.call(*xs), kernel.function(*xs))
    assert compiled.operators == [f"fusegen::{name}"] * 2


@pytest.mark.filterwarnings("ignore:softmax is not fused")
def test_a_temperature_that_changes() -> None:
    compiled, x = Compiled(lambda x, t: ops.softmax(x, temperature=t)), randn(3, 16)
    for temperature in (0.5, 0.7, 1.0, 2.0):
        torch.testing.assert_close(compiled.call(x, temperature), torch.softmax(x / temperature, -1))


def as_tuple(x: Tensor, w: Tensor) -> Any:
    return ops.rms_norm(x, (x.shape[-1],), w)


def as_list(x: Tensor, w: Tensor) -> Any:
    return ops.rms_norm(x, [x.shape[-1]], w)


def as_size(x: Tensor, w: Tensor) -> Any:
    return ops.rms_norm(x, x.shape[-1:], w)


@pytest.mark.parametrize("norm", [as_tuple, as_list, as_size])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_setting_made_of_sizes_that_change(norm: Callable[[Tensor, Tensor], Tensor], dynamic: bool | None) -> None:
    compiled = Compiled(norm, dynamic=dynamic)
    for features in (16, 24, 40):
        x, w = randn(3, features), randn(features)
        torch.testing.assert_close(compiled.call(x, w), F.rms_norm(x, (features,), w))
    assert compiled.operators == ["fusegen::rms_norm"] * 3


@pytest.mark.parametrize("norm", [as_tuple, as_list, as_size])
def test_make_fx_knows_a_setting_made_of_sizes(norm: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = randn(3, 16), randn(16)
    traced = make_fx(norm, tracing_mode="symbolic")(x, w)
    torch.testing.assert_close(traced(randn(5, 16).copy_(x[:1]), w)[:1], F.rms_norm(x[:1], (16,), w))
    assert "fusegen" in traced.code


def test_what_make_fx_records() -> None:
    traced = make_fx(lambda x, w: norm_gelu(x, w, w), tracing_mode="symbolic")
    x, w = randn(3, 16), randn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all sizes are symbols there, which a row of features cannot be
        alike(traced(x, w)(x, w), norm_gelu(x, w, w))
    fixed = make_fx(lambda x, w: norm_gelu(x, w, w))(x, w)
    alike(fixed(x, w), norm_gelu(x, w, w))
    assert [str(n.target).startswith("fusegen.norm_gelu_") for n in fixed.graph.nodes if n.op == "call_function"] == [True]


def test_an_operator_by_itself() -> None:
    x, w = randn(3, 16).requires_grad_(), randn(16).requires_grad_()
    operator = norm_gelu.operator(x, w, w)
    alike(gradients(operator(x, w, w, 0.1), (x, w)), gradients(norm_gelu.function(x, w, w, 0.1), (x, w)))
    assert operator(x[:0], w, w, 0.1).shape == (0, 16)
    with pytest.raises(GradientError, match="differentiated again"):
        (first,) = torch.autograd.grad(operator(x, w, w, 0.1).sum(), x, create_graph=True)
        first.sum().backward()
    with pytest.raises(UnsupportedError, match="no operator for this call"):
        fg.kernel(lambda x: x.nonzero()).operator(x)


def test_sizes_that_the_recorder_does_not_know() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def losses(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target) * x.shape[0]

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x * 3

    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    calls: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Tensor, ...]]]] = {
        "lengths that must be equal": (attention, lambda n: (randn(2, 3, n, 8), randn(2, 3, n, 8), randn(2, 3, n, 8))),
        "rows of two inputs": (losses, lambda n: (randn(n, 10), torch.arange(n))),
        "a branch": (branches, lambda n: (randn(n, 8),)),
        "a row": (softmax, lambda n: (randn(3, n),)),
    }
    for name, (function, arguments) in calls.items():
        with case(name):
            kernel, compiled = fg.kernel(function), None
            for n in (3, 7, 9):
                given = arguments(n)
                for tensor in given:
                    torch._dynamo.mark_dynamic(tensor, tensor.shape.index(n))
                compiled = compiled or Compiled(kernel.__call__)
                alike(compiled.call(*given), function(*given))
            assert set(compiled.operators) == {f"fusegen::{function.__name__}"} and not {"aten::softmax"} & set(compiled.others)


def test_a_number_that_selects_code_and_changes() -> None:
    def repeated(x: Tensor, number: int) -> Tensor:
        for place in range(number):
            x = x * 1.5 + place
        return x

    x, compiled = randn(4, 16), Compiled(fg.kernel(repeated))
    for number in (1, 3, 2):
        alike(compiled.call(x, number), repeated(x, number))
    assert len(compiled.operators) == 3


def test_a_float_that_changes_is_an_argument() -> None:
    def scaled(x: Tensor, factor: float, shift: float) -> Tensor:
        return torch.tanh(x * factor) * x - shift

    compiled = Compiled(fg.kernel(scaled))
    for number in (0.5, 1 / 3, -0.0, 1e300, math.inf, 7.0, 2.5, 1e-9, 0.1, 0.2):
        x = randn(4, 16).requires_grad_()
        ours, theirs = compiled.call(x, number, number + 1), scaled(x, number, number + 1)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        torch.testing.assert_close(gradients(ours, x), gradients(theirs, x), equal_nan=True)
    assert compiled.operators == ["fusegen::scaled_forward", "fusegen::scaled_backward"] * 2  # for one value, and for any


def test_a_float_of_a_size_is_an_argument() -> None:
    scaled = fg.kernel(lambda x, factor: torch.exp(x) * factor)
    compiled = Compiled(lambda x: scaled(x, x.shape[0] ** -0.5))
    for rows in (3, 4, 5, 6):
        x = randn(rows, 16)
        alike(compiled.call(x), torch.exp(x) * rows**-0.5)
    assert len(compiled.operators) == 2


def test_an_operator_that_takes_a_float_as_a_tensor() -> None:
    calls: list[tuple[Any, Any]] = []

    class Calls(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target).startswith("fusegen."):
                calls.append((target, args))
            return super().call_function(target, args, kwargs)

    torch._dynamo.reset()
    kernel = fg.kernel(lambda x, factor: torch.exp(x) * factor)
    function = torch.compile(kernel, fullgraph=True, backend=lambda graph, _: Calls(graph).run)
    x = randn(4, 16).requires_grad_()
    for factor in (0.5, 0.75):
        function(x, factor)
    (_, constant), (operator, boxed) = calls
    assert constant[1] == 0.5
    assert torch.equal(boxed[1], torch.tensor(0.75, dtype=torch.float64))
    opcheck(operator.default, boxed)


def test_an_integer_of_more_than_64_bits_is_not_fused() -> None:
    compiled = Compiled(fg.kernel(lambda x, number: x * number))
    with pytest.warns(UserWarning, match="'number' is 9223372036854775808, which does not fit 64 bits"):
        alike(compiled.call(torch.ones(3), 2**63), torch.full((3,), 2.0**63))
    assert not compiled.operators


def test_a_recorded_call_makes_the_operators_of_its_backward_pass() -> None:
    """So they are there for a backward pass out of the cache of Inductor, which is not recorded again."""

    @fg.kernel
    def made_early(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x) * y

    torch._dynamo.reset()
    torch.compile(made_early, fullgraph=True, backend="eager")(randn(4, 16).requires_grad_(), randn(4, 16))
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fusegen::made_early_backward_")]
    assert len(names) == 2  # one for the gradients that are wanted, one for all


@pytest.mark.filterwarnings("ignore:.* runs unfused in a graph that torch records")
def test_a_function_that_cannot_be_traced_runs_as_torch_compile_runs_it() -> None:
    @fg.kernel
    def signed(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else -x

    step, x = torch.compile(lambda x: signed(x) + 1, backend="eager"), torch.ones(4)
    for given in (x, -x, x):
        torch.testing.assert_close(step(given), signed.function(given) + 1)


@pytest.mark.filterwarnings("ignore:.* runs unfused in a graph that torch records")
def test_transforms_in_a_compiled_function() -> None:
    kernel, x, w = fg.kernel(lambda x, w: torch.softmax(x * w, -1)), randn(4, 16), randn(16)

    def by_weight(function: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda x, w: torch.func.grad(lambda w: function(x, w).square().sum())(w)

    alike(Compiled(by_weight(kernel)).call(x, w), by_weight(kernel.function)(x, w))
    alike(Compiled(lambda x, w: torch.func.vmap(kernel, (0, None))(x, w)).call(x, w), kernel.function(x, w))


@pytest.mark.filterwarnings("ignore:.* runs unfused in a graph that torch records")
def test_a_number_of_numpy_in_a_compiled_function() -> None:
    x, number = randn(4, 16), np.float32(0.5)
    alike(Compiled(fg.kernel(lambda x, number: torch.exp(x) * number)).call(x, number), torch.exp(x) * 0.5)


def test_operators_of_one_graph_know_their_own_gradients() -> None:
    """The order in which a process comes to its operators does not matter, nor by what gradients were wanted first."""
    scaled = fg.kernel(lambda x, w: torch.tanh(x) * w)
    x, w = randn(3, 16), randn(16)
    for needed in ((True, False), (False, True), (True, True)):
        with case(str(needed)):
            given = [t.clone().requires_grad_(n) for t, n in zip((x, w), needed, strict=True)]
            by = [t for t in given if t.requires_grad]
            wanted = gradients(torch.tanh(given[0]) * given[1], by)
            alike(gradients(scaled.operator(*given)(*given), by), wanted)
            alike(gradients(Compiled(lambda x, w: scaled(x, w)).call(*given), by), wanted)


def test_every_size_of_a_tensor_may_be_unknown() -> None:
    kernel = fg.kernel(lambda x: x.tanh())
    compiled = Compiled(lambda x: kernel(x), dynamic=True)
    for shape in ((2, 3, 4, 5, 6), (3, 4, 5, 6, 7)):
        x = randn(*shape)
        alike(compiled.call(x), x.tanh())
    assert compiled.operators == ["fusegen::lambda"]


def test_what_is_no_operator_runs_and_is_told() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x) @ y

    kernel = fg.kernel(product)
    compiled = Compiled(lambda x, y: kernel(x, y), dynamic=True)
    with pytest.warns(UserWarning, match="product runs unfused in a graph that torch records.*dim 1 of 'x' must be known"):
        alike(compiled.call(torch.ones(4, 16), torch.ones(16, 8)), torch.full((4, 8), 16.0))
    assert not compiled.operators


def test_a_kernel_that_writes_is_compiled() -> None:
    @fg.kernel(mutates=("cache",))
    def store(cache: Tensor, x: Tensor) -> None:
        cache[1] = x * 2

    compiled = Compiled(lambda cache, x: store(cache, x))
    cache, x = torch.zeros(3, 4), randn(4)
    compiled.call(cache, x)
    alike(cache[1], x * 2)
    assert not compiled.others  # torch functionalizes the operator: it is in a node of a higher order
    opcheck(store.operator(cache, x), (cache, x))


@fg.kernel(mutates=("h",))
def add_norm(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h += x
    return F.rms_norm(h, (h.shape[-1],)), h


@pytest.mark.parametrize("strict", [False, True])
def test_a_kernel_that_writes_is_exported(strict: bool) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return add_norm(x, h)[0]

    x, h = randn(6, 16), randn(6, 16)
    program = torch.export.export(Model(), (x, h), strict=strict)
    assert [str(n.target) for n in program.graph.nodes if "add_norm" in str(n.target)]
    given, wanted = h.clone(), h + x
    alike(program.run_decompositions({}).module()(x, given), F.rms_norm(wanted, (16,)))
    alike(given, wanted)


def test_what_is_written_to_is_returned_as_itself() -> None:
    x, h = randn(6, 16), randn(6, 16)
    wanted = h + x
    _, found = torch.compile(lambda x, h: add_norm(x, h), fullgraph=True, backend="aot_eager")(x, h)
    assert found is h
    alike(h, wanted)


def test_a_compiled_write_refuses_what_shares_memory_and_takes_neighbours() -> None:
    both = torch.ones(4, 2, 8)
    call = torch.compile(lambda x, h: add_norm(x, h), fullgraph=True, backend="aot_eager")
    call(both[:, 0], both[:, 1])
    alike(both[:, 1], torch.full((4, 8), 2.0))
    with pytest.raises(RuntimeError, match="'h' is written to, but shares memory with 'x'"):
        call(both[:3, 0], both[1:, 0])


def test_a_write_that_gradients_would_be_recorded_of_is_torchs_and_told() -> None:
    x, h = randn(6, 16).requires_grad_(), randn(6, 16)
    with pytest.warns(UserWarning, match="writes in place, which records no gradient"):
        result = Compiled(lambda x, h: add_norm(x, h)[1]).call(x, h)
    alike(torch.autograd.grad(result.sum(), x)[0], torch.ones(6, 16))
    with pytest.raises(GradientError, match="'x' requires a gradient"):
        add_norm.operator(x, h)(x, h.detach())


def test_an_operator_refuses_sizes_that_its_function_chose_by() -> None:
    kernel = fg.kernel(lambda x: x * 2 if x.shape[0] > 3 else x * 3)
    operator = kernel.operator(randn(6, 8))
    torch.testing.assert_close(operator(randn(9, 8) * 0 + 1), torch.full((9, 8), 2.0))
    for x in (randn(2, 8), torch.empty(2, 8, device="meta")):
        with pytest.raises(ArgumentError, match=r"traced for sizes with .*\n.*compile or export"):
            operator(x)


@pytest.mark.filterwarnings("ignore:.*runs unfused in a graph that torch records")
def test_a_kernel_that_asks_for_gradients() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * (2 if x.requires_grad else 3)

    kernel = fg.kernel(scaled)
    compiled = torch.compile(lambda x: kernel(x), backend="aot_eager")
    for requires_grad in (False, True, False):
        x = torch.ones(4, requires_grad=requires_grad)
        torch.testing.assert_close(compiled(x), scaled(x))
