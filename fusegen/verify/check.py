"""Kernels on a device beside torch eager and float64: a case of a spec for several targets, and a user's own kernel."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.compiler.parameters import Parameters
from fusegen.compiler.tuned import untuned
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, FusegenError, GradientError, TraceError, VerificationError
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import owner
from fusegen.ir.ops import Family, Op
from fusegen.ir.reference import differentiate, evaluate
from fusegen.specs import materialize
from fusegen.specs.spec import Arguments, Spec
from fusegen.threads import cached_property
from fusegen.trace import inlined
from fusegen.verify.accuracy import Errors, Verdict, judge_any
from fusegen.verify.cases import Case, Layout, Values, draw
from fusegen.verify.lowering import Prepared

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
    layouts = [value for value in case.arguments.values() if isinstance(value, Layout)]
    if device.type == "cpu" and any(layout.stored > _MOST_ON_CPU for layout in layouts):
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
        arguments = case_arguments(case, device)
        return arguments, _Yardstick(spec, case, arguments, lowered, device)

    try:
        return measured()
    except torch.OutOfMemoryError:
        pass  # its traceback holds tensors: they are free only behind this block
    gc.collect()
    torch.cuda.empty_cache()
    return measured()


def case_arguments(case: Case, device: torch.device) -> Arguments:
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
        return (*graph.outputs, *(writes[name] for name in self.spec.kernel.options.mutates))

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
        return (*_tensors(self.spec.kernel.function(**{**arguments, **own})), *own.values())

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
    for name in spec.kernel.options.mutates:
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


# A user's own kernel: its results, what it writes to, and its gradients.

Function = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """One tensor that was compared, or why none was.

    Attributes:
        what: it is.
        verdict: of the accuracy rule.
        skipped: why there is nothing to compare; empty where there is.
        approximate: True if its error is measured and not judged: the kernel asks for fast math.
    """

    what: str
    verdict: Verdict
    skipped: str = ""
    approximate: bool = False

    @property
    def word(self) -> str:
        """The verdict."""
        passed = "measured" if self.approximate else "passed"
        return "failed" if self.verdict.failure else "skipped" if self.skipped else passed


def verify_own(kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> tuple[Part, ...]:
    """Compares a kernel with its function, run by torch, and with the float64 oracle; one with fast math also with itself without.

    Args:
        kernel: the kernel.
        arguments: by parameter; meta tensors are filled with random numbers.
        device: where.

    Raises:
        ArgumentError: the kernel draws random numbers, or has results of float64.
        TraceError: the kernel does something that cannot be traced.
        VerificationError: torch cannot run the function, or its results are others than the kernel's.
    """
    values = materialize(arguments, device)
    parts = _Check(kernel, values, device).parts()
    if not kernel.options.fast_math:
        return parts
    accurate = _Check(kernel.fresh(options=kernel.options._replace(fast_math=False)), values, device)
    return (*parts, *(replace(part, what=f"{part.what}, accurate") for part in accurate.parts()))


class _Check:
    """A kernel and the arguments of a call, with values."""

    def __init__(self, kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> None:
        self.kernel, self.arguments, self.device = kernel, arguments, device
        self.name = kernel.function.__name__
        dispatcher = kernel._dispatcher
        values = dispatcher.arguments((), arguments)
        self.variant, hidden = kernel._variant(dispatcher, values, target=None)
        self.graph = self.variant.traced
        self.sizes = dispatcher.variants.sizes(self.variant, values, hidden)
        self.given = dict(zip(dispatcher.parameters.names, dispatcher.parameters.given, strict=True))
        self.captured = dict(zip(self.variant.state.names, hidden, strict=True))
        self.named = dict(zip(dispatcher.parameters.names, values, strict=True)) | self.captured
        self._require_comparable()

    def _require_comparable(self) -> None:
        if self.variant.program.call.draws:
            what = f"{self.name} draws random numbers, and no other run draws the same"
            raise ArgumentError(what, mend="verify it where it draws none, or with fg.dropout(x, p, seed=…)")
        if any(self.graph.nodes[position].dtype.torch is torch.float64 for position in self.graph.outputs):
            what = f"{self.name} has a result of float64, and nothing is more exact"
            raise ArgumentError(what, mend="make it float32: with --dtype f32, or without .double() in the function")

    @cached_property
    def inputs(self) -> Mapping[str, Tensor]:
        """The graph's inputs, as they are before the call."""
        return {spec.name: self.named[spec.name] for spec in self.graph.inputs}

    @cached_property
    def scalars(self) -> Mapping[str, float]:
        """Values of the run-time scalars."""
        return {name: self.named[name] for name, _ in self.graph.scalars}

    def parts(self) -> tuple[Part, ...]:
        """Everything that is compared."""
        with untuned():
            return (*self._results(), *self._gradients())

    # Results.

    @torch.no_grad()
    def _results(self) -> list[Part]:
        """Results, and what is left in the tensors that the kernel writes to."""
        written = [str(self.graph.nodes[owner(self.graph, put)].attr("name")) for put in self.graph.writes]
        count = len(self.graph.outputs)
        names = ["result"] if count == 1 else [f"result {number}" for number in range(count)]
        names += [f"{self.given[name]}, written to" for name in written]
        eager = self._torch(lambda: self._called(inlined(self.kernel.function), written))
        exact = evaluate(self.graph, self.inputs, self.scalars, sizes=self.sizes, device=self.device)
        got = self._called(self.kernel, written)
        return self._judged(names, got, eager, exact)

    def _called(self, function: Function, written: Sequence[str]) -> list[Tensor]:
        """The results of a function, and what it leaves in copies of the tensors that it writes to."""
        copies = {self.given[name]: self.named[name].clone() for name in written}
        return [*_tensors(function(**{**self.arguments, **copies})), *copies.values()]

    # Gradients.

    def _gradients(self) -> list[Part]:
        """Gradients by all arguments that are floats, and by captured tensors that require one."""
        floats = [n for n in self.inputs if self.inputs[n].is_floating_point()]
        wanted = [n for n in floats if n not in self.captured or self.captured[n].requires_grad]
        wrt = differentiated_inputs(self.graph, wanted)
        if not wrt or self.graph.writes:
            return []
        names = [f"gradient by {self.given.get(name, name)}" for name in wrt]
        seeds = self._seeds(wrt)
        try:
            got = self._gradients_of(self.kernel, wrt, seeds)
        except (GradientError, TraceError) as error:
            return [Part("gradients", Verdict(Errors()), error.one_line)]
        eager = self._torch(lambda: self._gradients_of(inlined(self.kernel.function), wrt, seeds))
        exact = differentiate(self.graph, self.inputs, self.scalars, wrt, seeds, sizes=self.sizes, device=self.device)
        return self._judged(names, got, eager, exact)

    def _seeds(self, wrt: Sequence[str]) -> list[Tensor | None]:
        """A random gradient by each result that depends on the inputs."""
        generator = torch.Generator(self.device).manual_seed(1)
        active = differentiated_results(self.graph, wrt)
        nodes = [self.graph.nodes[position] for position in self.graph.outputs]
        shapes = [tuple(formula(dim)(self.sizes) for dim in node.shape) for node in nodes]
        return [
            torch.randn(shape, dtype=node.dtype.compute.torch, device=self.device, generator=generator).to(node.dtype.torch)
            if is_active
            else None
            for shape, node, is_active in zip(shapes, nodes, active, strict=True)
        ]

    def _gradients_of(self, function: Function, wrt: Sequence[str], seeds: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients that autograd gives for a function."""
        leaves = {name: self.inputs[name].detach().clone().requires_grad_() for name in wrt if name not in self.captured}
        arguments = {**self.arguments, **{self.given[name]: leaf for name, leaf in leaves.items()}}
        with torch.enable_grad():
            results = _tensors(function(**arguments))
        pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None and r.requires_grad]
        outputs, given = zip(*pairs, strict=True)
        inputs = [leaves[name] if name in leaves else self.captured[name] for name in wrt]
        found = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]

    # Verdicts.

    def _torch(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """A yardstick that torch gives.

        Raises:
            VerificationError: torch cannot run the function.
        """
        try:
            return run()
        except FusegenError:
            raise
        except Exception as error:
            raise VerificationError(
                f"torch cannot run {self.name}: {_line(error)}", mend="call the function itself with such arguments"
            ) from error

    def _judged(self, names: list[str], got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Part]:
        if not len(names) == len(got) == len(eager) == len(exact):
            what = f"{self.name} gives {len(got)} tensors where torch gives {len(eager)}"
            raise VerificationError(what, mend="please report the declaration and its shapes")
        approximate = self.kernel.options.fast_math
        verdicts = [judge_any(*tensors, approximate=approximate) for tensors in zip(got, eager, exact, strict=True)]
        return [Part(name, verdict, approximate=approximate) for name, verdict in zip(names, verdicts, strict=True)]


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
