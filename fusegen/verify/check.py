"""One case on a device: what each target's kernels give, beside torch eager and float64."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusegen.compiler.parameters import Parameters
from fusegen.dtypes import DType
from fusegen.errors import FusegenError
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import owner
from fusegen.ir.ops import Family, Op
from fusegen.ir.reference import evaluate
from fusegen.specs.spec import Arguments, Spec
from fusegen.verify.accuracy import Errors, Verdict, judge_any
from fusegen.verify.cases import Case
from fusegen.verify.layout import Layout
from fusegen.verify.lowering import Prepared
from fusegen.verify.values import Values, draw

LOST = "not run: the device failed in an earlier case"
"""Why a case was skipped after one that a GPU does not survive."""

_MOST_ON_CPU = 1 << 21  # elements of a tensor from which on a CPU takes too long


@dataclass(frozen=True)
class Outcome:
    """What came of a case for a target.

    Attributes:
        verdicts: one a result.
        error: what was raised instead of results.
        skipped: why it was not run; empty when it was.
    """

    verdicts: tuple[Verdict, ...] = ()
    error: str = ""
    skipped: str = ""

    @property
    def failure(self) -> str:
        """What is wrong; empty when all is well or nothing was run."""
        several = len(self.verdicts) > 1
        wrong = [f"result {n}: {v.failure}" if several else v.failure for n, v in enumerate(self.verdicts) if v.failure]
        return self.error or "; ".join(wrong)

    @property
    def passed(self) -> bool:
        """Whether it was run and is right."""
        return not self.skipped and not self.failure

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        if not self.passed:
            return "failed" if self.failure else "skipped"
        return "eager overflows" if any(v.overflows for v in self.verdicts) else "passed"


@torch.no_grad()
def check(spec: Spec, case: Case, prepared: Sequence[Prepared], device: torch.device) -> tuple[Outcome, ...]:
    """Runs a case for several targets on the same numbers.

    Args:
        spec: whose case it is.
        case: what is called.
        prepared: the case, lowered for each target.
        device: where.
    """
    if device.type == "cpu" and _is_large(case):
        return tuple(Outcome(skipped="too large for a CPU") for _ in prepared)
    try:
        arguments, yardstick = _measured(spec, case, prepared[0], device)
    except torch.OutOfMemoryError:
        total = torch.cuda.get_device_properties(device).total_memory
        return tuple(Outcome(skipped=f"torch needs more memory than the device's {total >> 30} GiB") for _ in prepared)
    except Exception as error:
        return tuple(Outcome(error=f"torch: {_line(error)}") for _ in prepared)
    return tuple(_outcomes(prepared, arguments, yardstick, device))


def is_alive(device: torch.device) -> bool:
    """Whether a device still works: after an illegal access a GPU does nothing more for this process."""
    try:
        _wait(device)
    except RuntimeError:
        return False
    return True


def _wait(device: torch.device) -> None:
    """What a kernel does wrong comes to light here, not in the next case."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(spec: Spec, case: Case, lowered: Prepared, device: torch.device) -> tuple[Arguments, _Yardstick]:
    """The arguments, and what torch makes of them; tried again without what earlier cases left in memory."""

    def measured() -> tuple[Arguments, _Yardstick]:
        arguments = materialize(case, device)
        return arguments, _Yardstick(spec, case, arguments, lowered, device)

    try:
        return measured()
    except torch.OutOfMemoryError:
        pass  # its traceback holds tensors: they are free only behind this block
    gc.collect()
    torch.cuda.empty_cache()
    return measured()


def _is_large(case: Case) -> bool:
    return any(value.stored > _MOST_ON_CPU for value in case.arguments.values() if isinstance(value, Layout))


