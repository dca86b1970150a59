"""What is verified again is what changed: what cases become is remembered, and records are kept where they still hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fusegen.dtypes import DType
from fusegen.emit import environment
from fusegen.specs import SPECS, Spec
from fusegen.target import CPU, Target, target
from fusegen.verify import run
from fusegen.verify.cases import CANONICAL, Case, cases
from fusegen.verify.lowering import LoweredCase, prepare
from fusegen.verify.record import DtypeRecord, Environment, path_of, read
from fusegen.verify.run import SpecResult, every_case, store, verify
from tests.unit.test_verify_check import HOST, SHIFTED

GELU, HOPPER, BF16, F32 = SPECS["gelu"], target("sm_90a"), DType.BFLOAT16, DType.FLOAT32
HERE = Environment("a CPU", "cpu", None, None, "13.0", "2.13", "0.1.0", "now")


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the cases that are lowered from here on, with an empty memory."""
    names: list[str] = []

    def counted(spec: Spec, case: Case, target: Target) -> LoweredCase:
        names.append(case.name)
        return prepare(spec, case, target)

    monkeypatch.setattr(run, "prepare", counted)
    monkeypatch.setattr(run, "cache_folder", lambda name: tmp_path / name)
    return names


def test_what_cases_become_is_found_out_once(lowered: list[str]) -> None:
    first = every_case(GELU, BF16, HOPPER)
    assert lowered == [case.name for case in cases(GELU, BF16)] == list(first)
    assert every_case(GELU, BF16, HOPPER) == first
    assert len(lowered) == len(first)
    every_case(GELU, F32, HOPPER)
    assert len(lowered) > len(first), "another element type is another question"


def test_a_changed_package_forgets(lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    every_case(GELU, BF16, HOPPER)
    monkeypatch.setattr(run, "generator", lambda: "another")
    every_case(GELU, BF16, HOPPER)
    assert lowered.count(CANONICAL) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"generator": 1, "cases": {"canonical": 3}}'])
def test_a_damaged_memory_is_none(lowered: list[str], tmp_path: Path, content: str) -> None:
    every_case(GELU, BF16, HOPPER)
    (tmp_path / "emitted/sm_90a-gelu-bf16.json").write_text(content)
    every_case(GELU, BF16, HOPPER)
    assert lowered.count(CANONICAL) == 2


def test_the_package_does_not_know_what_a_users_spec_is(lowered: list[str]) -> None:
    for _ in range(2):
        every_case(replace(GELU, operands=SHIFTED.operands, kernel=SHIFTED.kernel, variants={}), F32, HOPPER)
    assert lowered.count(CANONICAL) == 2


def test_the_generators_digest_sees_package_templates_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        environment.generator.cache_clear()
        return environment.generator()

    package, folder = tmp_path / "package", tmp_path / "templates"
    for path in (package / "ir/ops.py", folder / "cuda/rows/shared.cu.jinja"):
        path.parent.mkdir(parents=True)
        path.write_text("one")
    monkeypatch.setattr(environment, "__file__", str(package / "emit/environment.py"))
    monkeypatch.setattr(environment, "templates", lambda: folder)
    found = [digest(), digest()]
    (package / "ir/ops.py").write_text("two")
    found.append(digest())
    (folder / "cuda/rows/shared.cu.jinja").write_text("two")
    found.append(digest())
    monkeypatch.setattr(environment.sympy, "__version__", "0")  # type: ignore[attr-defined]
    found.append(digest())
    environment.generator.cache_clear()
    assert found[0] == found[1] and len(set(found)) == 4


# Runs.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's identity for the CPU, and no case that is too large for it."""
    monkeypatch.setattr(run, "environment_of", lambda device: HERE)
    monkeypatch.setattr(run, "cases", _few)


def _few(spec: Spec, dtype: DType) -> tuple[Case, ...]:
    return tuple(case for case in cases(spec, dtype) if case.name in (CANONICAL, "odd", "expanded"))


def _verify(known: Path | None) -> SpecResult:
    ((row,),) = verify([SHIFTED], [F32], [CPU], HOST, lambda text: None, (), known)
    return row


def _names(row: SpecResult) -> Sequence[str]:
    return [prepared.case.name for prepared, _ in row.cases]


@pytest.mark.usefixtures("small")
def test_only_what_changed_is_run(tmp_path: Path) -> None:
    first = _verify(tmp_path)
    assert _names(first) == [CANONICAL, "odd", "expanded"], "without a record"
    store([first], tmp_path, HERE)
    path = path_of(tmp_path, "cpu", "shifted")
    again = _verify(tmp_path)
    assert _names(again) == [] and list(again.kept) == [CANONICAL, "odd", "expanded"]
    assert store([again], tmp_path, HERE) == [], "there is nothing new to say"
    before = path.read_text()
    _damage(path, "odd")
    third = _verify(tmp_path)
    assert _names(third) == ["odd"]
    store([third], tmp_path, HERE)
    assert path.read_text() == before, "the other cases stay, in their order"
    assert _names(_verify(None)) == [CANONICAL, "odd", "expanded"]


def _damage(path: Path, case: str) -> None:
    (digest,) = _entry(path).cases[case].sources
    path.write_text(path.read_text().replace(digest, "0" * len(digest)))


def _entry(path: Path) -> DtypeRecord:
    return read(path)["f32"]


@pytest.mark.usefixtures("small")
def test_other_software_verifies_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store([_verify(tmp_path)], tmp_path, HERE)
    monkeypatch.setattr(run, "environment_of", lambda device: replace(HERE, time="later"))
    assert _names(_verify(tmp_path)) == []
    monkeypatch.setattr(run, "environment_of", lambda device: replace(HERE, driver="590"))
    assert len(_names(_verify(tmp_path))) == 3
