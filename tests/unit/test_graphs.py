"""Calls that are recorded and replayed, with a recorder of torch's operations in the place of a GPU's graphs."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen import native
from fusegen.compiler.dispatch import Dispatcher
from fusegen.graphs import recording
from tests.unit.patching.models import IDS, small_model
from tests.unit.tapes import Reruns, Tapes

FACTOR = 2.0
SETTINGS = {"bias": 1.0}


pytestmark = pytest.mark.usefixtures("tapes")


@pytest.fixture
def reruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """For kernels, whose launches no tape sees; named behind `tapes`, whose recorder it replaces."""
    monkeypatch.setattr(recording, "GraphPool", Reruns)


class Reads(nn.Module):
    """Reads what may change between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.register_buffer("shift", torch.ones(4))
        self.scale, self.offset = 1.0, 0.5
        self.several = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.config = SimpleNamespace(power=1, flags=["a"])
        self.listed = [nn.Linear(4, 4), {"offset": torch.ones(4)}]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.linear(x)) * self.scale * FACTOR + self.shift + SETTINGS["bias"]
        return self.more(y**self.config.power if "a" in self.config.flags else y)

    def more(self, y: Tensor) -> Tensor:
        return y + 1


def _doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, result: result * 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m, "scale", 3.0),
    "attribute of an attribute": lambda m: setattr(m.config, "power", 2),
    "list of an attribute": lambda m: m.config.flags.clear(),
    "element of a list": lambda m: m.listed.__setitem__(0, nn.Linear(4, 4)),
    "parameter of a list": lambda m: m.several.__setitem__(0, nn.Parameter(torch.zeros(4))),
    "attribute in a lambda": lambda m: setattr(m, "offset", 5.0),
    "class's forward": lambda m: setattr(type(m.linear), "forward", lambda self, x: x * 2),
    "weight of an element of a list": lambda m: setattr(m.listed[0].weight, "data", torch.ones(4, 4)),
    "tensor in a dictionary in a list": lambda m: m.listed[1].update(offset=torch.zeros(4)),
    "mode": lambda m: m.train(),
    "in place": lambda m: m.linear.weight.data.mul_(2),
    "data": lambda m: setattr(m.linear.weight, "data", torch.ones(4, 4)),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter by its dictionary": lambda m: m.linear._parameters.update(weight=nn.Parameter(torch.ones(4, 4))),
    "no bias": lambda m: setattr(m.linear, "bias", None),
    "buffer": lambda m: setattr(m, "shift", torch.zeros(4)),
    "module": lambda m: setattr(m, "linear", nn.Linear(4, 4)),
    "module behind another": lambda m: m.inner.append(nn.Tanh()),
    "forward": lambda m: setattr(m.linear, "forward", lambda x: x),
    "method": lambda m: setattr(m, "more", lambda y: y),
    "class": lambda m: setattr(m, "__class__", type("Other", (Reads,), {"more": lambda self, y: y - 1})),
    "hook": lambda m: _doubled(m.linear),
    "own hook": _doubled,
    "global": lambda m: globals().update(FACTOR=5.0),
    "dictionary": lambda m: SETTINGS.update(bias=7.0),
    "state": lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}, assign=True),
    "dtype": lambda m: (m.double(), m.listed[0].double()),
}


@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_changes_is_seen(change: str, has_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_native:
        monkeypatch.setattr(native, "_module", None)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setitem(SETTINGS, "bias", 1.0)
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    torch.manual_seed(0)
    module = Reads().eval()
    run = fg.cuda_graph(module)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(run(x), module(x))
        assert run.replayed == 4
        CHANGES[change](module)
        x = x.to(module.linear.weight.dtype if isinstance(module.linear, nn.Linear) else x.dtype)
        for _ in range(3):
            torch.manual_seed(1)
            found = run(x)
            torch.manual_seed(1)
            assert torch.equal(found, module(x))


def _takes(x: Tensor, pair: Any, by: Any = 1, *, named: Any = None, module: Any = None) -> Tensor:
    first, second = pair.values() if isinstance(pair, dict) else pair
    y = x * first - second * by + len(named or ())
    return (y if module is None else module(y)) + (1 if isinstance(by, float) else 0)


ONE, TWO = nn.Linear(4, 4), nn.Linear(4, 4)
_X = torch.arange(8.0).view(2, 4)
FORMS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "shape": ((_X[:1], (_X, _X)), {}),
    "strides": ((_X.t().contiguous().t(), (_X, _X)), {}),
    "dtype": ((_X.double(), (_X, _X)), {}),
    "conjugate": ((_X.to(torch.complex64).conj(), (_X, _X)), {}),
    "subclass": ((nn.Parameter(_X, requires_grad=False), (_X, _X)), {}),
    "list": ((_X, [_X, _X]), {}),
    "dictionary": ((_X, {"a": _X, "b": _X + 1}), {}),
    "other order of names": ((_X, {"b": _X, "a": _X + 1}), {}),
    "number": ((_X, (_X, _X), 2), {}),
    "number of another type": ((_X, (_X, _X), 1.0), {}),
    "truth": ((_X, (_X, _X), True), {}),
    "number for a tensor": ((_X, (_X, 2.0)), {}),
    "tensor for a number": ((_X, (_X, _X), torch.tensor(1)), {}),
    "by its name": ((_X, (_X, _X)), {"by": 1}),
    "text": ((_X, (_X, _X)), {"named": "abc"}),
    "other text": ((_X, (_X, _X)), {"named": "abcd"}),
    "a tuple of texts": ((_X, (_X, _X)), {"named": ("a", "b")}),
    "module": ((_X, (_X, _X)), {"module": ONE}),
    "other module": ((_X, (_X, _X)), {"module": TWO}),
}


