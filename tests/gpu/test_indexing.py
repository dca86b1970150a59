"""Indices that are values, on hardware: what the CPU's tests read, larger tables, the device assert of an index out of range."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from tests.emulator import test_indexing as products
from tests.unit.eager import agree, randn
from tests.unit.indexed import NORMS, POINTWISE, REDUCED, embed_norm, indices

CASES = {**NORMS, **POINTWISE, **REDUCED}
OF_THE_CPU = ("a module", "a table of positions", "a table of constants")
"""Cases with tensors that torch would not move."""

OUT_OF_RANGE = """
import torch
import torch.nn.functional as F

import fusegen as fg


@fg.kernel
def embed(ids: torch.Tensor, wte: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, wte) * 2


ids = torch.tensor([1, {index}], device="cuda")
embed(ids, torch.randn({rows}, 8, device="cuda"))
torch.cuda.synchronize()
"""


def on_gpu(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cuda() if isinstance(a, Tensor) else a for a in arguments)


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_THE_CPU])
def test_values(name: str) -> None:
    function, arguments = CASES[name]
    agree(function, on_gpu(arguments))


@pytest.mark.parametrize(("function", "arguments"), [case[:2] for case in products.CASES])
def test_beside_products(function: Callable[..., Tensor], arguments: Callable[[], tuple[Tensor, ...]]) -> None:
    given = on_gpu(arguments())
    got, wanted = fg.kernel(function)(*given), function(*given)
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2**-6, atol=2**-6 * (1 + wanted.abs().max().item()))


@pytest.mark.parametrize("columns", [768, 770, 1024, 20000])
def test_embedding_position_and_norm_at_the_sizes_of_models(columns: int) -> None:
    bf16 = torch.bfloat16
    tables = (
        randn(5021, columns, dtype=bf16),
        randn(1024, columns, dtype=bf16),
        randn(columns, dtype=bf16),
        randn(columns, dtype=bf16),
    )
    agree(embed_norm, on_gpu((indices(2, 1024, below=5021), *tables)))


def test_a_table_that_needs_64_bits() -> None:
    table = torch.zeros(1 << 20, 2304, dtype=torch.bfloat16, device="cuda")
    table[-1] = 3
    ids = torch.tensor([0, (1 << 20) - 1], device="cuda")
    got = fg.kernel(lambda ids, table: torch.nn.functional.embedding(ids, table) + 1)(ids, table)
    assert got[0].eq(1).all() and got[1].eq(4).all()


@pytest.mark.parametrize(("index", "rows"), [(-1, 6), (6, 6), (1 << 40, 6), (0, 1)])
def test_an_index_out_of_range(index: int, rows: int, tmp_path: Path) -> None:
    """In a process of its own, whose context it takes along; the offset into a table of one row mentions no index."""
    script = tmp_path / "embed.py"
    script.write_text(OUT_OF_RANGE.format(index=index, rows=rows))
    own = {**os.environ, "PYTHONPATH": str(Path(fg.__file__).parents[1])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=own)
    assert done.returncode != 0
    assert "fusegen: embed: index of 'wte' out of range [0, " in done.stdout + done.stderr
    assert "assert" in done.stderr
