"""Calls take kernels of the folders in ``FUSEGEN_BUNDLE_PATH`` where no compiler works, and compile what these do not have."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.bundle import kernels
from fusegen.bundle.build import build
from fusegen.bundle.manifest import RequestedCall, binary
from fusegen.bundle.programs import state_of
from fusegen.cli.build_folder import request_of
from fusegen.compiler import backends
from fusegen.compiler.compile import BuiltSpecialization
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.passes import forget_programs
from fusegen.dtypes import DType
from fusegen.errors import SettingsError, ToolNotFoundError, VerificationError
from fusegen.nn import SwiGLU
from fusegen.settings import settings
from fusegen.specs import SPECS
from fusegen.target import target
from fusegen.verify.cases import sized_case
from fusegen.verify.lowering import prepare
from tests.naming import case
from tests.unit.bundles import CASES, descriptions, equal, kernels_in, product, rewrite, row, wanted
from tests.unit.eager import randn

ROOT = Path(__file__).resolve().parents[2]
CACHE = os.environ["FUSEGEN_CACHE_DIR"]  # of all tests
ALONE = """
import pickle, sys
import torch
import fusegen as fg
from tests.unit.bundles import kernels_in, CASES
results = [fg.kernel(CASES[name][0])(*arguments) for name, arguments in pickle.load(open(sys.argv[1], "rb"))]
pickle.dump(results, open(sys.argv[2], "wb"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `row` for CPUs."""
    build(tmp_path / "kernels", [wanted(*CASES["row"][:2])], "test")
    return tmp_path / "kernels"


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has calls run kernels of some folders alone: no compiler works, the cache is empty, and nothing is loaded."""

    def use(*folders: Path, **variables: str) -> None:
        named = {"CXX": "/no-compiler", "FUSEGEN_CACHE_DIR": str(tmp_path / "empty")} | variables
        for variable, value in named.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("FUSEGEN_BUNDLE_PATH", os.pathsep.join(map(str, folders)))
        monkeypatch.setattr(backends, "_LOADED", {})
        monkeypatch.setattr(kernels, "_LOADED", {})
        kernels._kernels_or_warning.cache_clear()
        kernels._models_or_warning.cache_clear()
        kernels._warn.cache_clear()
        settings.cache_clear()
        forget_programs()

    return use


def test_a_new_process_without_a_compiler(tmp_path: Path) -> None:
    names = ["row", "product"]
    build(tmp_path / "kernels", [wanted(*CASES[name][:2]) for name in names], "test")
    environment = {"FUSEGEN_BUNDLE_PATH": str(tmp_path / "kernels"), "CXX": "/no-compiler", "FUSEGEN_NATIVE": "0"}
    environment |= {"FUSEGEN_CACHE_DIR": str(tmp_path / "empty"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "calls"), str(tmp_path / "results")]
    (tmp_path / "calls").write_bytes(pickle.dumps([(name, CASES[name][2]) for name in names]))
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=280)
    assert done.returncode == 0, done.stderr
    results = pickle.loads((tmp_path / "results").read_bytes())
    for name, result in zip(names, results, strict=True):
        function, _, other = CASES[name]
        assert equal(result, fg.kernel(function)(*other)), name
    assert not [*(tmp_path / "empty").glob("cpu/*")]


def test_every_kind_of_kernel_has_equal_bits(tmp_path: Path, only: Callable[..., None]) -> None:
    cases = {name: CASES[name] for name in ("pointwise", "several", "embedded", "nested", "numbers", "sized")}
    build(tmp_path / "kernels", [wanted(function, made) for function, made, _ in cases.values()], "test")
    expected = {name: [fg.kernel(function)(*each) for each in calls] for name, (function, *calls) in cases.items()}
    only(tmp_path / "missing", tmp_path / "kernels")
    with pytest.warns(RuntimeWarning, match="no built kernels in .*missing"):
        fg.kernel(cases["sized"][0])(*cases["sized"][1])
    for name, (function, *calls) in cases.items():
        kernel = fg.kernel(function)
        with case(name):
            assert all(equal(kernel(*each), result) for each, result in zip(calls, expected[name], strict=True))


def test_gradients_of_all_inputs(folder: Path, only: Callable[..., None]) -> None:
    def gradients() -> list[Tensor]:
        x, weight = (value.clone().requires_grad_() for value in CASES["row"][2])
        result = fg.kernel(row)(x, weight)
        return list(torch.autograd.grad(result, (x, weight), torch.ones_like(result)))

    expected = gradients()
    only(folder)
    assert all(map(torch.equal, gradients(), expected))


def test_the_name_does_not_matter(folder: Path, only: Callable[..., None]) -> None:
    def another(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight) + x

    arguments = CASES["row"][2]
    expected = fg.kernel(row)(*arguments)
    only(folder)
    assert torch.equal(fg.kernel(another)(*arguments), expected)


def test_a_module_takes_the_kernel_of_its_function(tmp_path: Path, only: Callable[..., None]) -> None:
    gate, up = randn(5, 64), randn(5, 64)
    expected = SwiGLU()(gate, up)
    request = request_of(RequestedCall("swiglu", target="cpu", dtype="f32", shapes=("gate=8x64", "up=8x64")))
    build(tmp_path / "kernels", [request], "test")
    only(tmp_path / "kernels")
    assert torch.equal(SwiGLU()(gate, up), expected)
    sized = sized_case(SPECS["swiglu"], DType.FLOAT32, {"rows": 8, "features": 64})
    with pytest.raises(VerificationError, match=r"run kernels built into .*, not the emitted text"):
        prepare(SPECS["swiglu"], sized, target("cpu"))


def test_another_graph_of_the_same_name_is_compiled(folder: Path, only: Callable[..., None]) -> None:
    def other(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight) - x

    other.__name__ = row.__name__
    x, weight = CASES["row"][2]
    expected = fg.kernel(other)(x, weight)
    only(folder)
    calls = [
        (other, (x, weight)),
        (row, (randn(5, 99), randn(99))),
        (row, (x.double(), weight.double())),
        (row, (randn(65, 101)[:, :100], weight)),
    ]
    for function, arguments in calls:
        with case((function, arguments[0].shape)), pytest.raises(ToolNotFoundError):
            fg.kernel(function)(*arguments)
    only(folder, CXX="", FUSEGEN_CACHE_DIR=CACHE)
    assert torch.equal(fg.kernel(other)(x, weight), expected)


def test_other_options_are_other_graphs(folder: Path, only: Callable[..., None]) -> None:
    only(folder)
    with pytest.raises(ToolNotFoundError):
        fg.kernel(row, fast_math=True)(*CASES["row"][2])


def test_a_call_with_one_row_is_built_on_its_own(tmp_path: Path, only: Callable[..., None]) -> None:
    folder, weight = tmp_path / "kernels", randn(100)
    build(folder, [wanted(row, (randn(8, 100), weight))], "test")
    only(folder)
    with pytest.raises(ToolNotFoundError):
        fg.kernel(row)(randn(1, 100), weight)
    only(folder, CXX="", FUSEGEN_CACHE_DIR=CACHE)
    build(tmp_path / "both", [wanted(row, (randn(rows, 100), weight)) for rows in (8, 1)], "test")
    only(tmp_path / "both")
    kernel = fg.kernel(row)
    for x in (randn(1, 100), randn(5, 100)):
        assert torch.allclose(kernel(x, weight), row(x, weight), atol=1e-5)


def test_sizes_that_a_program_is_not_built_for(folder: Path, only: Callable[..., None]) -> None:
    only(folder)
    variant = kernels_in(folder)[0].variants[0]
    ((built, _),) = kernels.kernels_for(variant.graph, variant.names, target("cpu"))
    assert built.serves({"x_dim0": 65}) and not built.serves({"x_dim0": 0}) and not built.serves({})


# Folders that are not as they were built.


def test_a_damaged_binary_is_compiled(folder: Path, only: Callable[..., None]) -> None:
    library = folder / kernels_in(folder)[0].variants[0].code[0].file
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    only(folder)
    with pytest.warns(RuntimeWarning, match="was modified after the build"), pytest.raises(ToolNotFoundError):
        fg.kernel(row)(*CASES["row"][2])
    expected = fg.kernel(row)
    only(folder, CXX="", FUSEGEN_CACHE_DIR=CACHE)
    with pytest.warns(RuntimeWarning, match="the kernel is compiled"):
        assert torch.allclose(expected(*CASES["row"][2]), row(*CASES["row"][2]), atol=1e-5)


def test_a_manifest_that_names_another_graph_is_not_taken(folder: Path, only: Callable[..., None]) -> None:
    """The mark of a binary covers the digest of its graph."""
    x, weight = CASES["row"][2]

    def other(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight) - x

    variant, _ = Dispatcher(other, "row").variants.variant_of([x, weight], target("cpu"), torch.device("cpu"))
    digest = variant.cache.graph_digest
    rewrite(folder, lambda content: content["kernels"][0]["variants"][0].update(graph=digest))
    only(folder)
    with pytest.warns(RuntimeWarning, match="was compiled for another call"), pytest.raises(ToolNotFoundError):
        fg.kernel(other)(x, weight)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tensors", ["q", "weight"]),
        ("tensors", ["x"]),
        ("sizes", ["x_stride0", "x_stride1", "weight_stride0", "rows"]),
        ("numbers", ["by"]),
    ],
)
def test_damaged_names_are_a_warning(folder: Path, only: Callable[..., None], kind: str, names: list[str]) -> None:
    """Also if the digests fit, which a damaged file does not have."""
    rewrite(folder, lambda content: content["kernels"][0]["variants"][0]["names"].update({kind: names}))
    (path,) = descriptions(folder)
    only(folder)
    texts = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found, pytest.raises(ToolNotFoundError):
            fg.kernel(row)(*CASES["row"][2])
        texts += [str(warning.message) for warning in found]
    damage = "is damaged: the names of a program are not those of its graph" if kind != "sizes" else "was compiled for another call"
    assert len(texts) == 1 and damage in texts[0] and str(folder) in texts[0] and "kernels are compiled" in texts[0]
    assert kind == "sizes" or str(path) in texts[0]


