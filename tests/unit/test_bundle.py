"""Built kernels: the same results as those that are declared, and clear words where nothing was built."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusegen as fg
from fusegen.bundle.build import BuildRequest, build
from fusegen.bundle.kernels import Mismatch, match
from fusegen.bundle.load import load
from fusegen.bundle.manifest import BuiltPasses, BuiltVariant
from fusegen.compiler.backends import emulated_machine
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.emulator import EmulatorBackend, emulated_kernels
from fusegen.errors import ArgumentError, BundleError, TraceError
from fusegen.jit import nvrtc
from fusegen.program.call import LaunchPlan
from fusegen.program.codec import Deferred, Line, Lines, Shared, decode, encode
from fusegen.program.formula import size
from fusegen.program.numbers import Numbers, Scalar
from fusegen.program.signature import Constant, builder
from fusegen.runtime import devices
from fusegen.runtime.execute import bound_call
from fusegen.target import target
from tests.naming import case
from tests.unit.bundles import CASES, built, equal, kernels_in, numbers, pointwise, row, sized, wanted
from tests.unit.eager import randn

ROOT = Path(__file__).resolve().parents[2]

# Without compiler, templates and computer algebra.

ALONE = """
import pickle, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sympy", "jinja2", "rich", "ninja", "cuda") or name in ("fusegen.jit.nvrtc", *sys.argv[4:]):
            raise ImportError(f"{name} cannot be imported here")

sys.meta_path.insert(0, Refuses())
import fusegen as fg
kernels = fg.load(sys.argv[1])
calls, results = pickle.load(open(sys.argv[2], "rb")), {}
for name, arguments in calls.items():
    results[name] = kernels[name](*arguments)
