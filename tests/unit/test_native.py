"""The native module: its build, and calls and conditions that are what they are in Python."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import fusegen as fg
from fusegen import native
from fusegen.compiler.passes import forget_programs
from fusegen.errors import ArgumentError, GradientError
from fusegen.extension.native import reason
from fusegen.guards import locations as guard_conditions
from fusegen.guards.locations import AccessKind, Conditions, StateLocation, StateRead
from fusegen.guards.values import same
from fusegen.jit.host import compile_shared, load_shared
from fusegen.native import NativeChoice
from fusegen.runtime import cuda
from fusegen.runtime.instructions import Address, CounterValue, HostLaunch, Instructions
from fusegen.settings import cache_folder
from tests.unit.eager import randn

ASKS = """
import sys
from fusegen.extension.native import ensure_native, reason, wait
{}
print(reason(), flush=True)
"""


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """The module, which calls use again behind the test."""
    found = native.loaded()
    if found is None:
        pytest.skip(reason())
    yield found
    native.use(found)


@pytest.mark.usefixtures("way")
def test_a_launch_gets_the_number_of_its_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "counter_of", lambda device: 40 + device)
    text = 'extern "C" void store(const long long* words) { *reinterpret_cast<long long*>(words[0]) = words[1]; }'
    kernel = load_shared(compile_shared(text, ("-O1",), cache_folder("cpu"))).store
    kernel.argtypes, kernel.restype = (ctypes.c_char_p,), None
    launch = HostLaunch(kernel, (Address(0), CounterValue(2)), struct.Struct("qq").pack, None)
    instructions = Instructions(1, (), (launch,), (0,), None, None)
    call = NativeChoice[Any](lambda module: module.Executor(instructions), lambda: instructions).call
    assert call([torch.zeros(1, dtype=torch.int64)], {}).item() == 42


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, module: ModuleType) -> None:
    native.use(module if request.param == "native" else None)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "one kernel": lambda x, w, b: F.gelu(x) * b,
    "products": lambda x, w, b: F.silu(F.linear(x, w)) * F.linear(x, w.mT, b),
    "several results": lambda x, w, b: ((x @ w).softmax(-1), x.argmax(-1), b * 2),
    "random bits": lambda x, w, b: F.dropout(x @ w, 0.5) + b,
    "attention": lambda x, w, b: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]) + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_have_equal_bits(name: str, module: ModuleType) -> None:
    x, w, b, gradient = randn(6, 8), randn(8, 8), randn(8), randn(6, 16)[:, ::2]
    found = []
    for each in (module, None):
        native.use(each)
        kernel = fg.kernel(FUNCTIONS[name])
        forget_programs()
        inputs = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
        torch.manual_seed(3)
        for _ in range(3):
            results = kernel(*inputs)
            first = results[0] if isinstance(results, tuple) else results
            gradients = torch.autograd.grad(first, inputs, gradient.reshape(first.shape), allow_unused=True)
        found.append([*(results if isinstance(results, tuple) else [results]), *(g for g in gradients if g is not None)])
        assert (type(first.grad_fn).__name__ == "CppFunction") == (each is not None)
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("way")
def test_sizes_and_numbers_beside_tensors_have_no_gradients() -> None:
    def function(x: torch.Tensor, copies: int, factor: float) -> torch.Tensor:
        return F.gelu(x).repeat(copies, 1) * factor

    x, kernel = randn(6, 8).requires_grad_(), fg.kernel(function)
    given = ((2, 0.5), (3, 0.5), (3, 2.0))
    several = [kernel(x, *each) for each in given]
    assert all((type(each.grad_fn).__name__ == "CppFunction") == (native.loaded() is not None) for each in several)
    for each, (copies, factor) in zip(several, given, strict=True):
        for _ in range(2):
            (ours,) = torch.autograd.grad(each.sum(), x, retain_graph=True)
            (theirs,) = torch.autograd.grad(function(x, copies, factor).sum(), x)
            torch.testing.assert_close(ours, theirs)
    whole = fg.kernel(lambda x, copies: F.gelu(x).repeat(copies, 1) + copies)
    (ours,) = torch.autograd.grad(whole(x, 2).sum(), x)
    (theirs,) = torch.autograd.grad(F.gelu(x).repeat(2, 1).sum(), x)
    torch.testing.assert_close(ours, theirs)


class _Labelled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.usefixtures("way")
def test_gradients_of_a_class_or_with_tangents_are_refused_whatever_came_before() -> None:
    kernel, x = fg.kernel(lambda x: x.sigmoid() * x), randn(4, 8).requires_grad_()
    y, gradient = kernel(x), torch.ones(4, 8)
    torch.autograd.grad(y, x, gradient, retain_graph=True)
    with pytest.raises(ArgumentError, match="is a _Labelled"):
        torch.autograd.grad(y, x, gradient.as_subclass(_Labelled), retain_graph=True)
    with forward_ad.dual_level(), pytest.raises(GradientError, match="has a forward-mode tangent"):
        torch.autograd.grad(y, x, forward_ad.make_dual(gradient, gradient))


@pytest.mark.usefixtures("way")
def test_nothing_that_is_saved_can_be_read_twice() -> None:
    x = randn(4, 8).requires_grad_()
    y = fg.kernel(lambda x: x + x)(x)
    for _ in range(2):
        y.backward(torch.ones(4, 8))
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 8), 4.0))


@pytest.mark.usefixtures("way")
def test_a_backward_pass_is_refused_where_autograd_refuses_it() -> None:
    kernel = fg.kernel(FUNCTIONS["products"])
    x, w, b = (tensor.requires_grad_() for tensor in (randn(6, 8), randn(8, 8), randn(8)))
    kernel(x, w, b).sum().backward()
    loss = kernel(x, w, b).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    loss = kernel(x, w, b).sum()
    (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(GradientError, match="differentiated again"):
        torch.autograd.grad(by_x.sum(), x)
    with pytest.raises(GradientError, match="gradients are batched"):
        torch.autograd.grad(kernel(x, w, b), x, torch.ones(2, 6, 8), is_grads_batched=True)
    loss = kernel(x, w, b).sum()
    with torch.no_grad():
        w += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Owner:
    """Holds something of each kind."""

    named = 1

    def __init__(self) -> None:
        self.tensor = torch.ones(4, 2)
        self.held: dict[str, Any] = {"a": 1.0, "b": [1, 2], "c": {"x", "y"}, "d": None, "tensor": self.tensor}
        self.held["proxy"] = weakref.proxy(self.tensor)
        self.held["nested"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        self.held |= {"array": np.arange(3.0), "number": np.array(1.0), "bytes": bytearray(b"ab"), "empty": set(), "order": (1, 2)}
        self.linear = nn.Linear(2, 2)
        self.other = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.ReLU())
        self.block.register_buffer("shift", None)
        local = 3
        self.function = lambda: local
        self.is_fine = True

    def set_cell(self, value: int) -> None:
        self.function.__closure__[0].cell_contents = value


def conditions(owner: Owner, weak: Callable[[object], bool] = lambda _: False) -> native.NativeChoice[Callable[[], bool]]:
    asked = Conditions(weak)
    for key in owner.held:
        asked.item(owner.held, key)
    asked.item(Owner, "named")
    asked.item(owner.linear._parameters, "weight")
    asked.identity(StateLocation(vars(owner.linear), AccessKind.ITEM, "_parameters"), owner.linear._parameters)
    asked.sizes([owner.held, owner.linear._buffers])
    asked.holds(lambda: owner.is_fine)
    slots = [
        StateLocation(owner.function, AccessKind.CELL, 0),
        StateLocation(owner, AccessKind.ATTRIBUTE, "other"),
        StateLocation(owner.other, AccessKind.PARAMETER, "weight"),
        StateLocation(owner, AccessKind.HAS, "missing"),
        StateLocation(vars(owner), AccessKind.MISSING, frozenset({"later"})),
        StateLocation(owner, AccessKind.TYPE),
        StateLocation(owner.set_cell, AccessKind.ATTRIBUTE, "__func__"),
        StateLocation(owner, AccessKind.METHOD, "set_cell"),
        StateLocation(owner, AccessKind.DEFINED, "other"),
        StateLocation(owner.block, AccessKind.SUBMODULE, "0"),
        StateLocation(owner.block, AccessKind.BUFFER, "shift"),
    ]
    for slot in slots:
        asked.read(StateRead(slot, slot.get()))
    return asked.function()


CHANGES: dict[str, Callable[[Owner], object]] = {
    "another value": lambda o: o.held.update(a=2.0),
    "a value of another type": lambda o: o.held.update(a=1),
    "a list's element": lambda o: o.held["b"].append(3),
    "a set's element": lambda o: o.held["c"].add("z"),
    "a set's first element": lambda o: o.held["empty"].add(1),
    "an array's element": lambda o: o.held["array"].__setitem__(1, 5.0),
    "an array's number": lambda o: o.held["number"].fill(5.0),
    "a byte": lambda o: o.held["bytes"].append(1),
    "another tuple": lambda o: o.held.update(order=(2, 1)),
    "no longer None": lambda o: o.held.update(d=0),
    "gone": lambda o: o.held.pop("d"),
    "one more": lambda o: o.held.update(e=1),
    "a class's attribute": lambda o: setattr(Owner, "named", 2),
    "another parameter": lambda o: setattr(o.linear, "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter that moves": lambda o: setattr(o.linear.weight, "data", torch.ones(2, 2)),
    "a parameter with other strides": lambda o: setattr(o.linear.weight, "data", o.linear.weight.data.t()),
    "a tensor of another shape in the same place": lambda o: setattr(o.tensor, "data", o.tensor.data[:2]),
    "a tensor of another dtype in the same place": lambda o: setattr(o.tensor, "data", o.tensor.data.view(torch.int32)),
    "a dictionary of parameters": lambda o: vars(o.linear).update(_parameters=dict(o.linear._parameters)),
    "a dictionary of parameters that is asked alone": lambda o: vars(o.other).update(_parameters={}),
    "a buffer": lambda o: o.linear.register_buffer("more", torch.ones(1)),
    "a question": lambda o: setattr(o, "is_fine", False),
    "a cell": lambda o: o.set_cell(4),
    "an attribute": lambda o: setattr(o, "other", nn.Linear(2, 2)),
    "a method": lambda o: setattr(o, "set_cell", MethodType(lambda _: None, o)),
    "a submodule": lambda o: o.block.__setitem__(0, nn.ReLU()),
    "a buffer that was None": lambda o: o.block.register_buffer("shift", torch.ones(2)),
    "an attribute that is gone": lambda o: delattr(o, "other"),
    "a parameter of another module": lambda o: o.other.register_parameter("weight", None),
    "an attribute that was missing": lambda o: setattr(o, "missing", 1),
    "a variable that was missing": lambda o: vars(o).update(later=1),
    "a class": lambda o: setattr(o, "__class__", type("Other", (Owner,), {})),
}


def is_large(value: object) -> bool:
    return isinstance(value, Owner | nn.Module)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("weak", [None, is_large], ids=["held", "held weakly"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_is_seen(change: str, weak: Callable[[object], bool] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "named", 1)
    owner = Owner()
    holds = conditions(owner) if weak is None else conditions(owner, weak)
    owner.held |= {"a": float("1"), "order": tuple([1, 2])}  # equal ones
    assert holds.call() is True
    CHANGES[change](owner)
    assert holds.call() is False


@pytest.mark.usefixtures("way")
def test_a_condition_on_what_is_gone_is_false() -> None:
    module, asked = nn.ReLU(), Conditions(is_large)
    place = SimpleNamespace(module=module)
    asked.identity(StateLocation(module, AccessKind.HAS, "missing"), False)
    asked_of_place = Conditions(is_large)
    asked_of_place.identity(StateLocation(place, AccessKind.ATTRIBUTE, "module"), module)
    found, of_owner, of_value = weakref.ref(module), asked.function(), asked_of_place.function()
    assert of_owner.call() and of_value.call()
    del asked, asked_of_place, module
    place.module = None
    assert found() is None
    assert of_owner.call() is False and of_value.call() is False


@pytest.mark.usefixtures("way")
def test_asking_while_it_is_asked_sees_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread does, while a comparison in Python lets it run."""
    answers: list[bool] = []

    def comparing(one: object, other: object) -> bool:
        if not answers:
            answers.append(True)
            answers[0] = holds.call()
        return same(one, other)

    monkeypatch.setattr(guard_conditions, "same", comparing)
    held, asked = {"a": 1.5}, Conditions()
    asked.item(held, "a")
    holds = asked.function()
    assert holds.call() is True
    held["a"] = 2.5
    assert holds.call() is False and answers == [False]


