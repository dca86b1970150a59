"""Compares kernels on a device with torch eager and float64: cases of a spec for several targets, and user kernels."""

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
from fusegen.compiler.compile import Variant
from fusegen.compiler.dispatch import Dispatcher
from fusegen.compiler.tuned import without_tuning_records
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, FusegenError, GradientError, TraceError, VerificationError, one_line
from fusegen.ir.formula import formula
from fusegen.ir.graph import Graph, Node
from fusegen.ir.index_map import first_version
from fusegen.ir.ops import Family, Op
from fusegen.ir.reference import differentiate, evaluate
from fusegen.runtime.callables import by_name, by_position
from fusegen.specs import materialize
from fusegen.specs.spec import Arguments, Spec
from fusegen.trace import inlined
from fusegen.verify.accuracy import Errors, Verdict, judge_any
from fusegen.verify.cases import Case, DataValues, TensorLayout, draw
from fusegen.verify.lowering import LoweredCase
from fusegen.verify.work import require_minute

TensorFunction = Callable[..., Any]

LOST = "not run: the device failed in an earlier case"
"""The skip reason for cases after a GPU failure."""

_MOST_ON_CPU = 1 << 21  # larger tensors take too long on a CPU


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case for a target: a verdict per result, an error, or the reason for skipping.

    Attributes:
        approximate: True if errors are measured but not judged, because the kernel uses fast math.
    """

    verdicts: tuple[Verdict, ...] = ()
    error: str = ""
    skipped: str = ""
    approximate: bool = False

    @property
    def failure(self) -> str:
        """Describes the failure; empty if the case passed or was skipped."""
        several = len(self.verdicts) > 1
        failures = [f"result {n}: {v.failure}" if several else v.failure for n, v in enumerate(self.verdicts) if v.failure]
        return self.error or "; ".join(failures)

    @property
    def passed(self) -> bool:
        return not self.skipped and not self.failure

    @property
    def word(self) -> str:
        if not self.passed:
            return "failed" if self.failure else "skipped"
        passed = "measured" if self.approximate else "passed"
        return "eager overflows" if any(v.overflows for v in self.verdicts) else passed


# Reference results by torch and the oracle.


class CheckedCall:
    """A call of a kernel, and its traced graph. An empty call, which torch handles, has no variant.

    Its operands are contiguous: strides do not affect the reference, and cuBLAS makes illegal accesses at strides of 2^30.
    """

    def __init__(
        self,
        kernel: fg.Kernel[..., Any],
        dispatcher: Dispatcher,
        variant: Variant | None,
        arguments: Mapping[str, Any],
        captured: tuple[Tensor, ...],
        device: torch.device,
    ) -> None:
        self.arguments = {n: v.contiguous() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        self.device, self.function, self.approximate = device, inlined(kernel.function), kernel.options.fast_math
        self.name, parameters = kernel.function.__name__, dispatcher.parameters
        self.given = dict(zip(parameters.emitted_names, parameters.user_names, strict=True))
        self.variant, self.graph = variant, None if variant is None else variant.traced
        self.written, self.puts = tuple(kernel.options.mutates), dict[str, int]()
        if variant is not None:
            self.captured = dict(zip(variant.state.names, captured, strict=True))
            given, contiguous = (dispatcher.arguments(*by_position(self.function, each)) for each in (arguments, self.arguments))
            self.sizes = dispatcher.variants.sizes(variant, given, captured)
            self.named = dict(zip(parameters.emitted_names, contiguous, strict=True)) | self.captured
            graph = variant.traced
            self.puts = {self.given[str(graph.nodes[first_version(graph, put)].attr("name"))]: put for put in graph.writes}
            self.written = tuple(self.puts)

    @property
    def traced(self) -> Graph:
        assert self.graph is not None
        return self.graph

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {spec.name: self.named[spec.name] for spec in self.traced.inputs}

    @property
    def scalars(self) -> dict[str, Any]:
        return {name: self.named[name] for name, _ in self.traced.scalars}

    def results(self, function: TensorFunction, arguments: Mapping[str, Any]) -> list[Tensor]:
        """The results of a function, then the final contents of the arguments that it mutates (copies)."""
        copies = {name: _copied(arguments[name]) for name in self.written}
        return [*_tensors(by_name(function, self.function)(**{**arguments, **copies})), *copies.values()]

    def reference(self, eager: list[Tensor], values: DataValues = DataValues.ORDINARY) -> _Reference:
        if self.graph is None:
            return _Reference(eager, [result.double() for result in eager], values, is_empty=True)
        graph, positions = self.graph, (*self.graph.outputs, *self.puts.values())
        ancestors = [[graph.nodes[p] for p in (*graph.ancestors[position], position)] for position in positions]
        return _Reference(eager, self.exact_results(), values, ancestors, cache(self._wider), self.approximate)

    def require_time(self) -> None:
        """Raises `ArgumentError` if the float64 reference would take more than a minute on a CPU."""
        if self.device.type == "cpu" and self.variant is not None:
            require_minute(self.name, self.traced, self.variant.planned.program, self.sizes, self.given)

    def exact_results(self) -> list[Tensor]:
        """The results in float64, before they are rounded, then the final contents of the arguments that it mutates."""
        graph = self.traced
        unrounded = replace(graph, outputs=tuple(_before_rounding(graph, p) for p in graph.outputs))
        values_by_node = evaluate(unrounded, self.inputs, self.scalars, sizes=self.sizes, device=self.device)
        exact = dict(zip((*unrounded.outputs, *unrounded.writes), values_by_node, strict=True))
        return [exact[p] for p in (*unrounded.outputs, *self.puts.values())]

    def exact_gradients(self, wrt: Sequence[str], seeds: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The gradients in float64 by the inputs ``wrt``, for the gradients ``seeds`` of the results."""
        return differentiate(self.traced, self.inputs, self.scalars, wrt, seeds, sizes=self.sizes, device=self.device)

    @property
    def differentiated(self) -> tuple[str, ...]:
        """The inputs that get a gradient: float arguments, and captured tensors that require one."""
        inputs = self.inputs
        floats = [n for n in inputs if inputs[n].is_floating_point()]
        wrt = [n for n in floats if n not in self.captured or self.captured[n].requires_grad]
        return differentiated_inputs(self.traced, wrt)

    def seeds(self, wrt: Sequence[str]) -> list[Tensor | None]:
        """Random gradients of the results, always the same; None for results that do not depend on the inputs ``wrt``."""
        generator = torch.Generator(self.device).manual_seed(1)
        active = differentiated_results(self.traced, wrt)
        nodes = [self.traced.nodes[position] for position in self.traced.outputs]
        shapes = [tuple(formula(dim)(self.sizes) for dim in node.shape) for node in nodes]
        return [
            torch.randn(shape, dtype=node.dtype.compute.torch, device=self.device, generator=generator).to(node.dtype.torch)
            if is_active
            else None
            for shape, node, is_active in zip(shapes, nodes, active, strict=True)
        ]

    def _wider(self) -> list[Tensor]:
        widened = {n: v.float() if isinstance(v, Tensor) and _is_computed(v.dtype) else v for n, v in self.arguments.items()}
        return self.results(self.function, widened)


