"""Built kernels, called as they were declared. Nothing here traces, compiles or needs computer algebra."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusegen.bundle.kernels import Kernels, Reasons, choose, described, fit, match
from fusegen.bundle.manifest import (
    BuiltKernel,
    BuiltParameter,
    BuiltPasses,
    BuiltProgram,
    BuiltVariant,
    mark_of,
    passes_mark_of,
    read_manifest,
)
from fusegen.errors import ArgumentError, BundleError, TraceError
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Constant, ExtentArgument, NumberArgument, builder
from fusegen.runtime import devices
from fusegen.runtime.arguments import (
    Values,
    check,
    check_memory,
    check_recorded,
    check_surroundings,
    check_tangent,
    check_values,
    check_writable,
    refuse_gradients,
)
from fusegen.runtime.bound import NOTHING, BoundCall, BoundPlan, CallFacts, Condition, Hidden, condition_of, conjunction
from fusegen.runtime.executable import BoundMatch, CallBinder, Executable
from fusegen.runtime.execute import bound_call
from fusegen.runtime.node import ArgumentSource, BackwardNode, BoundAutogradCall
from fusegen.trace import is_tracing

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def load(folder: str | os.PathLike[str]) -> Bundle:
    """The kernels of a folder that ``fusegen build`` wrote.

    A folder holds machine code: load only what you would run. What is checked is that its files are as they were built.

    Raises:
        ArgumentError: the folder is no path.
        BundleError: something in the folder is missing, was changed, or is of another version.
    """
    place = _place(folder)
    manifest = read_manifest(place)
    bundle = Bundle({kernel.name: BuiltFunction(place, kernel) for kernel in manifest.kernels})
    for name in bundle:
        bundle[name].check_binaries()
    return bundle


def _place(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"fg.load is given {folder!r}", hint="give the path of the folder that fusegen build --out wrote")
    try:
        return Path(folder).resolve()
    except (TypeError, ValueError, OSError, RuntimeError) as error:  # a path of bytes or with a null, links in a circle
        raise ArgumentError(
            f"{folder!r} is no path of a folder: {error}", hint="give the one that fusegen build --out wrote"
        ) from None


class Bundle:
    """Built kernels by name: ``bundle.NAME`` or ``bundle["NAME"]``; iteration gives the names.

    No `Mapping`, whose methods would stand in the way of kernels of their names.
    """

    def __init__(self, kernels: Mapping[str, BuiltFunction]) -> None:
        self._kernels = dict(kernels)

    def __getitem__(self, name: str) -> BuiltFunction:
        return self._kernels[name]

    def __getattr__(self, name: str) -> BuiltFunction:
        if name in self.__dict__.get("_kernels", ()):
            return self._kernels[name]
        raise AttributeError(f"no kernel {name!r} was built; there is {', '.join(self.__dict__.get('_kernels', ()))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._kernels]

    def __repr__(self) -> str:
        return f"<fusegen bundle of {', '.join(self._kernels)}>"


@dataclass(frozen=True)
class LoadedPasses:
    """The passes of a built kernel, ready to be called.

    Attributes:
        built: what the manifest says of them.
        kernels: of all their programs.
        forward, backward: the passes.
    """

    built: BuiltPasses
    kernels: tuple[Kernels, ...]
    forward: BuiltPass
    backward: BuiltPass


def _passes(folder: Path, kernel: BuiltKernel, variant: BuiltVariant) -> LoadedPasses | None:
    built = variant.passes
    if built is None:
        return None
    mark, wiring = passes_mark_of(kernel.parameters, variant.machine, built), built.wiring
    forward, backward = (
        tuple(Kernels(folder, program, mark, variant.machine) for program in programs)
        for programs in (built.forward, built.backward)
    )
    gradients = range(len(wiring.saved), len(wiring.tensors))
    return LoadedPasses(
        built,
        (*forward, *backward),
        BuiltPass(f"{kernel.name}_forward", wiring.inputs, forward),
        BuiltPass(wiring.name, wiring.taken, backward, gradients),
    )


def _wanted(names: Sequence[str], values: Values) -> set[str]:
    if not torch.is_grad_enabled():
        return set()
    return {name for name, value in zip(names, values, strict=True) if isinstance(value, Tensor) and value.requires_grad}


class BuiltFunction(CallBinder):
    """A built kernel: what was declared, for the calls and the targets for which it was built.

    Args:
        folder: where its binaries lie.
        kernel: what the manifest says of it.
    """

    def __init__(self, folder: Path, kernel: BuiltKernel) -> None:
        self.__name__ = kernel.name
        self.__signature__ = _signature(kernel.parameters)
        self._folder = folder
        self._kernel = kernel
        self._given = tuple(parameter.name for parameter in kernel.parameters)
        self._plain = tuple(parameter.plain for parameter in kernel.parameters)
        self._written = frozenset(parameter.name for parameter in kernel.parameters if parameter.written)
        self._positional = None if any(p.keyword_only for p in kernel.parameters) else len(self._given)
        self._distinct = any(variant.signature.distinct for variant in kernel.variants)
        self._kernels = [
            Kernels(folder, variant, mark_of(kernel.parameters, variant), variant.machine) for variant in kernel.variants
        ]
        self._passes = [_passes(folder, kernel, variant) for variant in kernel.variants]
        self._executable = Executable(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype, or nothing was built for such a call.
            GradientError: an input requires a gradient, and the kernel writes in place or has no derivative.
            TraceError: it is called in another kernel.
            BundleError: a binary is not as it was built.
        """
        return self._executable(args if len(args) == self._positional and not kwargs else self._bind(args, kwargs))

    # Copies: binaries are loaded once, and found again by their folder.

    def __deepcopy__(self, memo: dict[int, Any]) -> BuiltFunction:
        """The kernel itself, as a function's copy is the function."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """By folder and name."""
        return _found_again, (str(self._folder.resolve()), self.__name__)

    def __repr__(self) -> str:
        return f"<fusegen kernel {self.__name__}, built for {', '.join(self.targets)}>"

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that it was built for."""
        return tuple(dict.fromkeys(variant.target for variant in self._kernel.variants))

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{self.__name__}: {error}"
            raise ArgumentError(what, hint=f"call it as {self.__name__}{self.__signature__}") from None
        bound.apply_defaults()
        return [bound.arguments[name] for name in self._given]

    def check_binaries(self) -> None:
        """Checks that the binaries of all programs are as they were built.

        Raises:
            BundleError: one is not.
        """
        passes = [each for known in self._passes if known is not None for each in known.kernels]
        for kernels in (*self._kernels, *passes):
            kernels.check()

    # As a plan of programs.

    def statics(self) -> list[bool]:
        """Tells for each parameter whether a program is bound to its value."""
        signatures = [variant.signature for variant in self._kernel.variants]
        kinds = (Constant, ExtentArgument)
        return [any(isinstance(s.arguments[n], kinds) for s in signatures) for n in range(len(self._given))]

    def check(self, values: Values) -> None:
        """Refuses what no kernel can work on."""
        if is_tracing():
            raise TraceError(f"{self.__name__} is built, and cannot be inlined in another kernel", hint="call what it was built of")
        check(self.__name__, self._given, values)
        for name, value in zip(self._given, values, strict=True):
            if isinstance(value, Tensor):
                self._check_tensor(name, value)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if name in self._written:
            check_writable(self.__name__, name, tensor)
        check_tangent(self.__name__, name, tensor)

    def bind(self, values: Values) -> BoundMatch:
        """The program of a call.

        Raises:
            ArgumentError: nothing was built for it.
            BundleError: a binary is not as it was built.
        """
        device = next(value.device for value in values if isinstance(value, Tensor))
        number, sizes = self._variant(values, device)
        variant = self._kernels[number].program
        also = _alike(values) if self._distinct else None
        passes = self._recording(values, variant, self._passes[number])
        if passes is not None:
            condition = condition_of(variant.signature.conditions, sizes, self._plain)
            return self._recorded(values, number, passes, sizes, conjunction(condition, also)), NOTHING
        structure = self._kernel.variants[number].structure
        program = bound_call(variant.call, builder(structure), sizes, device, *self._kernels[number].on(device))
        facts = CallFacts(variant.call, variant.signature.conditions, {}, sizes, self._plain)
        return BoundPlan(program, facts, self._uncomputable, further=also), NOTHING

    def _recording(self, values: Values, program: BuiltProgram, passes: LoadedPasses | None) -> LoadedPasses | None:
        """The passes, where autograd wants gradients that they give.

        Raises:
            GradientError: it wants some where nothing is recorded.
        """
        wanted = _wanted(self._plain, values)
        if program.call.written:
            refuse_gradients(self.__name__, wanted)
        if passes is None:
            for name, value in zip(self._given, values, strict=True):
                if isinstance(value, Tensor):
                    check_recorded(self.__name__, name, value)
            return None
        return passes if any(name in wanted for name, _ in passes.built.wiring.gradients) else None

    def _recorded(
        self, values: Values, number: int, passes: LoadedPasses, sizes: dict[str, int], condition: Condition | None
    ) -> BoundAutogradCall:
        """The passes of a program for the exact shapes of a call."""
        variant = self._kernel.variants[number]
        wiring, wanted = passes.built.wiring, _wanted(self._plain, values)
        where = {name: place for place, name in enumerate(self._plain)}
        extents = enumerate(variant.signature.arguments)
        where |= {argument.size: place for place, argument in extents if isinstance(argument, ExtentArgument)}
        device = next(value.device for value in values if isinstance(value, Tensor))
        source = ArgumentSource(tuple(where.get(name) for name in wiring.inputs), device)
        given = source.example(values)
        with torch.no_grad():
            forward, _ = passes.forward.bind(given)
        recorded = [not wanted.isdisjoint(names) for names in passes.built.derivatives]
        takes_numbers = any(isinstance(argument, NumberArgument) for argument in passes.built.forward[0].signature.arguments)
        return BoundAutogradCall(
            source=source,
            count=len(values),
            tensors=sum(isinstance(value, Tensor) for value in given),
            forward=forward,
            node=BackwardNode(wiring, passes.backward.executable, recorded, sizes),
            pack_results=builder(variant.structure),
            by_value=self._uncomputable if takes_numbers else None,
            condition=condition,
        )

    def _uncomputable(self, values: Values) -> Any:
        given = ", ".join(f"{n}={v!r}" for n, v in zip(self._given, values, strict=True) if isinstance(v, (int, float)))
        raise ArgumentError(f"{self.__name__}: Python cannot compute what the kernel needs of {given}", hint="pass other numbers")

    # Which program.

    def _variant(self, values: Values, device: torch.device) -> tuple[int, dict[str, int]]:
        """The number of the program for some arguments, and their sizes.

        Raises:
            ArgumentError: none was built that is good for them.
        """
        target = devices.target_of(device)
        there = [(number, variant) for number, variant in enumerate(self._kernel.variants) if variant.target == target.name]
        found = choose(there, lambda program: match(program.signature, program.call, self._plain, values), device)
        if not isinstance(found, list):
            return found
        if not found:
            what = f"{self.__name__} was not built for {target.name} ({device}); it was built for {', '.join(self.targets)}"
            raise ArgumentError(what, hint=f"build it again with --arch {','.join((*self.targets, target.name))}")
        raise self._unfit(found)

    def _unfit(self, reasons: Reasons) -> ArgumentError:
        """The error of a call for which nothing was built; of several programs, each with its reason."""
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons))
        built = "; ".join(dict.fromkeys(described(variant.signature, self._given) for variant, _ in reasons))
        return ArgumentError(f"{self.__name__}: {what}", hint=f"build it for such a call too; it was built for {built}")