def test_a_damaged_program_is_compiled_and_another_one_of_its_kernel_is_taken(tmp_path: Path, only: Callable[..., None]) -> None:
    folder, (x, weight) = tmp_path / "kernels", CASES["row"][2]
    double = x.double(), weight.double()
    build(folder, [wanted(row, (x, weight)), wanted(row, double)], "test")
    rewrite(folder, lambda content: content["kernels"][0]["variants"][-1]["call"]["steps"].append({"Nothing": {}}))
    only(folder)
    assert torch.allclose(fg.kernel(row)(x, weight), row(x, weight), atol=1e-5)
    with pytest.warns(RuntimeWarning, match=r"LaunchPlan\.steps.*kernels are compiled"), pytest.raises(ToolNotFoundError):
        fg.kernel(row)(*double)


@pytest.mark.parametrize("changed", ["folder", "manifest.json", "binary", "its folder"])
def test_a_folder_that_others_can_write_to_is_refused(folder: Path, only: Callable[..., None], changed: str) -> None:
    library = folder / kernels_in(folder)[0].variants[0].code[0].file
    path = {"folder": folder, "binary": library, "its folder": library.parent}.get(changed, folder / changed)
    path.chmod(path.stat().st_mode | 0o020)
    only(folder)
    with pytest.raises(SettingsError, match=r"is refused: other users can write to it.*built kernels are run as code"):
        fg.kernel(row)(*CASES["row"][2])
    assert "is refused" in state_of(str(folder))[1]
    only(folder, FUSEGEN_SHARED_CACHE="1")
    fg.kernel(row)(*CASES["row"][2])