WRITES: dict[str, Callable[[dict[str, int]], object]] = {
    "an item": lambda d: d.__setitem__("a", 5),
    "a deleted item": lambda d: d.__delitem__("a"),
    "pop": lambda d: d.pop("a"),
    "popitem": lambda d: d.popitem(),
    "clear": lambda d: d.clear(),
    "update": lambda d: d.update(a=5),
    "or": lambda d: d.__ior__({"a": 5}),
    "setdefault": lambda d: d.setdefault("c", 1),
    "popitem of the first": lambda d: d.popitem(last=False) if isinstance(d, OrderedDict) else d.popitem(),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("write", list(WRITES))
def test_a_dictionary_is_watched_by_each_that_asks(write: str, kind: type[dict[str, int]]) -> None:
    held = kind({"a": 1000, "b": 2000})
    asks = []
    for _ in range(3):
        asked = Conditions()
        asked.sizes([held])
        for key in held:
            asked.item(held, key)
        asks.append(asked.function())
    assert all(each.call() for each in asks)
    del asks[1]
    for _ in range(2):
        WRITES[write](held)
        assert [each.call() for each in asks] == [False, False]
        assert [each.call() for each in asks] == [False, False]
        held.clear()
        held.update(a=1000, b=2000)
        assert all(each.call() for each in asks)


@pytest.mark.usefixtures("way")
def test_a_name_that_is_a_word_of_python() -> None:
    owner, asked = SimpleNamespace(**{"lambda": 1}), Conditions()
    asked.read(StateRead(StateLocation(owner, AccessKind.ATTRIBUTE, "lambda"), 1))
    holds = asked.function()
    assert holds.call() is True
    setattr(owner, "lambda", 2)
    assert holds.call() is False


@pytest.mark.usefixtures("way")
def test_errors_of_what_is_asked_pass_through() -> None:
    def fails() -> bool:
        raise OSError("no such thing")

    asked = Conditions()
    asked.holds(fails)
    with pytest.raises(OSError, match="no such thing"):
        asked.function().call()


def test_what_the_module_does_not_take_is_python() -> None:
    module = native.loaded()
    if module is None:
        pytest.skip(reason())

    def refused(_: object) -> Callable[[], int]:
        raise TypeError("no such argument")

    at_once = native.NativeChoice(refused, lambda: lambda: 1)
    native.use(None)
    try:
        later = [native.NativeChoice(refused, lambda: lambda: 2), native.NativeChoice(lambda _: lambda: 4, lambda: lambda: 3)]
    finally:
        native.use(module)
    assert [each.call() for each in (at_once, *later)] == [1, 2, 4]


def test_what_changed_before_the_module_was_there_is_seen() -> None:
    module = native.loaded()
    if module is None:
        pytest.skip(reason())
    native.use(None)
    try:
        owners = [Owner() for _ in range(3)]
        asked = [conditions(owner) for owner in owners]
        owners[1].linear.weight.data = torch.ones(2, 2)
        owners[2].linear.register_buffer("more", torch.ones(1))
    finally:
        native.use(module)
    assert [type(each.call).__name__ for each in asked] == ["Conditions"] * 3
    assert [each.call() for each in asked] == [True, False, False]


def _asks(code: str, folder: Path, compiler: str, **variables: str) -> subprocess.Popen[str]:
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) ;; *) echo "c++ 13.0"; exit;; esac\n{compiler}\n')
    script.chmod(0o755)
    environment = {**os.environ, "CXX": str(script), "FUSEGEN_CACHE_DIR": str(folder / "cache"), **variables}
    return subprocess.Popen([sys.executable, "-c", ASKS.format(code)], env=environment, stdout=subprocess.PIPE, text=True)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    found, _ = _asks("wait()", tmp_path, "exit 1", FUSEGEN_NATIVE="0").communicate()
    assert found == "FUSEGEN_NATIVE=0\n" and not (tmp_path / "cache").exists()