import torch
from torch.utils._pytree import tree_leaves
torch.save({name: tree_leaves(r) for name, r in results.items()}, sys.argv[3])
print(sorted(name for name in sys.modules if name.split(".")[0] in ("sympy", "jinja2") or "nvrtc" in name))
"""


def test_a_process_without_sympy_jinja_and_nvrtc_calls_them_with_equal_bits(tmp_path: Path) -> None:
    from torch.utils._pytree import tree_leaves

    some = {name: CASES[name] for name in ("row", "numbers")}
    build(tmp_path / "kernels", [wanted(function, made) for function, made, _ in some.values()], "test")
    (tmp_path / "calls").write_bytes(pickle.dumps({name: other for name, (_, _, other) in some.items()}))
    command = [
        sys.executable,
        "-c",
        ALONE,
        *(str(tmp_path / name) for name in ("kernels", "calls", "results")),
        *("cuda.bindings.nvrtc", "fusegen.guards.recorder", "fusegen.ir", "fusegen.progress", "fusegen.schedule"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[]"
    results = torch.load(tmp_path / "results", weights_only=True)
    for name, (function, _, other) in some.items():
        theirs = tree_leaves(fg.kernel(function)(*other))
        assert len(results[name]) == len(theirs)
        assert all(torch.equal(one, two) for one, two in zip(results[name], theirs, strict=True)), name


@pytest.mark.parametrize("name", CASES)
def test_results_and_their_structure_are_a_kernel_s(name: str, tmp_path: Path) -> None:
    function, made, other = CASES[name]
    kernel, found = fg.kernel(function), built(tmp_path / "kernels", function, made)
    for arguments in (made, other, other):
        assert equal(kernel(*arguments), found(*arguments))


def test_a_position_of_zero_is_refused_by_its_parameter_s_name_and_can_be_built(tmp_path: Path) -> None:
    def written(cache: Tensor, new: Tensor, start: int) -> Tensor:
        cache[:, start : start + 1] = new
        return cache.sum(-1)

    cache, new = randn(2, 8, 16), randn(2, 1, 16)
    build(tmp_path / "one", [wanted(written, (cache, new, 3), mutates=["cache"])], "test")
    with pytest.raises(ArgumentError, match="'start' is 0, built for an int of 1 and more"):
        load(tmp_path / "one").written(cache, new, 0)
    build(tmp_path / "zero", [wanted(written, (cache, new, 0), mutates=["cache"])], "test")
    load(tmp_path / "zero").written(cache, new, 0)
    assert torch.equal(cache[:, :1], new)


def test_a_name_that_a_bundle_lacks(tmp_path: Path) -> None:
    build(tmp_path / "kernels", [wanted(row, CASES["row"][1])], "test")
    bundle = load(tmp_path / "kernels")
    with pytest.raises(KeyError, match="the bundle has no kernel 'rows'; it has row"):
        bundle["rows"]
    with pytest.raises(AttributeError, match="the bundle has no kernel 'rows'; it has row"):
        bundle.rows  # noqa: B018


def test_none_among_results_keeps_its_place(tmp_path: Path) -> None:
    def function(x: Tensor) -> dict[str, Any]:
        return {"none": None, "pair": (x * 2, None), "sum": x.sum(-1)}

    found = built(tmp_path / "kernels", function, (randn(3, 8),))
    x = randn(5, 8)
    results = found(x)
    assert list(results) == ["none", "pair", "sum"] and results["none"] is None and results["pair"][1] is None
    assert torch.equal(results["pair"][0], x * 2) and torch.equal(results["sum"], fg.kernel(function)(x)["sum"])


@pytest.mark.parametrize("name", ["numbers"])
def test_cuda_of_a_folder_under_the_emulator(name: str, tmp_path: Path) -> None:
    function, made, other = CASES[name]
    halves = [tuple(a.bfloat16() if isinstance(a, Tensor) else a for a in given) for given in (made, other)]
    built(tmp_path / "kernels", function, halves[0], "sm_90a")
    (kernel,) = kernels_in(tmp_path / "kernels")
    names = [p.plain for p in kernel.parameters]
    for code in (code for variant in kernel.variants for code in variant.code):
        assert (tmp_path / "kernels" / code.file).read_bytes()[:4] == b"\x7fELF"
        assert code.entry in (tmp_path / "kernels" / code.source).read_text()
    dispatcher = Dispatcher(function, function.__name__)
    values = dispatcher.arguments(halves[1], {})
    (variant,) = (variant for variant in kernel.variants if _fits(variant, names, values))
    lowered, _ = dispatcher.variants.variant_of(values, target("sm_90a"), torch.device("cpu"))
    sizes = match(variant, names, values)
    kernels = emulated_kernels(lowered.sources)
    cpu = torch.device("cpu")
    program = bound_call(variant.call, builder(variant.structure), sizes, cpu, EmulatorBackend(), kernels)
    theirs = emulated_machine(target("sm_90a")).bound(lowered, dispatcher.variants.sizes(lowered, values, ()), cpu)
    tensors = [v for v in values if isinstance(v, Tensor)]
    scalars = _scalars(variant.call, sizes, dispatcher, values)
    assert equal(theirs.call(tensors, scalars), program.call(tensors, scalars))


def _scalars(call: LaunchPlan, sizes: dict[str, int], dispatcher: Dispatcher, values: Any) -> dict[str, Any]:
    from fusegen.runtime.bound import scalars_of

    found = scalars_of(call.scalars, sizes, dispatcher.parameters.emitted_names)
    return dict(found(values)) if found else {}


def test_what_is_written_is_read_again_with_all_digits() -> None:
    program = Numbers((0.1 + 0.2, 1e-320, float("-inf"), 2**70, True, Scalar("s"), size("n") * 3 // 7))
    assert repr(decode(json.loads(json.dumps(encode(program, Numbers))), Numbers, "numbers")) == repr(program)


@dataclass(frozen=True)
class _Part(Deferred):
    numbers: Shared[Numbers]
    text: str


@dataclass(frozen=True)
class _Whole(Deferred):
    parts: tuple[Shared[_Part], ...]
    one: Shared[_Part] | None
    other: Shared[_Part] | None


def test_equal_parts_are_one_line_that_is_decoded_when_it_is_read() -> None:
    parts = [_Part(Numbers((1.5,), (("a", 0),)), text) for text in ("x", "y")]
    line = Line(encode(whole := _Whole((*parts, parts[0]), replace(parts[1]), None), _Whole))
    assert len(line.lines) == 4  # the whole, two parts, and one for their numbers
    read = Lines(line.lines.values(), "file").read(_Whole, line.digest)
    assert read == whole and Line(encode(read, _Whole)).lines == line.lines
    assert read.parts[0] is read.parts[2] and read.one is read.parts[1] and read.parts[0].numbers is read.one.numbers
    read = Lines([text for text in line.lines.values() if b"1.5" not in text], "file").read(_Whole, line.digest)
    assert [part.text for part in read.parts] == ["x", "y", "x"]
    with pytest.raises(BundleError, match="file has no line"):
        _ = read.one.numbers
    with pytest.raises(AttributeError, match="'_Part' object has no attribute 'missing'"):
        _ = read.one.missing


def test_a_call_decodes_only_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [(randn(7, 24).to(dtype), randn(24).to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    build(tmp_path / "kernels", [wanted(pointwise, each) for each in arguments], "test")
    decoded = []
    monkeypatch.setattr(Lines, "read", lambda self, kind, digest, read=Lines.read: decoded.append(kind) or read(self, kind, digest))
    kernel = load(tmp_path / "kernels").pointwise
    assert LaunchPlan not in decoded and BuiltPasses not in decoded
    with torch.no_grad():
        assert equal(kernel(*arguments[1]), fg.kernel(pointwise)(*arguments[1]))
    assert decoded.count(LaunchPlan) == 1


def test_messages_name_the_place_of_a_wrong_value() -> None:
    encoded = encode(Numbers((0.5, size("n") * 3)), Numbers)
    encoded["lines"][1]["Formula"][2] = {}
    with pytest.raises(BundleError, match=r"numbers\.lines\[1\]: \{\} is not a formula"):
        decode(encoded, Numbers, "numbers")


def test_values_that_select_code_are_read_again() -> None:
    for value in (None, True, 3, -0.0, float("inf"), "é", (1, (2.5, None)), torch.bfloat16):
        found = decode(json.loads(json.dumps(encode(Constant(value), Constant))), Constant, "value").value
        assert repr(found) == repr(value)
    with pytest.raises(BundleError, match="cannot be stored in a bundle"):
        encode(Constant(object()), Constant)


# Which calls.


def refusal(kernel: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ArgumentError) as error:
        kernel(*arguments, **named)
    return str(error.value)


def test_what_does_not_fit_says_why_and_what_was_built(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", row, (randn(7, 100), randn(100)))
    x, weight = randn(8, 100), randn(100)
    assert "'x' is float64[8, 100], built for float32[x_dim0, 100]" in refusal(kernel, x.double(), weight)
    assert "'x' is float32[2, 8, 100]" in refusal(kernel, randn(2, 8, 100), weight)
    assert "dim 1 of 'x' is 99, built for 100" in refusal(kernel, randn(8, 99), randn(99))
    assert "x_dim0 is 0, built for 1 and more" in refusal(kernel, x[:0], weight)
    assert "the stride of dim 0 of 'x' is 200, built for 100\n" in refusal(kernel, randn(8, 200)[:, :100], weight)
    assert "'weight' is None, built for float32[100]" in refusal(kernel, x, None)
    assert "it was built for x: float32[x_dim0, 100], weight: float32[100]" in refusal(kernel, x, weight.double())
    assert "missing a required argument: 'weight'" in refusal(kernel, x)
    assert "call it as row(x, weight)" in refusal(kernel, x, weight, 3)


def test_sizes_that_are_one_in_the_example_stay_one(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", lambda_of_two(), (randn(7, 8), randn(7, 8)))
    assert "dim 0 of 'y' is 6, but x_dim0 is 5 already" in refusal(kernel, randn(5, 8), randn(6, 8))


def lambda_of_two() -> Any:
    def both(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    return both


def _averaged(x: Tensor, weight: Tensor) -> Tensor:
    return (x - x.mean(0)) @ weight + x.var(0).sum()


def _squeezed(x: Tensor, weight: Tensor) -> Tensor:
    return x.squeeze() * weight


def _of_one_row(x: Tensor, weight: Tensor) -> Tensor:
    return x * 2 if x.shape[0] == 1 else x + weight


@pytest.mark.parametrize("function", [row, _averaged, _squeezed, _of_one_row])
def test_sizes_of_one_are_served(function: Callable[..., Tensor], tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", function, (randn(5, 8), weight := randn(8)))
    for rows in (1, 3):
        x = randn(rows, 8)
        torch.testing.assert_close(kernel(x, weight), function(x, weight), equal_nan=True)


def test_a_copy_of_more_than_one_row_alone_is_a_guard(tmp_path: Path) -> None:
    def doubled(x: Tensor) -> Tensor:
        x.t().contiguous().mul_(2)
        return x + 1

    kernel = built(tmp_path / "kernels", doubled, (randn(5, 8),), mutates=("x",))
    for rows in (1, 3):
        given, expected = (values := randn(rows, 8)).clone(), values.clone()
        assert equal(kernel(given), doubled(expected)) and equal(given, expected)


def test_alignment_is_a_guard(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", pointwise, (randn(7, 24), randn(24)))
    odd = randn(8 * 24 + 1)[1:].view(8, 24)
    assert "'x' is aligned to 4 bytes, built for 16" in refusal(kernel, odd, randn(24))


def test_a_relation_of_sizes_is_a_guard(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", sized, (randn(2, 8), randn(9, 8)))
    x, y = randn(3, 8), randn(12, 8)
    assert "built for y_dim0 > x_dim0 * 4, which does not hold for x_dim0 = 3, y_dim0 = 12" in refusal(kernel, x, y)
    assert equal(kernel(x, randn(13, 8).fill_(1)), sized(x, torch.ones(13, 8)))


def test_conditions_of_numbers_are_guards(tmp_path: Path) -> None:
    kernel, x = built(tmp_path / "kernels", numbers, (randn(5, 8), 0.5, 3)), randn(5, 8)
    assert equal(kernel(x, 0.5, 9), fg.kernel(numbers)(x, 0.5, 9))
    for _ in range(2):  # also where a program is bound for these shapes
        assert "built for lr > 0.25, which does not hold for lr = 0.125" in refusal(kernel, x, 0.125, 3)
    torch.testing.assert_close(kernel(x, 1, 3), kernel(x, 1.0, 3))
    assert "'lr' is '1', built for a run-time float" in refusal(kernel, x, "1", 3)
    assert "'step' is True, built for a run-time int" in refusal(kernel, x, 0.5, True)
    assert "'mode' is 'other', built for 'plain'" in refusal(kernel, x, 0.5, 3, mode="other")
    assert "scalars cannot be computed" in refusal(kernel, x, 0.5, 0)


def test_the_default_dtype_is_a_guard(tmp_path: Path) -> None:
    kernel, x = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), (randn(7, 100), randn(100))
    kernel(*x)
    torch.set_default_dtype(torch.float64)
    try:
        assert "default dtype is torch.float64, built for float32" in refusal(kernel, *x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_is_a_guard(tmp_path: Path) -> None:
    kernel, x = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), (randn(7, 100), randn(100))
    with torch.autocast("cpu", torch.bfloat16):
        lower = built(tmp_path / "lower", row, (randn(7, 100), randn(100)))
        assert "autocast is on with torch.bfloat16, but was off at the build" in refusal(kernel, *x)
        torch.testing.assert_close(lower(*x), row(*x))
    kernel(*x)
    assert "autocast is off, but was on with torch.bfloat16 at the build" in refusal(lower, *x)


def test_values_of_traces_are_refused(tmp_path: Path) -> None:
    kernel, x, weight = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), randn(7, 100), randn(100)
    kernel(x, weight)
    with pytest.raises(TraceError, match="cannot be inlined"):
        fg.kernel(lambda x, weight: kernel(x, weight) + 1)(x, weight)


def test_another_architecture_says_what_there_is(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", row, (randn(7, 100), randn(100)), "sm_90a")
    assert "row was not built for cpu (cpu); it was built for sm_90a" in (text := refusal(kernel, randn(7, 100), randn(100)))
    assert "--arch sm_90a,cpu" in text
    assert kernel.targets == ("sm_90a",) and repr(kernel) == "<fusegen kernel row, built for sm_90a>"


def test_clusters_that_a_part_of_a_gpu_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    kernel = built(tmp_path / "kernels", softmax, (torch.empty(2, 400_000, device="meta"),), "sm_90a")
    monkeypatch.setattr(devices, "target_of", lambda _: replace(target("sm_90a"), cluster=8))
    assert "does not support clusters of 16 blocks" in refusal(kernel, randn(2, 400_000))


def test_several_programs_of_one_kernel(tmp_path: Path) -> None:
    arguments = [(randn(7, 24).to(dtype), randn(24).to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    strided = (randn(7, 30)[:, :24], randn(24))
    one_row = (randn(1, 24), randn(24))
    build(tmp_path / "kernels", [wanted(pointwise, each) for each in (*arguments, strided, one_row)], "test")
    kernel, declared = load(tmp_path / "kernels").pointwise, fg.kernel(pointwise)
    for each in (*arguments, strided, one_row, (randn(9, 78)[:, :24], randn(24)), (randn(1, 24), randn(24), 3.0)):
        assert equal(kernel(*each), declared(*each))
    text = refusal(kernel, randn(7, 24).half(), randn(24).half())
    assert "x: float32[x_dim0, 24] with strides [x_stride0, 1], bias: float32[24]" in text
    assert text.count("built for float32") == 3 and text.count("built for bfloat16") == 1


def test_a_folder_that_is_built_anew_is_loaded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 8)
    monkeypatch.chdir(tmp_path)
    for factor, function in ((2, lambda x: x * 2), (3, lambda x: x * 3)):
        build(Path("kernels"), [BuildRequest("f", function, {"x": x}, target("cpu"))], "0")
        kernel = load("kernels").f
        monkeypatch.chdir("/")  # a kernel knows where it lies
        assert kernel(x)[0, 0] == factor
        monkeypatch.chdir(tmp_path)
        shutil.rmtree("kernels")


def test_every_form_is_built_and_found_by_the_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: SimpleNamespace(cubin=b"\x7fELF"))  # which form it is counts alone

    def linear_gelu(x: Tensor, weight: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight))

    def arguments(rows: int) -> dict[str, Tensor]:
        return {"x": torch.empty(rows, 2048, device="meta").half(), "weight": torch.empty(4096, 2048, device="meta").half()}

    build(tmp_path / "built", [BuildRequest("linear_gelu", linear_gelu, arguments(512), target("sm_90a"))], "0")
    (kernel,) = kernels_in(tmp_path / "built")
    calls = []
    for rows in (2, 33, 512, 200000):
        fitting = [v.call for v in kernel.variants if _fits(v, ["x", "weight"], [*arguments(rows).values()])]
        low = fg.kernel(linear_gelu).lower(**arguments(rows), target="sm_90a")
        assert fitting == [low.program.call], f"{rows} rows"
        calls += fitting
    assert len({str(call) for call in calls}) >= 3


def _fits(variant: BuiltVariant, names: Sequence[str], values: Sequence[Any]) -> bool:
    try:
        match(variant, names, values)
    except Mismatch:
        return False
    return True


def test_a_size_that_is_an_int(tmp_path: Path) -> None:
    def shortened(x: Tensor, length: int) -> Tensor:
        return x[:length].sum(-1)

    kernel, x = built(tmp_path / "kernels", shortened, (randn(12, 9), 5)), randn(20, 9)
    for length in (1, 3, 11):
        assert equal(kernel(x, length), fg.kernel(shortened)(x, length))
    for length in (0, -3, 25):
        assert "length" in refusal(kernel, x, length)


def test_keyword_only_parameters_and_defaults(tmp_path: Path) -> None:
    kernel, x = built(tmp_path / "kernels", numbers, (randn(5, 8), 0.5, 3)), randn(5, 8)
    assert str(kernel.__signature__) == "(x, lr, step, *, mode='plain')"
    assert equal(kernel(step=4, x=x, lr=0.5, mode="plain"), kernel(x, 0.5, 4))
    assert "too many positional arguments" in refusal(kernel, x, 0.5, 4, "plain")


# A second call of the same shapes.


def test_threads_call_one_kernel(tmp_path: Path) -> None:
    kernel, inputs = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), [randn(n, 100) for n in range(2, 18)]
    weight, results = randn(100), dict[int, Tensor]()

    def work(number: int) -> None:
        results[number] = kernel(inputs[number], weight)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    declared = fg.kernel(row)
    assert all(equal(results[n], declared(x, weight)) for n, x in enumerate(inputs))


# What cannot be built.


def test_what_only_the_function_knows_is_refused(tmp_path: Path) -> None:
    def called(x: Tensor, act: Any) -> Tensor:
        return act(x)

    with pytest.raises(BundleError, match="stored in a bundle"):
        built(tmp_path / "kernels", called, (randn(3, 8), F.gelu))
    assert list(tmp_path.iterdir()) == []


FLAG = torch.ones(1)


def by_gradients(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


def by_a_value(x: Tensor) -> Tensor:
    return x * FLAG.item()


def test_what_a_built_kernel_cannot_ask_is_refused(tmp_path: Path) -> None:
    for function, says in (
        (by_gradients, r"torch\.is_grad_enabled\(\)"),
        (by_a_value, "a property of a captured tensor"),
    ):
        with case((function, says)):
            with pytest.raises(BundleError, match=f"reads {says} while it is traced"):
                built(tmp_path / "kernels", function, (randn(3, 8),))
            assert list(tmp_path.iterdir()) == []


def test_one_tensor_given_twice_to_a_function_that_asks(tmp_path: Path) -> None:
    def same(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x + y

    kernel, x, y = built(tmp_path / "kernels", same, (randn(3, 8), randn(3, 8))), randn(3, 8), randn(3, 8)
    assert equal(kernel(x, y), x + y)
    with pytest.raises(ArgumentError, match="'x' and 'y' are one tensor, but were two at the build"):
        kernel(x, x)
    assert equal(kernel(y, x), x + y)


def test_an_error_of_the_user_s_function_stays_its_own(tmp_path: Path) -> None:
    def opens(x: Tensor) -> Tensor:
        return x * float(Path("weights.bin").read_text())

    with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
        built(tmp_path / "kernels", opens, (randn(3, 8),))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    built(tmp_path / "whole", row, (randn(7, 100), randn(100)))  # compiled now, so that the bundle alone is written below
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BundleError, match="cannot be written: No space left"):
        built(tmp_path / "kernels", row, (randn(7, 100), randn(100)))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nvrtc, "compile_cubin", fails)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "kernels", [wanted(row, (randn(7, 100), randn(100)), arch) for arch in ("cpu", "sm_90a")], "test")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kernels").mkdir()
    with pytest.raises(BundleError, match="exists already"):
        build(tmp_path / "kernels", [], "test")
    with pytest.raises(BundleError, match="cannot be created"):
        build(tmp_path / "nowhere" / "kernels", [], "test")


def test_kernels_with_names_of_a_mapping_s_methods(tmp_path: Path) -> None:
    def keys(x: Tensor) -> Tensor:
        return x * 2

    x = randn(3, 8)
    assert equal(built(tmp_path / "kernels", keys, (x,))(x), x * 2)
    assert equal(load(tmp_path / "kernels").keys(x), x * 2)


def test_a_bundle_is_a_mapping_with_attributes(tmp_path: Path) -> None:
    kernel = built(tmp_path / "kernels", row, (randn(7, 100), randn(100)))
    kernels = fg.load(str(tmp_path / "kernels"))
    assert list(kernels) == ["row"] and len(kernels) == 1 and "row" in dir(kernels) and kernels.row.__name__ == kernel.__name__
    assert re.fullmatch("<fusegen bundle of row>", repr(kernels))
    with pytest.raises(AttributeError, match="no kernel 'rows'; it has row"):
        _ = kernels.rows


def test_copies(tmp_path: Path) -> None:
    kernel, arguments = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), (randn(7, 100), randn(100))
    assert copy.deepcopy([kernel])[0] is kernel
    both = load(tmp_path / "kernels"), kernel
    again, other = pickle.loads(pickle.dumps(both))
    assert equal(again.row(*arguments), kernel(*arguments)) and equal(other(*arguments), kernel(*arguments))
    assert list(copy.deepcopy(again)) == ["row"]


@pytest.mark.deep
def test_torch_compile_calls_it_as_it_is(tmp_path: Path) -> None:
    kernel, weight = built(tmp_path / "kernels", row, (randn(7, 100), randn(100))), randn(100)
    compiled = torch.compile(lambda x: kernel(x + 1, weight) * 2, backend="eager")
    for x in (randn(3, 100), randn(3, 100), randn(8, 100)):
        assert equal(compiled(x), kernel(x + 1, weight) * 2)