@dataclass(frozen=True)
class _Reference:
    """Reference results by torch and float64.

    Attributes:
        below: the ancestor nodes of each result; empty for gradients.
        wider: computes torch's results in float32.
        approximate: errors are not judged.
    """

    eager: Sequence[Tensor]
    exact: Sequence[Tensor]
    values: DataValues = DataValues.ORDINARY
    below: Sequence[Sequence[Node]] = ()
    wider: Callable[[], Sequence[Tensor]] | None = None
    approximate: bool = False
    is_empty: bool = False

    def judge(self, number: int, got: Tensor) -> Verdict:
        eager, wider = self.eager[number], self.wider
        verdict = judge_any(
            got,
            eager,
            self.exact[number],
            wider=None if wider is None else lambda: wider()[number].to(eager.dtype),
            may_overflow=self.values.may_overflow(eager.dtype),
            is_quantized=self._is_quantized(number),
            through=self._intermediate_dtype(number),
            approximate=self.approximate,
        )
        return replace(verdict, errors=Errors()) if self.is_empty else verdict

    def _is_quantized(self, number: int) -> bool:
        """True if a result depends on floats cast to 8-bit integers."""
        return bool(self.below) and any(n.op is Op.CAST and n.dtype is DType.INT8 for n in self.below[number])

    def _intermediate_dtype(self, number: int) -> torch.dtype | None:
        """The 16-bit dtype of an intermediate of a float32 result; None if there is none."""
        nodes = self.below[number] if self.below else ()
        halves = (n.dtype.torch for n in nodes if n.dtype.is_half and n.family is not Family.LEAF)
        return next(halves, None) if self.eager[number].dtype is torch.float32 else None