def materialize(case: Case, device: torch.device) -> Arguments:
    """The case's arguments; the same numbers each time. Matrices of weights are as small as those of new layers, so that 16 bits
    hold the products."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))

    def real(name: str, value: Any) -> Any:
        if isinstance(value, Layout):
            is_data = name in case.data
            values = case.values if is_data else Values.ORDINARY
            is_weight = not is_data and len(value.shape) >= 2 and _is_computed(value.dtype)
            scale = value.shape[-1] ** -0.5 if is_weight else 1.0
            return value.tensor(lambda shape: _scaled(draw(values, shape, value.dtype, device, generator), scale), device)
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: real(name, value) for name, value in case.arguments.items()}


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor * scale if scale != 1.0 else tensor


class _Yardstick:
    """What torch gives: eager, in float32, and exactly.

    Its operands are contiguous: strides are no business of a yardstick, and cuBLAS makes illegal accesses at strides of 2^30.
    """

    def __init__(self, spec: Spec, case: Case, arguments: Arguments, lowered: Prepared, device: torch.device) -> None:
        self.spec, self.case = spec, case
        self.arguments = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        self.eager = self._of_torch(self.arguments)
        self.exact = self._exact(lowered, device)
        self.wider = cache(self._wider)
        self.nodes = [] if lowered.graph is None else [_nodes_below(lowered.graph, p) for p in self._positions(lowered.graph)]

    def _exact(self, lowered: Prepared, device: torch.device) -> tuple[Tensor, ...]:
        if lowered.graph is None:
            return tuple(result.double() for result in self.eager)
        inputs = {spec.name: self.arguments[spec.name] for spec in lowered.graph.inputs}
        known: Arguments = {**Parameters.of(self.spec.kernel.function).defaults, **self.arguments}
        scalars = {name: known[name] for name, _ in lowered.graph.scalars}
        graph = replace(lowered.graph, outputs=tuple(_before_rounding(lowered.graph, p) for p in lowered.graph.outputs))
        found = dict(zip((*graph.outputs, *graph.writes), evaluate(graph, inputs, scalars, device=device), strict=True))
        return tuple(found[position] for position in self._positions(graph))

    def _positions(self, graph: Graph) -> tuple[int, ...]:
        """The nodes of the results, and of what is left in each argument that is written to."""
        writes = {str(graph.nodes[owner(graph, put)].attr("name")): put for put in graph.writes}
        return (*graph.outputs, *(writes[name] for name in self.spec.kernel.mutates))

    def _is_quantized(self, number: int) -> bool:
        """True if a result is made of floats that were converted to 8-bit integers."""
        return bool(self.nodes) and any(n.op is Op.CAST and n.dtype is DType.INT8 for n in self.nodes[number])

    def _through(self, number: int) -> torch.dtype | None:
        """The 16-bit dtype that a float32 result has on its way; None where there is none."""
        nodes = self.nodes[number] if self.nodes else ()
        halves = (n.dtype.torch for n in nodes if n.dtype.is_half and n.family is not Family.LEAF)
        return next(halves, None) if self.eager[number].dtype is torch.float32 else None

    def _wider(self) -> tuple[Tensor, ...]:
        wide = {n: v.float() if isinstance(v, Tensor) and _is_computed(v.dtype) else v for n, v in self.arguments.items()}
        return tuple(w.to(e.dtype) for w, e in zip(self._of_torch(wide), self.eager, strict=True))

    def _of_torch(self, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The results of the declaration, run by torch, and what it writes to."""
        own = written(self.spec, arguments)
        return (*_listed(self.spec.kernel.function(**{**arguments, **own})), *own.values())

    def judge(self, number: int, got: Tensor) -> Verdict:
        """The verdict on one of the results."""
        eager = self.eager[number]
        overflow = self.case.values.may_overflow(eager.dtype)
        verdict = judge_any(
            got,
            eager,
            self.exact[number],
            wider=lambda: self.wider()[number],
            may_overflow=overflow,
            is_quantized=self._is_quantized(number),
            through=self._through(number),
        )
        return replace(verdict, errors=Errors()) if self.case.is_empty else verdict


def _before_rounding(graph: Graph, position: int) -> int:
    """The value that a result of 16 bits is rounded from where it ends in a conversion: errors are distances from that, as they are
    where nothing is said of a dtype."""
    node = graph.nodes[position]
    is_rounded = node.op is Op.CAST and node.dtype.is_half and graph.nodes[node.args[0]].dtype.is_float
    return node.args[0] if is_rounded else position


def _nodes_below(graph: Graph, position: int) -> list[Node]:
    """A node and all that it is made of."""
    return [graph.nodes[p] for p in sorted({position, *graph.ancestors[position]})]


def _is_computed(dtype: torch.dtype) -> bool:
    """True for floats that torch computes with; 8-bit ones are only stored."""
    return dtype.is_floating_point and dtype.itemsize > 1


def written(spec: Spec, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies, with the same strides, of the arguments that a spec writes to."""
    found = {}
    for name in spec.kernel.mutates:
        value = arguments[name]
        found[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return found


def _outcomes(prepared: Sequence[Prepared], arguments: Arguments, yardstick: _Yardstick, device: torch.device) -> Iterator[Outcome]:
    """One a target; what two targets launch alike is run once."""
    known: dict[tuple[tuple[str, ...], str], Outcome] = {}
    for one in prepared:
        what = one.digests, one.launches
        if what not in known:
            known[what] = _outcome(one, arguments, yardstick, device)
        yield known[what]


def _outcome(prepared: Prepared, arguments: Arguments, yardstick: _Yardstick, device: torch.device) -> Outcome:
    try:
        own = written(yardstick.spec, arguments)
        results = (*prepared.run({**arguments, **own}, device), *own.values())
        _wait(device)
        if len(results) != len(yardstick.eager):
            return Outcome(error=f"{len(results)} results instead of {len(yardstick.eager)}")
        return Outcome(tuple(yardstick.judge(number, result) for number, result in enumerate(results)))
    except FusegenError as error:
        return Outcome(error=error.one_line)
    except Exception as error:
        return Outcome(error=_line(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _listed(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)