@pytest.mark.parametrize("has_native", [True, False])
def test_calls_of_another_form_have_graphs_of_their_own(has_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_native:
        monkeypatch.setattr(native, "_module", None)
    run = fg.cuda_graph(_takes)
    with torch.no_grad():
        for kind in [*FORMS, *reversed(FORMS)]:
            for args, kwargs in [((_X, (_X, _X)), {}), FORMS[kind]]:
                for _ in range(5):
                    assert torch.equal(run(*args, **kwargs), _takes(*args, **kwargs)), kind
    assert run.recorded == len(FORMS)  # with the first one, and without the conjugate
    nested = torch.nested.nested_tensor([_X, _X[:1]], layout=torch.jagged)
    assert torch.equal(run(nested, (2.0, 1.0)).values(), _takes(nested, (2.0, 1.0)).values())


def test_what_changes_at_every_call_is_not_recorded_for_ever() -> None:
    module = Reads().eval()
    run = fg.cuda_graph(module)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for number in range(30):
            module.scale = float(number)
            assert torch.equal(run(x), module(x))
    assert run.recorded < 12 and "changes from call to call" in str(run)


COLLECTIONS = 0


def _count_collections(_phase: str, _info: object) -> None:
    globals().update(COLLECTIONS=COLLECTIONS + 1)


def test_the_collector_is_no_part_of_a_call() -> None:
    run = fg.cuda_graph(lambda x: (gc.collect(), x + 1)[1])
    gc.callbacks.append(_count_collections)
    try:
        for _ in range(4):
            run(torch.ones(3))
            gc.collect()
    finally:
        gc.callbacks.remove(_count_collections)
    assert (run.recorded, run.replayed) == (1, 3)


@pytest.mark.usefixtures("tapes", "reruns")
def test_what_a_kernel_read_is_seen() -> None:
    """A layer that is a kernel runs none of its code."""
    model = small_model("Llama")
    report = fg.patch(model)
    report.cuda_graphs = True
    layers = model.model.layers

    def recorded() -> int:
        with torch.no_grad():
            for _ in range(3):
                model(IDS, use_cache=False)
        return report._graphs.recorded

    counts = [recorded(), recorded()]
    layers[1].self_attn.scaling *= 2
    counts += [recorded(), recorded()]
    layers[0].mlp.act_fn = nn.ReLU()
    counts += [recorded(), recorded()]
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4] == counts[5]


@pytest.mark.usefixtures("tapes", "reruns")
def test_what_makes_a_kernel_is_no_part_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Dispatcher.bind

    def bind(dispatcher: Dispatcher, values: Any) -> Any:
        _ = SimpleNamespace(data=0).data  # as a library does that compiles templates
        return original(dispatcher, values)

    monkeypatch.setattr(Dispatcher, "bind", bind)
    held = SimpleNamespace(kernel=fg.kernel(lambda x: x + 1))
    graphed = fg.cuda_graph(lambda x: held.kernel(x))
    x = torch.ones(3)
    graphed(x)
    held.kernel = fg.kernel(lambda x: x + 2)  # made while the call is recorded
    for _ in range(2):
        assert torch.equal(graphed(x), x + 2)
    assert (graphed.recorded, graphed.replayed) == (1, 2), graphed


def test_a_result_that_cannot_be_filled_again() -> None:
    run = fg.cuda_graph(lambda x: SimpleNamespace(y=x + 1))
    for _ in range(3):
        assert torch.equal(run(torch.eye(3)).y, torch.eye(3) + 1)
    assert "its result holds a SimpleNamespace" in str(run)