@pytest.mark.deep  # four processes that start a builder
def test_a_compiler_that_fails_is_asked_once(tmp_path: Path) -> None:
    fork = "import os\nothers = [os.fork() for _ in range(2)]\nwait()\nall(others) and [os.waitpid(each, 0) for each in others]"
    found, _ = _asks(fork, tmp_path, f"echo x >> {tmp_path}/asked; echo out of memory; exit 1").communicate()
    assert found.count("was not built") == 4 and "out of memory" in found
    assert (tmp_path / "asked").read_text().count("x") <= sum(path.suffix == ".cpp" for path in native.SOURCES) < 4


@pytest.mark.deep  # torch's builder takes its time
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_build_ends_with_its_process(is_killed: bool, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    begun = f"ensure_native()\nimport os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)"
    ends = "\nos.kill(os.getpid(), 9)" if is_killed else ""
    found, _ = _asks(begun + ends, tmp_path, f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 60").communicate()
    assert found == ("" if is_killed else "it is being built\n")
    _wait_until(lambda: _has_ended(pid.read_text().strip()))
    left = {path.suffix for path in (tmp_path / "cache" / "native").iterdir() if path.is_file()}
    assert left <= {".lock"}  # it is gone where the thread of the build saw its compiler end


@pytest.mark.deep
def test_a_child_that_ends_leaves_the_build_alone(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"ensure_native()\nimport os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
    code += f"child = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\nos.kill(int(open({str(pid)!r}).read()), 0)"
    found, _ = _asks(code, tmp_path, f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 60").communicate()
    assert found == "it is being built\n"


def _has_ended(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _wait_until(answer: Callable[[], bool]) -> None:
    for _ in range(200):
        if answer():
            return
        time.sleep(0.01)
    raise AssertionError("not within two seconds")