def test_a_folder_of_another_format_is_a_warning(folder: Path, only: Callable[..., None]) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    only(folder)
    with pytest.warns(RuntimeWarning, match="has format 1.*kernels are compiled"), pytest.raises(ToolNotFoundError):
        fg.kernel(row)(*CASES["row"][2])


def test_another_version_is_not_taken_and_the_doctor_says_so(
    folder: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_of(str(folder)) == (True, f"{len(kernels_in(folder)[0].programs)} programs in {folder}")
    for module in ("compiler.compile", "bundle.programs"):
        monkeypatch.setattr(f"fusegen.{module}.generator", lambda: "0" * 64)
    only(folder)
    with pytest.raises(ToolNotFoundError):
        fg.kernel(row)(*CASES["row"][2])
    is_used, text = state_of(str(folder))
    assert not is_used and "are not used: another version of fusegen (test)" in text


# Stages, and targets without a device here.


def test_lower_shows_the_plan_of_a_compilation(folder: Path, only: Callable[..., None]) -> None:
    x, weight = CASES["row"][2]
    before = fg.kernel(row).lower(x, weight, target="cpu")
    only(folder)
    after = fg.kernel(row).lower(x, weight, target="cpu")
    assert [source.text for source in after.sources] == [source.text for source in before.sources]
    assert f"run kernels built into {folder}" in after.explain() and "built into" not in before.explain()


def test_operators_are_compiled(folder: Path, only: Callable[..., None]) -> None:
    only(folder)
    x, weight = CASES["row"][2]
    variant, _ = Dispatcher(row, "row").variants.variant_of([x, weight], target("cpu"), x.device)
    assert isinstance(variant.specialization, BuiltSpecialization)
    sizes = {"x_dim0": 65, "x_stride0": 100, "x_stride1": 1, "weight_stride0": 1}
    taken = {c: backends.machine_of(x.device, c).loadable(variant, sizes, x.device) for c in ("nvrtc", "extension")}
    assert taken["nvrtc"] is variant and taken["extension"].specialization.sources is not None


def test_cubins_are_found_for_their_architecture_and_row_counts(tmp_path: Path, only: Callable[..., None]) -> None:
    x, w, bias = (value.bfloat16() for value in CASES["product"][1])
    build(tmp_path / "kernels", [wanted(product, (x, w, bias), "sm_90a")], "test")
    only(tmp_path / "kernels")

    def found(architecture: str, rows: int) -> Any:
        dispatcher, values = Dispatcher(product, "product"), [randn(rows, 64).bfloat16(), w, bias]
        return dispatcher.variants.variant_of(values, target(architecture), torch.device("cuda"))[0].specialization

    for rows in (8, 40, 5000):
        with case(rows):
            specialization = found("sm_90a", rows)
            assert isinstance(specialization, BuiltSpecialization)
            built = specialization.kernels
            assert all(binary(built.folder, code, built._mark()).startswith(b"\x7fELF") for code in built.program.code)
            assert all(relation({"x_dim0": rows}) for relation in built.program.rows)
    assert not isinstance(found("sm_80", 8), BuiltSpecialization)
    only(tmp_path / "kernels", FUSEGEN_EMULATE="1")
    assert not isinstance(found("sm_90a", 8), BuiltSpecialization), "the emulator runs the text"
