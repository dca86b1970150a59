"""What is shipped: sdist -> wheel -> clean environment, without network."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import fusegen
from fusegen.bundle.manifest import FORMAT
from tests.naming import case

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = ("constraints.txt", "constraints-cuda12.txt")


def test_there_is_one_version() -> None:
    assert fusegen.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_docs_name_the_format_of_bundles() -> None:
    assert f"reads format {FORMAT}." in (ROOT / "docs" / "shipping.md").read_text(encoding="utf-8")


def _pins(file: str) -> dict[str, str]:
    """What a file of constraints pins, by package."""
    return dict(re.findall(r"^([\w.-]+)==([^;\s]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_constraints_pin_every_dependency() -> None:
    for file in CONSTRAINTS:
        with case(file):
            extras = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
            named = {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in (*PROJECT["dependencies"], *extras)}
            assert named - {"fusegen"} <= set(_pins(file))


def test_pins_are_in_the_ranges_that_the_package_asks_for() -> None:
    for file in CONSTRAINTS:
        with case(file):
            pins = _pins(file)
            for requirement in map(Requirement, PROJECT["dependencies"]):
                assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_constraints_fit_a_machine_without_cuda() -> None:
    """NVIDIA's packages do not exist for macOS."""
    for file in CONSTRAINTS:
        with case(file):
            text = (ROOT / file).read_text(encoding="utf-8")
            lines = [line for line in text.splitlines() if re.match(r"(nvidia-|cuda-|triton)", line)]
            assert len(lines) > 10
            assert not [line for line in lines if "sys_platform" not in line]


def test_the_files_differ_in_cuda_alone() -> None:
    first, second = map(_pins, CONSTRAINTS)
    common = {name for name in first.keys() & second.keys() if first[name] != second[name]}
    assert common == {"torch", "triton", "cuda-bindings"}
    apart = first.keys() ^ second.keys()
    assert all(re.match(r"nvidia-|cuda-toolkit", name) for name in apart), apart
