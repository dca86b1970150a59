"""A graph as an operator of torch: ``torch.ops.fusegen.<name>_<digest>``, with shapes for tensors that stand for others."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusegen.compiler.backends import machine_of
from fusegen.compiler.passes import GraphKernel
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, InputSpec
from fusegen.ir.symbolic import literal
from fusegen.ir.versions import owner
from fusegen.program.formula import Relation
from fusegen.runtime.written import check_apart
from fusegen.schedule.names import plain
from fusegen.threads import cached_property, new_lock

LIBRARY: Any = torch.library.Library("fusegen", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Holds the operators."""


@dataclass(frozen=True)
class Assumed:
    """A graph, and the calls that it is good for.

    Attributes:
        graph: as traced, with all results once.
        sizes: symbolic sizes that no input has, in order.
        relations: of sizes that must hold.
        wrt: of a forward pass, the inputs by which there are gradients: two of them may have one graph.
        recompute: of a forward pass, the rule by which its backward pass computes values again: two rules may give one graph.
        boxed: run-time floats that the operator takes as tensors of the CPU: torch compiles a graph that passes a float for one
            value, and a graph that passes a tensor for all.
    """

    graph: Graph
    sizes: tuple[str, ...] = ()
    relations: tuple[Relation, ...] = ()
    wrt: tuple[str, ...] = ()
    recompute: str = "auto"
    boxed: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The operator's name: that of the function, and a digest of the graph."""
        relations = tuple(map(str, self.relations))
        text = repr((self.graph.facts, self.sizes, relations, self.wrt, self.recompute, self.boxed))
        return f"{plain(self.graph.name)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class GraphOperator:
    """An operator. It takes the tensors of the graph's inputs, the values of sizes that no input has, and the run-time scalars.

    Args:
        assumed: the graph, and what it is good for.
    """

    _known: ClassVar[dict[str, GraphOperator]] = {}
    _lock: ClassVar[threading.RLock] = new_lock()

    def __init__(self, assumed: Assumed) -> None:
        self.assumed, self.graph, self.name = assumed, assumed.graph, assumed.name
        self._kernels: dict[str, GraphKernel] = {}
        self._places = {
            str(dim): (n, d) for n, spec in reversed([*enumerate(self.graph.inputs)]) for d, dim in enumerate(spec.shape)
        }
        reads_tensors = (torch.Tag.cudagraph_unsafe,) if assumed.boxed else ()  # a replayed CUDA graph would not read them again
        names = [self.graph.nodes[owner(self.graph, put)].attr("name") for put in self.graph.writes]
        self._written = [place for place, spec in enumerate(self.graph.inputs) if spec.name in names]
        LIBRARY.define(self._schema, tags=(torch.Tag.pt2_compliant_tag, *reads_tensors))
        LIBRARY.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(self.qualified, self._shapes, lib=LIBRARY)

    @classmethod
    def of(cls, assumed: Assumed, finish: Callable[[GraphOperator], None]) -> GraphOperator:
        """The operator of a graph, which is made once.

        Args:
            assumed: the graph.
            finish: what else is registered for a new one.
        """
        with cls._lock:
            if assumed.name not in cls._known:
                operator = cls(assumed)
                finish(operator)
                cls._known[assumed.name] = operator
            return cls._known[assumed.name]

    @property
    def qualified(self) -> str:
        """Its name with that of the library."""
        return f"fusegen::{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload[..., Any]:
        """The function that torch calls."""
        found: torch._ops.OpOverload[..., Any] = getattr(torch.ops.fusegen, self.name).default
        return found

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Tensor, ...]:
        """Calls the operator.

        Args:
            tensors: one an input.
            numbers: values of `Assumed.sizes` and of the scalars.
        """
        found = self.overload(*tensors, *numbers)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    @property
    def _schema(self) -> str:
        names = [spec.name for spec in self.graph.inputs]
        kinds = ["Tensor" if place not in self._written else f"Tensor(a{place}!)" for place in range(len(names))]
        arguments = [f"{kind} {name}" for kind, name in zip(kinds, _distinct(names), strict=True)]
        arguments += [f"SymInt {plain(name)}_size" for name in self.assumed.sizes]
        arguments += [f"{self._kind(name, dtype)} {plain(name)}_number" for name, dtype in self.graph.scalars]
        count = len(self.graph.outputs)
        results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        return f"{self.name}({', '.join(arguments)}) -> {results}"

    def _kind(self, scalar: str, dtype: DType) -> str:
        """The type of a scalar in the schema."""
        return "Tensor" if scalar in self.assumed.boxed else "float" if dtype.is_float else "SymInt"

    def _run(self, *arguments: Any) -> Tensor | tuple[Tensor, ...] | None:
        """The implementation."""
        tensors = arguments[: len(self.graph.inputs)]
        numbers = [n.item() if isinstance(n, Tensor) else n for n in arguments[len(self.graph.inputs) :]]
        if any(tensor.numel() == 0 for tensor in tensors):
            results = self._empty(tensors, self.sizes(tensors, numbers))
        else:
            results = self._kernel(tensors[0].device)((*tensors, *numbers))
        return _returned(results)

    def _shapes(self, *arguments: Any) -> Tensor | tuple[Tensor, ...] | None:
        """The implementation for tensors that stand for others: fresh ones of the same shapes."""
        tensors, numbers = arguments[: len(self.graph.inputs)], arguments[len(self.graph.inputs) :]
        sizes = self.sizes(tensors, numbers)
        for spec, tensor in zip(self.graph.inputs, tensors, strict=True):
            self._check(spec, tensor, sizes)
        self._require(sizes)
        check_apart([spec.name for spec in self.graph.inputs], tensors, self._written)
        return _returned(self._fresh(tensors, sizes))

    def _fresh(self, tensors: Sequence[Tensor], sizes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        nodes = [self.graph.nodes[position] for position in self.graph.outputs]
        return tuple(tensors[0].new_empty([_extent(d, sizes) for d in node.shape], dtype=node.dtype.torch) for node in nodes)

    def _empty(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        results = self._fresh(tensors, sizes)
        if any(tensor.numel() for tensor in (*results, *(tensors[place] for place in self._written))):
            what = f"{self.graph.name}: an input has no elements, and a result or a tensor that is written to has"
            raise ArgumentError(what, mend="let torch compute what is empty")
        return results

    def sizes(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> dict[str, Any]:
        """The values of the symbolic sizes."""
        found = {symbol: tensors[n].shape[d] for symbol, (n, d) in self._places.items() if symbol.isidentifier()}
        return found | dict(zip(self.assumed.sizes, numbers, strict=False))

    def _check(self, spec: InputSpec, tensor: Tensor, sizes: Mapping[str, Any]) -> None:
        fits = tensor.dim() == len(spec.shape) and tensor.dtype is spec.dtype.torch
        if not fits or any(_extent(d, sizes) != e for d, e in zip(spec.shape, tensor.shape, strict=True)):
            shape = ", ".join(map(str, spec.shape))
            what = (
                f"{self.name}: {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, where {spec.dtype.torch} ({shape}) is needed"
            )
            raise ArgumentError(what)

    def _require(self, sizes: Mapping[str, Any]) -> None:
        """Refuses sizes of which something does not hold that the graph was traced for."""
        for relation in self.assumed.relations:
            if not relation(sizes):
                what = f"{self.name} was traced for sizes of which {relation} holds"
                raise ArgumentError(what, mend="compile or export the model again for these sizes")

    def _kernel(self, device: torch.device) -> GraphKernel:
        target = machine_of(device).target
        if target.name not in self._kernels:
            self._kernels[target.name] = GraphKernel(self.graph, target, self.assumed.sizes, self.assumed.relations)
        return self._kernels[target.name]


def _returned(results: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """An operator's return value, by the number of its results."""
    return results[0] if len(results) == 1 else results or None


def _extent(dim: Any, sizes: Mapping[str, Any]) -> Any:
    number = literal(dim)
    return formula(dim)(sizes) if number is None else number


def _distinct(names: Sequence[str]) -> list[str]:
    """Names as a schema has them: none stands twice, and none is a word of its language."""
    found: list[str] = []
    for name in map(plain, names):
        wanted = f"{name}_" if name in _WORDS else name
        while wanted in found:
            wanted += "_"
        found.append(wanted)
    return found


_WORDS = ("Tensor", "SymInt", "float", "int", "bool", "str", "out", "None", "self")