def test_a_module_that_is_thawed_gets_gradients() -> None:
    module = Reads().requires_grad_(False).eval()
    head = nn.Linear(4, 1)
    run = fg.cuda_graph(module)
    for number in range(6):
        if number == 4:
            module.requires_grad_(True)
        head(run(torch.ones(3, 4))).sum().backward()
    assert module.linear.weight.grad is not None


def test_a_module_that_is_not_found() -> None:
    modules = {"a": nn.Linear(4, 4)}
    run = fg.cuda_graph(lambda x: modules["a"](x))
    x = torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(run(x), modules["a"](x))
            modules["a"] = nn.Linear(4, 4)
    assert "calls a Linear" in str(run)


def test_a_graphed_function_is_copied_without_its_graphs() -> None:
    module = Reads().eval()
    run = fg.cuda_graph(module)
    x = torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        other = copy.deepcopy(run)
        assert (other.recorded, run.recorded) == (0, 1)
        for _ in range(3):
            assert torch.equal(other(x), run(x))
        assert (other.recorded, other.replayed) == (1, 2)


class Averages(nn.Module):
    """Assigns attributes in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.average, self.calls = torch.zeros(4), 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.average = 0.5 * self.average + y.detach().mean(0)
        self.calls += 1
        return y + self.average


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_module_that_assigns_attributes(has_gradients: bool) -> None:
    plain = Averages()
    module = copy.deepcopy(plain)
    run = fg.cuda_graph(module)
    with torch.set_grad_enabled(has_gradients):
        for number in range(5):
            x = torch.full((2, 4), float(number))
            assert torch.equal(run(x), plain(x))
    assert module.calls == 5 and "assigns the attribute" in str(run)


def test_arguments_that_are_written_and_share_memory() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    run = fg.cuda_graph(f)
    for shares in (False, False, False, True, True, False):
        first, second = (torch.zeros(3), torch.zeros(3)), (torch.zeros(3), torch.zeros(3))
        given, expected = ((pair[0], pair[0] if shares else pair[1]) for pair in (first, second))
        assert torch.equal(run(*given), f(*expected))
        assert all(map(torch.equal, given, expected))
    assert run.replayed == 3


def _unsqueezed(x: Tensor) -> Tensor:
    return x.unsqueeze_(0) * 2


def _added_by_data(x: Tensor) -> Tensor:
    x.data.add_(1)
    return x * 2


def _added_uncounted(x: Tensor) -> Tensor:
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(x):
        x.detach().add_(1)
    return x * 2


def _with_new_data(x: Tensor) -> Tensor:
    x.data = x * 3
    return x + 1


def _thawed(x: Tensor) -> Tensor:
    return x.requires_grad_() * 2


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("function", [_unsqueezed, _with_new_data, _thawed, _added_by_data, _added_uncounted])
def test_changes_of_arguments_that_count_no_version(function: Callable[..., Tensor], has_gradients: bool) -> None:
    linear = nn.Linear(2, 2)

    def f(x: Tensor) -> Tensor:
        return linear(function(x))

    run = fg.cuda_graph(f)
    with torch.set_grad_enabled(has_gradients):
        for number in range(4):
            found, expected = (torch.full((3, 2), float(number)) for _ in range(2))
            assert torch.equal(run(found), f(expected))
            assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
    is_refused = has_gradients or function is not _added_uncounted
    assert (run.recorded == 0 and ("an argument" in str(run) or "`.data`" in str(run))) if is_refused else run.replayed == 3


CALLS = 0


class Counter:
    calls = 0

    def __init__(self) -> None:
        self.number, self.seen = 0, [0]


@pytest.mark.parametrize("kind", ["global", "cell", "object", "list", "list of an object", "method", "partial", "module"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_assigns_is_not_replayed(kind: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CALLS", 0)
    calls, counter, found = 0, Counter(), [0]

    def f(x: Tensor) -> Tensor:
        nonlocal calls
        if kind == "global":
            globals_of_tests()
        elif kind == "cell":
            calls += 1
        elif kind in ("object", "partial"):
            counter.number += 1
        elif kind == "list":
            found[0] += 1
        else:
            counter.seen.append(0)
        return x + 1 if not fails or x.sum().item() > 0 else x

    def method(self: Counter, x: Tensor) -> Tensor:
        self.number += 1
        return f(x)

    module: Any = nn.Module()
    module.counter, module.forward = counter, f
    run = fg.cuda_graph({"method": MethodType(method, counter), "partial": partial(f), "module": module}.get(kind, f))
    for _ in range(5):
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert 5 in (CALLS, calls, counter.number, found[0], len(counter.seen) - 1), (CALLS, calls, vars(counter), found)
    assert run.replayed == 0 and (fails or "it assigns" in str(run)), run


class Scaled:
    scale = 1.0
    inner = SimpleNamespace(scale=1.0)

    @property
    def twice(self) -> float:
        return 2 * self.inner.scale


def _scaled(x: Tensor, by: float = 1.0) -> Tensor:
    return x * by


SCALED = Scaled()


@pytest.mark.parametrize(
    "kind", ["attribute of the class", "property", "defaults", "cell of a function", "environment", "name of the class"]
)
def test_what_changes_behind_functions_and_objects_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = 1.0
    monkeypatch.setenv("SCALE", "1")
    monkeypatch.setattr(Scaled, "scale", 1.0)
    monkeypatch.setattr(_scaled, "__defaults__", (1.0,))
    monkeypatch.setitem(globals(), "SCALED", Scaled())

    def helper(x: Tensor) -> Tensor:
        return x * scale

    def f(x: Tensor) -> Tensor:
        return helper(_scaled(x)) * SCALED.scale * SCALED.twice * float(os.environ["SCALE"])

    run = fg.cuda_graph(f)
    for number in range(6):
        if number > 2 and kind == "cell of a function":
            scale = float(number)
        elif number > 2:
            {
                "attribute of the class": lambda n: setattr(SCALED, "scale", n),
                "name of the class": lambda n: setattr(Scaled, "scale", n),
                "property": lambda n: setattr(Scaled.inner, "scale", n),
                "defaults": lambda n: setattr(_scaled, "__defaults__", (n,)),
                "environment": lambda n: monkeypatch.setenv("SCALE", str(n)),
            }[kind](float(number))
        assert torch.equal(run(torch.ones(2)), f(torch.ones(2))), number
    Scaled.inner.scale = 1.0
    assert run.replayed == 5, run


def test_what_torch_is_set_to_by_a_call() -> None:
    def f(x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x + 1

    run = fg.cuda_graph(f)
    for _ in range(4):
        with torch.enable_grad():
            run(torch.ones(2))
            assert not torch.is_grad_enabled()
    assert "changes a setting of torch" in str(run)


def test_an_iterator_is_not_replayed() -> None:
    numbers = iter(range(9))
    run = fg.cuda_graph(lambda x: x + next(numbers))
    assert [run(torch.zeros(1)).item() for _ in range(9)] == list(range(9))


def globals_of_tests() -> None:
    global CALLS
    CALLS += 1


def test_more_forms_than_are_kept() -> None:
    run = fg.cuda_graph(lambda x: x + 1)
    for _ in range(20):
        for size in range(1, 40):
            run(torch.ones(size))
    assert run.recorded < 39 * 8 and "more than 32 call signatures alternate" in str(run)


def test_what_could_not_be_recorded_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = fg.cuda_graph(lambda x: x + 1)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Tapes, "record", out_of_memory)
        for _ in range(3):
            run(torch.ones(2))
    assert "no memory" in str(run)
    for _ in range(20):
        run(torch.ones(2))
    assert (run.recorded, run.replayed) == (1, 20)


@pytest.mark.parametrize(
    "name", ["cuda.enable_flash_sdp", "cuda.enable_math_sdp", "cudnn.deterministic", "cudnn.enabled", "cudnn.benchmark"]
)
def test_settings_of_kernels_are_part_of_the_form(name: str) -> None:
    module, _, attribute = name.partition(".")
    backend = getattr(torch.backends, module)
    is_function = callable(getattr(backend, attribute))
    put = getattr(backend, attribute) if is_function else partial(setattr, backend, attribute)
    before = getattr(backend, attribute.replace("enable_", "") + "_enabled")() if is_function else getattr(backend, attribute)
    run = fg.cuda_graph(lambda x: x + 1)
    try:
        for value in (before, not before):
            put(value)
            for _ in range(5):
                run(torch.ones(2))
    finally:
        put(before)
    assert run.recorded == 2


@pytest.mark.parametrize("has_gradients", [False, True])
def test_arguments_are_freed(has_gradients: bool) -> None:
    run = fg.cuda_graph(nn.Linear(2, 2))
    with torch.set_grad_enabled(has_gradients):
        for _ in range(3):
            x = torch.ones(3, 2)
            run(x)
            held = weakref.ref(x)
            del x
            assert held() is None
    assert run.replayed == 2


def _jvp(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "jvp": _jvp,
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("kind", list(TRANSFORMS))
@pytest.mark.parametrize("is_inside", [False, True])
def test_transforms_around_and_inside(kind: str, is_inside: bool) -> None:
    linear = nn.Linear(2, 2)
    transformed = partial(TRANSFORMS[kind], linear)
    run = fg.cuda_graph(transformed if is_inside else linear)
    for number in range(4):
        x = torch.full((3, 2), float(number))
        if not is_inside:
            run(x)
        found, expected = run(x) if is_inside else TRANSFORMS[kind](run, x), transformed(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert is_inside or "inside of a transform" in str(run)
