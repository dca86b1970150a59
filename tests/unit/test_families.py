"""A family of kernels is what it defines itself, and a line in the list: fusion, lowering, text, `explain` and calls go by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import sympy
import torch
from torch import Tensor

import fusegen as fg
from fusegen import families
from fusegen.emit import cpu, cuda
from fusegen.emit.views import entry, kernel_parameters
from fusegen.families.base import Emitters, KernelFamily
from fusegen.fusion.groups import Domain, Group, GroupKind
from fusegen.fusion.matcher import Claims, Decision
from fusegen.fusion.producers import domain_axes
from fusegen.ir.formula import ceil_div
from fusegen.ir.graph import Graph
from fusegen.ir.index_map import flat_offset, memory_strides
from fusegen.ir.ops import Op
from fusegen.ir.symbolic import Index, product
from fusegen.schedule.context import Context, assemble, uses_of
from fusegen.schedule.kernel import Body, LoweredKernel, Plan
from fusegen.schedule.program import Launch, Step
from fusegen.source import Source
from fusegen.target import Target
from tests.unit.eager import randn

ROW_SUM = GroupKind("sum of a row by one thread")


@dataclass(frozen=True)
class RowSumPlan(Plan):
    threads: int


@dataclass(frozen=True)
class RowSumBody(Body):
    rows: Index
    columns: Index
    plan: RowSumPlan


def _loop(kernel: LoweredKernel, body: RowSumBody) -> str:
    read, written = (pointer.name for pointer in kernel.pointers)
    return f"""
    float sum = 0.0f;
    for (i64 column = 0; column < {body.columns}; ++column) sum += {read}[row * {body.columns} + column];
    {written}[row] = sum;
"""


def emit_cuda(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, RowSumBody)
    head = f'extern "C" __global__ void {entry(kernel)}({", ".join(kernel_parameters(kernel))})'
    row = f"const i64 row = static_cast<i64>(block_id()) * {body.plan.threads} + thread_id();"
    return cuda.assemble(launch, target, "", f"{head} {{\n    {row}\n    if (row >= {body.rows}) return;{_loop(kernel, body)}}}\n")


def emit_cpp(kernel: LoweredKernel, launch: Launch, target: Target) -> Source:
    body = kernel.body
    assert isinstance(body, RowSumBody)
    taken = [f"const auto {p.name} = argument<{p.type}>(arguments, {n});" for n, p in enumerate(cpu.names_of(kernel).parameters)]
    head = f'extern "C" void {entry(kernel)}(const void* arguments) {{\n    ' + "\n    ".join(taken)
    return cpu.assemble(
        launch, target, "", f"{head}\n    for (i64 row = 0; row < {body.rows}; ++row) {{{_loop(kernel, body)}    }}\n}}\n"
    )


class RowSums(KernelFamily):
    """Sums of the rows of a matrix of the caller, each by one thread."""

    kinds = (ROW_SUM,)
    cuda: ClassVar[Emitters] = {RowSumBody: emit_cuda}
    cpu: ClassVar[Emitters] = {RowSumBody: emit_cpp}

    def claim(self, graph: Graph, target: Target, claims: Claims) -> None:
        for position, node in graph:
            if node.op is Op.SUM and node.attr("dims") == (1,) and graph.nodes[node.args[0]].op is Op.INPUT:
                claims.ends.add(position)

    def group(self, graph: Graph, root: int, target: Target, decision: Decision) -> Group | None:
        node = graph.nodes[root]
        if root not in decision.ends or node.op is not Op.SUM:
            return None
        return Group(ROW_SUM, (root,), node.args, Domain(graph.nodes[node.args[0]].shape, (1,)), (root,))

    def lower(self, context: Context) -> Sequence[Step]:
        (matrix,), (total,) = context.group.inputs, context.group.outputs
        axes = domain_axes(context.group.domain)
        read, (store,) = context.reads[matrix], context.stores(total, (axes.symbols[0], sympy.Integer(0)), axes)
        places = [(flat_offset(axes.symbols, memory_strides(context.graph, matrix)), ()), (store.offset, ())]
        body = RowSumBody(*axes.extents, RowSumPlan(threads=64))
        uses = uses_of(places, (), (), axes.extents)
        kernel = assemble(context, body, [uses], context.pointers([read], [store.buffer]), (), axes.symbols)
        grid = ceil_div(product(axes.extents[:1]), body.plan.threads)
        return [Launch(kernel, context.group, (), grid, body.plan.threads, 0, context.traffic())]


@pytest.fixture
def row_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", (RowSums(), *families.FAMILIES))


@pytest.mark.usefixtures("own_cache", "either", "row_sums")
@pytest.mark.parametrize("rows", [1, 64, 67])
def test_a_family_of_one_file_computes_what_it_takes(rows: int) -> None:
    @fg.kernel
    def shares(x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)

    x = randn(rows, 40).abs()
    torch.testing.assert_close(shares(x), x / x.sum(-1, keepdim=True))
    low = shares.lower(x)
    assert [group.kind.name for group in low.groups] == [ROW_SUM.name, "pointwise"]
    assert ROW_SUM.name in low.explain()
