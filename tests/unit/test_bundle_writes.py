"""Built kernels that write in place: the checks and results of declared ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.bundle.load import BuiltFunction
from fusegen.cli.main import main
from fusegen.errors import ArgumentError, GradientError
from tests.unit.bundles import built, equal
from tests.unit.eager import randn


def store(cache: Tensor, x: Tensor) -> Tensor:
    cache.copy_(x * 2)
    return x + 1


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> BuiltFunction:
    return built(tmp_path_factory.mktemp("writes") / "kernels", store, (randn(5, 8), randn(5, 8)), mutates=("cache",))


def test_a_built_kernel_writes_what_the_declared_one_writes(kernel: BuiltFunction) -> None:
    declared, x = fg.kernel(mutates=("cache",))(store), randn(7, 8)
    ours, theirs = torch.zeros(7, 8), torch.zeros(7, 8)
    assert equal(kernel(ours, x), declared(theirs, x)) and equal(ours, theirs)


def test_a_write_is_counted(kernel: BuiltFunction) -> None:
    cache = torch.zeros(5, 8)
    version = cache._version
    kernel(cache, randn(5, 8))
    assert cache._version == version + 1


def test_elements_that_are_one_in_memory_are_not_written(kernel: BuiltFunction) -> None:
    with pytest.raises(ArgumentError, match="several of its elements share one memory location"):
        kernel(torch.zeros(1, 8).expand(5, 8), randn(5, 8))


def test_arguments_that_share_memory_with_a_written_one_are_refused(kernel: BuiltFunction) -> None:
    x = randn(5, 8)
    with pytest.raises(ArgumentError, match="'cache' is written to, but shares memory with 'x'"):
        kernel(x, x)


def test_writes_in_place_are_not_recorded(kernel: BuiltFunction) -> None:
    x = randn(5, 8).requires_grad_()
    with pytest.raises(GradientError, match="store writes in place, which records no gradient, but x requires one"):
        kernel(torch.zeros(5, 8), x)
    with torch.no_grad():
        assert equal(kernel(torch.zeros(5, 8), x), x + 1)


def test_the_build_command_takes_kernels_that_write(tmp_path: Path) -> None:
    source = "import fusegen as fg\n@fg.kernel(mutates=('cache',))\ndef put(cache, x):\n    cache.copy_(x * 2)\n    return x + 1\n"
    (tmp_path / "puts.py").write_text(source)
    shapes = ["--shape", "cache=5x8", "x=5x8"]
    command = ["build", f"{tmp_path / 'puts.py'}:put", "--arch", "cpu", *shapes, "--out", str(tmp_path / "kernels")]
    assert main(command) == 0
    cache, x = torch.zeros(6, 8), randn(6, 8)
    assert equal(fg.load(tmp_path / "kernels").put(cache, x), x + 1) and equal(cache, x * 2)


def test_what_is_written_may_be_returned(tmp_path: Path) -> None:
    def added(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.add_(y), x * y

    kernel, (x, y) = built(tmp_path / "kernels", added, (randn(5, 8), randn(5, 8)), mutates=("x",)), randn(2, 7, 8).unbind()
    expected, given = added(x.clone(), y), x.clone()
    found = kernel(given, y)
    assert found[0] is given and equal(given, expected[0]) and equal(found[1], expected[1])
