"""A user's own kernel on a device, against float64 and torch eager: its results, what it writes to, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusegen as fg
from fusegen.autodiff.derive import differentiated_inputs, differentiated_results
from fusegen.compiler.tuned import untuned
from fusegen.errors import ArgumentError, FusegenError, GradientError, TraceError, VerificationError
from fusegen.ir.formula import formula
from fusegen.ir.index_map import owner
from fusegen.ir.reference import differentiate, evaluate
from fusegen.lang.running import inlined
from fusegen.specs import materialize
from fusegen.specs.spec import Arguments
from fusegen.threads import cached_property
from fusegen.verify.accuracy import Errors, Verdict, judge_any

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
    if not kernel.fast_math:
        return parts
    accurate = _Check(kernel.fresh(fast_math=False), values, device)
    return (*parts, *(replace(part, what=f"{part.what}, accurate") for part in accurate.parts()))


class _Check:
    """A kernel and the arguments of a call.

    Args:
        kernel: the kernel.
        arguments: by parameter, with values.
        device: where.
    """

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
            what = f"torch cannot run {self.name}: {type(error).__name__}: {error}".partition("\n")[0]
            raise VerificationError(what, mend="call the function itself with such arguments") from error

    def _judged(self, names: list[str], got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]) -> list[Part]:
        if not len(names) == len(got) == len(eager) == len(exact):
            what = f"{self.name} gives {len(got)} tensors where torch gives {len(eager)}"
            raise VerificationError(what, mend="please report the declaration and its shapes")
        approximate = self.kernel.fast_math
        verdicts = [judge_any(*tensors, approximate=approximate) for tensors in zip(got, eager, exact, strict=True)]
        return [Part(name, verdict, approximate=approximate) for name, verdict in zip(names, verdicts, strict=True)]


def _tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