def _found_again(folder: str, name: str) -> BuiltFunction:
    return load(folder)[name]


def _signature(parameters: Sequence[BuiltParameter]) -> inspect.Signature:
    """A function's, from what the manifest says of its parameters.

    Raises:
        BundleError: no function can have such parameters.
    """
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: _POSITIONAL}
    defaults = [inspect.Parameter.empty if p.default is None else p.default.value for p in parameters]
    try:
        return inspect.Signature(
            [inspect.Parameter(p.name, kinds[p.keyword_only], default=d) for p, d in zip(parameters, defaults, strict=True)]
        )
    except ValueError as error:
        raise BundleError(f"the manifest names parameters that no function has: {error}", hint="build it again") from None


def _pattern(values: Values) -> tuple[int, ...]:
    """A pattern that tells which tensors of a call are one and the same."""
    places: dict[int, int] = {}
    return tuple(places.setdefault(id(value), place) for place, value in enumerate(values) if isinstance(value, Tensor))


def _alike(values: Values) -> Condition:
    """Tells of calls whether the same of their tensors are one."""
    pattern = _pattern(values)
    return lambda others: _pattern(others) == pattern


# A built pass of a kernel: a function of its tensors, of sizes and of run-time numbers.


class BuiltPass(CallBinder):
    """A forward or a backward pass.

    Args:
        name: for messages.
        names: of its values.
        kernels: of its programs.
        movable: places of tensors that are copied in row-major order where no program takes them as they lie.
    """

    def __init__(self, name: str, names: Sequence[str], kernels: Sequence[Kernels], movable: range = range(0)) -> None:
        self._name, self._names, self._kernels, self._movable = name, tuple(names), tuple(kernels), movable
        self.executable = Executable(self)

    def __call__(self, values: Values) -> Sequence[Tensor]:
        """Runs the pass.

        Raises:
            ArgumentError: nothing was built for its tensors.
        """
        results: Sequence[Tensor] = self.executable(values)
        return results

    def statics(self) -> list[bool]:
        """Programs are bound to sizes, and to no number."""
        signatures = [each.program.signature for each in self._kernels]
        return [any(isinstance(s.arguments[n], ExtentArgument) for s in signatures) for n in range(len(self._names))]

    def check(self, values: Values) -> None:
        """Checks that the tensors can be read, and that nobody wants a derivative."""
        first = next(value for value in values if isinstance(value, Tensor))
        for name, value in zip(self._names, values, strict=True):
            if isinstance(value, Tensor):
                check_values(self._name, name, value)
                check_recorded(self._name, name, value)
                check_memory(self._name, name, value, first.device, "the first tensor")
        check_surroundings(self._name)

    def bind(self, values: Values) -> BoundMatch:
        """The program for the exact shapes of some values.

        Raises:
            ArgumentError: nothing was built for them.
        """
        found = self._bound(values)
        if isinstance(found, list) and self._movable:
            moved = self._bound(_in_rows(values, self._movable))
            found = moved if isinstance(moved, list) else _Moving(moved, self._movable)
        if isinstance(found, list):
            raise self._unfit(found)
        return found, NOTHING

    def sizes(self, values: Values) -> dict[str, int]:
        """Values of all sizes and strides.

        Raises:
            ArgumentError: nothing was built for them.
        """
        found = self._chosen(values)
        if isinstance(found, list):
            raise self._unfit(found)
        return found[1]

    def _chosen(self, values: Values) -> tuple[int, dict[str, int]] | Reasons:
        programs = enumerate(each.program for each in self._kernels)
        return choose(programs, lambda program: fit(program.signature, program.call, self._names, values), _device(values))

    def _bound(self, values: Values) -> BoundCall | Reasons:
        found = self._chosen(values)
        if isinstance(found, list):
            return found
        number, sizes = found
        kernels, device = self._kernels[number], _device(values)
        call = kernels.program.call
        run = bound_call(call, tuple, sizes, device, *kernels.on(device))
        return BoundPlan(run, CallFacts(call, Numbers(), {}, sizes, self._names), None)

    def _unfit(self, reasons: Reasons) -> ArgumentError:
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons)) or "nothing was built for as many rows"
        built = "; ".join(dict.fromkeys(described(program.signature, self._names) for program, _ in reasons))
        return ArgumentError(f"{self._name}: {what}", hint=f"build it for such a call too; it was built for {built}")


class _Moving(BoundCall):
    """A program before which some tensors are copied in row-major order.

    Args:
        program: what runs then.
        places: of the tensors.
    """

    def __init__(self, program: BoundCall, places: range) -> None:
        super().__init__(None, None, NOTHING)
        self._program, self._places = program, places

    def __call__(self, values: Values, hidden: Hidden) -> Any:
        return self._program(_in_rows(values, self._places), hidden)


def _in_rows(values: Values, places: range) -> list[Any]:
    """Values with copies of some tensors that lie in row-major order."""
    return [v.clone(memory_format=torch.contiguous_format) if n in places else v for n, v in enumerate(values)]


def _device(values: Values) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))