def _before_rounding(graph: Graph, position: int) -> int:
    """The operand of a result's final cast to 16 bits, so that errors are measured before rounding."""
    node = graph.nodes[position]
    is_rounded = node.op is Op.CAST and node.dtype.is_half and graph.nodes[node.args[0]].dtype.is_float
    return node.args[0] if is_rounded else position


def _is_computed(dtype: torch.dtype) -> bool:
    """True for floats with arithmetic in torch; 8-bit floats are only stored."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _copied(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


# Cases of a spec.


@torch.no_grad()
def check(spec: Spec, case: Case, prepared: Sequence[LoweredCase], device: torch.device) -> tuple[Outcome, ...]:
    """Runs a case for several targets on the same inputs."""
    layouts = [value for value in case.arguments.values() if isinstance(value, TensorLayout)]
    if device.type == "cpu" and any(layout.stored > _MOST_ON_CPU for layout in layouts):
        return tuple(Outcome(skipped="too large for a CPU") for _ in prepared)
    try:
        arguments, call, reference = _measured(spec, case, prepared[0], device)
    except torch.OutOfMemoryError:
        total = torch.cuda.get_device_properties(device).total_memory
        return tuple(Outcome(skipped=f"torch needs more memory than the device's {total >> 30} GiB") for _ in prepared)
    except Exception as error:
        return tuple(Outcome(error=f"torch: {one_line(error)}") for _ in prepared)
    return tuple(_outcomes(prepared, arguments, call, reference))


def is_alive(device: torch.device) -> bool:
    """True if a device still works; a GPU is unusable for this process after an illegal access."""
    try:
        _wait(device)
    except RuntimeError:
        return False
    return True


def _wait(device: torch.device) -> None:
    """Synchronizes, so that a kernel's fault is reported here and not in the next case."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured(spec: Spec, case: Case, lowered: LoweredCase, device: torch.device) -> tuple[Arguments, CheckedCall, _Reference]:
    """The arguments and torch's results; retries after freeing memory of earlier cases."""

    def measured() -> tuple[Arguments, CheckedCall, _Reference]:
        arguments = case_arguments(case, device)
        call = CheckedCall(spec.kernel, lowered.dispatcher, lowered.variant, arguments, (), device)
        return arguments, call, call.reference(call.results(call.function, call.arguments), case.values)

    try:
        return measured()
    except torch.OutOfMemoryError:
        pass  # the traceback holds tensors until the block ends
    gc.collect()
    torch.cuda.empty_cache()
    return measured()


def case_arguments(case: Case, device: torch.device) -> Arguments:
    """Fills the case's arguments deterministically.

    Weight matrices are scaled like those of new layers, so that 16 bits hold the matmuls' results.
    """
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))

    def real(name: str, value: Any) -> Any:
        if isinstance(value, TensorLayout):
            is_data = name in case.data
            values = case.values if is_data else DataValues.ORDINARY
            is_weight = not is_data and len(value.shape) >= 2 and _is_computed(value.dtype)

            def fill(shape: tuple[int, ...]) -> Tensor:
                drawn = draw(values, shape, value.dtype, device, generator)
                return drawn * value.shape[-1] ** -0.5 if is_weight else drawn

            return value.tensor(fill, device)
        return value.to(device) if isinstance(value, Tensor) else value

    return {name: real(name, value) for name, value in case.arguments.items()}


def _outcomes(prepared: Sequence[LoweredCase], arguments: Arguments, call: CheckedCall, reference: _Reference) -> Iterator[Outcome]:
    known: dict[tuple[tuple[str, ...], str], Outcome] = {}
    for lowered in prepared:
        key = lowered.digests, lowered.launches
        if key not in known:
            known[key] = _outcome(lowered, arguments, call, reference)
        yield known[key]


def _outcome(prepared: LoweredCase, arguments: Arguments, call: CheckedCall, reference: _Reference) -> Outcome:
    try:
        results = call.results(lambda **named: prepared.run(named, call.device), arguments)
        _wait(call.device)
        if len(results) != len(reference.eager):
            return Outcome(error=f"{len(results)} results instead of {len(reference.eager)}")
        return Outcome(tuple(reference.judge(number, result) for number, result in enumerate(results)))
    except Exception as error:
        return Outcome(error=one_line(error))


# User kernels: results, mutated arguments, and gradients.


def verify_own(kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> dict[str, Outcome]:
    """Compares a kernel with its function in torch and with the float64 oracle; with fast math, also without.

    Args:
        arguments: arguments by parameter; meta tensors are filled with random numbers.

    Returns:
        The outcome of each tensor, by name.

    Raises:
        ArgumentError: the kernel draws random numbers, has float64 results, or would take more than a minute on a CPU.
        TraceError: the kernel cannot be traced.
        VerificationError: torch cannot run the function, or returns different results.
    """
    values = materialize(arguments, device)
    outcomes = _own_outcomes(kernel, values, device)
    if kernel.options.fast_math:
        accurate = _own_outcomes(kernel.fresh(options=kernel.options._replace(fast_math=False)), values, device)
        outcomes |= {f"{name}, accurate": outcome for name, outcome in accurate.items()}
    return outcomes


def own_call(kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> CheckedCall:
    """A call of a user's kernel; the arguments are on the device."""
    dispatcher = kernel._dispatcher
    given = dispatcher.arguments(*by_position(kernel.function, arguments))
    variant, captured = kernel._variant(dispatcher, given, target=None)
    return CheckedCall(kernel, dispatcher, variant, arguments, captured, device)


def _own_outcomes(kernel: fg.Kernel[..., Any], arguments: Arguments, device: torch.device) -> dict[str, Outcome]:
    call = own_call(kernel, arguments, device)
    _require_comparable(call)
    call.require_time()
    with without_tuning_records():
        return _own_results(kernel, call) | _own_gradients(kernel, call)


def _require_comparable(call: CheckedCall) -> None:
    if call.variant is not None and call.variant.program.call.draws:
        message = f"{call.name} draws random numbers, which no other run reproduces"
        raise ArgumentError(message, hint="verify it without random numbers, or with fg.dropout(x, p, seed=…)")
    if any(call.traced.nodes[position].dtype.torch is torch.float64 for position in call.traced.outputs):
        message = f"{call.name} has a float64 result, and there is no more exact reference"
        raise ArgumentError(message, hint="make it float32: with --dtype f32, or without .double() in the function")


@torch.no_grad()
def _own_results(kernel: TensorFunction, call: CheckedCall) -> dict[str, Outcome]:
    count = len(call.traced.outputs)
    names = ["result"] if count == 1 else [f"result {number}" for number in range(count)]
    names += [f"{name}, written to" for name in call.written]
    reference = call.reference(_of_torch(call, lambda: call.results(call.function, call.arguments)))
    return _judged(call, names, call.results(kernel, call.arguments), reference)


def _own_gradients(kernel: TensorFunction, call: CheckedCall) -> dict[str, Outcome]:
    """Gradients of all float arguments, and of captured tensors that require one."""
    wrt = call.differentiated
    if not wrt or call.traced.writes:
        return {}
    names = [f"gradient by {call.given.get(name, name)}" for name in wrt]
    seeds = call.seeds(wrt)
    try:
        got = _gradients_of(kernel, call, wrt, seeds)
    except (GradientError, TraceError) as error:
        return {"gradients": Outcome(skipped=error.one_line)}
    eager = _of_torch(call, lambda: _gradients_of(call.function, call, wrt, seeds))
    exact = call.exact_gradients(wrt, seeds)
    return _judged(call, names, got, _Reference(eager, exact, approximate=call.approximate))


def _gradients_of(function: TensorFunction, call: CheckedCall, wrt: Sequence[str], seeds: Sequence[Tensor | None]) -> list[Tensor]:
    leaves = {name: call.inputs[name].detach().clone().requires_grad_() for name in wrt if name not in call.captured}
    arguments = {**call.arguments, **{call.given[name]: leaf for name, leaf in leaves.items()}}
    with torch.enable_grad():
        results = _tensors(by_name(function, call.function)(**arguments))
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None and r.requires_grad]
    outputs, gradients = zip(*pairs, strict=True)
    inputs = [leaves[name] if name in leaves else call.captured[name] for name in wrt]
    computed = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, computed, strict=True)]


def _of_torch(call: CheckedCall, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    try:
        return run()
    except FusegenError:
        raise
    except Exception as error:
        message = f"torch cannot run {call.name}: {one_line(error)}"
        raise VerificationError(message, hint="call the plain function with these arguments") from error


def _judged(call: CheckedCall, names: list[str], got: Sequence[Tensor], reference: _Reference) -> dict[str, Outcome]:
    if not len(names) == len(got) == len(reference.eager) == len(reference.exact):
        message = f"{call.name} returns {len(got)} tensors, torch {len(reference.eager)}"
        raise VerificationError(message, hint="please report the declaration and its shapes")
    verdicts = [reference.judge(number, tensor) for number, tensor in enumerate(got)]
    return {n: Outcome((v,), approximate=reference.approximate) for n, v in zip(names, verdicts, strict=True)}
