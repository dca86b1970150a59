"""Loads built kernels and calls them. Does not trace, compile or import sympy."""

from __future__ import annotations

import inspect
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fusegen.bundle.kernels import Kernels, Reasons, choose, describe_calls, fit, kernels_of, kernels_of_pass, match, take_models
from fusegen.bundle.manifest import (
    BuiltKernel,
    BuiltParameter,
    BuiltPasses,
    BuiltVariant,
    KernelFile,
    RequestedCall,
    place_of,
    read_kernel,
    read_manifest,
    results_of,
)
from fusegen.dtypes import DType, autocast_dtype
from fusegen.errors import ArgumentError, BundleError, TraceError
from fusegen.guards.values import same
from fusegen.lazy import dataclass
from fusegen.program.numbers import Numbers
from fusegen.program.signature import Constant, ExtentArgument, NumberArgument
from fusegen.runtime import devices
from fusegen.runtime.arguments import (
    MAX_ALIGNMENT,
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
from fusegen.runtime.bound import NO_CAPTURED, BoundCall, BoundPlan, CallFacts, Captured, Condition, condition_of, conjunction
from fusegen.runtime.executable import BoundMatch, CallBinder, Executable
from fusegen.runtime.execute import bound_call
from fusegen.runtime.node import ArgumentSource, BackwardNode, BoundAutogradCall
from fusegen.trace import is_tracing

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def load(folder: str | os.PathLike[str]) -> Bundle:
    """Loads a folder that ``fusegen build`` wrote. The file that describes a kernel is read and checked when the kernel is first
    looked up, a binary when a call first needs it.

    Kernels of models (``fusegen build --model``) have no names in it. Calls of the patched models take them in place of
    compilation: load the folder before the first call.

    The folder contains machine code: load only folders that you trust. Files are checked only for changes since the build.

    Raises:
        ArgumentError: the folder is not a path.
        BundleError: the manifest is missing, was changed, or has another version.
    """
    path = _resolved_path(folder)
    files = read_manifest(path).kernels
    if any(file.model for file in files):
        take_models(path)
    return Bundle(path, {file.name: file for file in files if not file.model})


def _resolved_path(folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(f"fg.load: {folder!r} is not a path", hint="give the path of the folder that fusegen build --out wrote")
    try:
        return Path(folder).resolve()
    except (TypeError, ValueError, OSError, RuntimeError) as error:  # bytes, a null character, circular links
        raise ArgumentError(
            f"{folder!r} is not the path of a folder: {error}", hint="give the folder that fusegen build --out wrote"
        ) from None


class Bundle:
    """Built kernels by name: ``bundle.NAME`` or ``bundle["NAME"]``. Iteration yields the names.

    It is not a `Mapping`, whose methods would hide kernels with the same names.
    """

    def __init__(self, folder: Path, files: Mapping[str, KernelFile]) -> None:
        self._folder, self._files = folder, dict(files)
        self._kernels: dict[str, BuiltFunction] = {}

    def __getitem__(self, name: str) -> BuiltFunction:
        """Returns a kernel.

        Raises:
            BundleError: the file that describes it is missing or was changed. Binaries are read and checked before they first run.
            KeyError: the bundle has no kernel of this name.
        """
        if name not in self._files:
            raise KeyError(self._missing(name))
        if name not in self._kernels:
            kernel = BuiltFunction(self._folder, read_kernel(self._folder, self._files[name]).deferred)
            return self._kernels.setdefault(name, kernel)  # all threads get the same object
        return self._kernels[name]

    def __getattr__(self, name: str) -> BuiltFunction:
        if name in self.__dict__.get("_files", ()):
            return self[name]
        raise AttributeError(self._missing(name))

    def _missing(self, name: object) -> str:
        return f"the bundle has no kernel {name!r}; it has {', '.join(self.__dict__.get('_files', ())) or 'none'}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._files]

    def __repr__(self) -> str:
        return f"<fusegen bundle of {', '.join(self._files)}>"


@dataclass(frozen=True)
class LoadedPasses:
    """The passes of a built kernel, ready to be called."""

    forward: BuiltPass
    backward: BuiltPass


def _loaded(folder: Path, kernel: BuiltKernel, variant: BuiltVariant, built: BuiltPasses) -> LoadedPasses:
    kernels = kernels_of_pass(folder, kernel, variant, built, built.programs)
    forward, backward = kernels[: len(built.forward)], kernels[len(built.forward) :]
    wiring = built.wiring
    gradients = range(len(wiring.saved), len(wiring.tensors))
    return LoadedPasses(
        BuiltPass(f"{kernel.name}_forward", wiring.inputs, forward),
        BuiltPass(wiring.name, wiring.backward_inputs, backward, gradients),
    )


def _requiring_gradients(names: Sequence[str], values: Values) -> set[str]:
    if not torch.is_grad_enabled():
        return set()
    return {name for name, value in zip(names, values, strict=True) if isinstance(value, Tensor) and value.requires_grad}


class BuiltFunction(CallBinder):
    """A built kernel, callable like the declared one for the calls and targets that it was built for."""

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
        self._kernels = [kernels_of(folder, kernel, variant) for variant in kernel.variants]
        self._passes: dict[int, LoadedPasses] = {}
        self._executable = Executable(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel.

        Raises:
            ArgumentError: an argument has the wrong type, device or dtype, or the kernel was not built for the call.
            GradientError: an input requires a gradient, and the kernel writes in place or has no derivative.
            TraceError: it is called in another kernel.
            BundleError: a binary was changed.
        """
        return self._executable(args if len(args) == self._positional and not kwargs else self._bind(args, kwargs))

    # Copies and pickles refer to the folder.

    def __deepcopy__(self, memo: dict[int, Any]) -> BuiltFunction:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reload, (str(self._folder.resolve()), self.__name__)

    def __repr__(self) -> str:
        return f"<fusegen kernel {self.__name__}, built for {', '.join(self.targets)}>"

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variant.target for variant in self._kernel.variants))

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            what = f"{self.__name__}: {error}"
            raise ArgumentError(what, hint=f"call it as {self.__name__}{self.__signature__}") from None
        bound.apply_defaults()
        return [bound.arguments[name] for name in self._given]

    # Interface of `CallBinder`.

    def statics(self) -> list[bool]:
        """For each parameter, whether a program is specialized to its value."""
        signatures = [variant.signature for variant in self._kernel.variants]
        kinds = (Constant, ExtentArgument)
        return [any(isinstance(s.arguments[n], kinds) for s in signatures) for n in range(len(self._given))]

    def check(self, values: Values) -> None:
        if is_tracing():
            raise TraceError(
                f"{self.__name__} is built, and cannot be inlined in another kernel", hint="call the function it was built from"
            )
        check(self.__name__, self._given, values)
        for name, value in zip(self._given, values, strict=True):
            if isinstance(value, Tensor):
                self._check_tensor(name, value)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if name in self._written:
            check_writable(self.__name__, name, tensor)
        check_tangent(self.__name__, name, tensor)

    def bind(self, values: Values) -> BoundMatch:
        """Binds a call to its program. Raises if the kernel was not built for the call, or a binary was changed."""
        device = next(value.device for value in values if isinstance(value, Tensor))
        number, sizes = self._variant(values, device)
        variant = self._kernel.variants[number]
        same_aliases = _same_identities(values) if self._distinct else None
        passes = self._requested_passes(values, variant)
        if passes is not None:
            condition = condition_of(variant.signature.conditions, sizes, self._plain)
            return self._bind_passes(values, number, passes, sizes, conjunction(condition, same_aliases)), NO_CAPTURED
        pack_results = results_of(variant, self.__name__)
        program = bound_call(variant.call, pack_results, sizes, device, *self._kernels[number].loaded_on(device))
        facts = CallFacts(variant.call, variant.signature.conditions, {}, sizes, self._plain)
        return BoundPlan(program, facts, self._uncomputable, further=same_aliases), NO_CAPTURED

    def _requested_passes(self, values: Values, variant: BuiltVariant) -> BuiltPasses | None:
        """Returns the passes if autograd requests gradients that they compute. Raises if it requests others."""
        requested = _requiring_gradients(self._plain, values)
        if variant.call.written:
            refuse_gradients(self.__name__, requested)
        if (passes := variant.passes) is None:
            for name, value in zip(self._given, values, strict=True):
                if isinstance(value, Tensor):
                    check_recorded(self.__name__, name, value)
            return None
        return passes if requested and any(name in requested for name, _ in passes.wiring.gradients) else None

    def _bind_passes(
        self, values: Values, number: int, built: BuiltPasses, sizes: dict[str, int], condition: Condition | None
    ) -> BoundAutogradCall:
        variant = self._kernel.variants[number]
        if number not in self._passes:
            self._passes.setdefault(number, _loaded(self._folder, self._kernel, variant, built))  # all threads get the same object
        passes = self._passes[number]
        wiring, requested = built.wiring, _requiring_gradients(self._plain, values)
        positions = {name: position for position, name in enumerate(self._plain)}
        extents = enumerate(variant.signature.arguments)
        positions |= {argument.size: position for position, argument in extents if isinstance(argument, ExtentArgument)}
        device = next(value.device for value in values if isinstance(value, Tensor))
        source = ArgumentSource(tuple(positions.get(name) for name in wiring.inputs), device)
        pass_values = source.example(values)
        with torch.no_grad():
            forward, _ = passes.forward.bind(pass_values)
        recorded = [not requested.isdisjoint(names) for names in built.derivatives]
        takes_numbers = any(isinstance(argument, NumberArgument) for argument in built.forward[0].signature.arguments)
        return BoundAutogradCall(
            source=source,
            count=len(values),
            tensors=sum(isinstance(value, Tensor) for value in pass_values),
            forward=forward,
            node=BackwardNode(wiring, passes.backward.executable, recorded, sizes),
            pack_results=results_of(variant, self.__name__),
            by_value=self._uncomputable if takes_numbers else None,
            condition=condition,
        )

    def _uncomputable(self, values: Values) -> Any:
        numbers = ", ".join(f"{n}={v!r}" for n, v in zip(self._given, values, strict=True) if isinstance(v, (int, float)))
        raise ArgumentError(f"{self.__name__}: the kernel's scalars cannot be computed from {numbers}", hint="pass other numbers")

    def _variant(self, values: Values, device: torch.device) -> tuple[int, dict[str, int]]:
        target = devices.target_of(device)
        variants = [(number, variant) for number, variant in enumerate(self._kernel.variants) if variant.target == target.name]
        variants = [each for each in variants if not each[1].machine or devices.runs_here(each[1].machine)] or variants
        match_or_reasons = choose(variants, lambda program: match(program, self._plain, values), device)
        if not isinstance(match_or_reasons, list):
            return match_or_reasons
        if not match_or_reasons:
            what = f"{self.__name__} was not built for {target.name} ({device}); it was built for {', '.join(self.targets)}"
            again = f"build it again with --arch {','.join((*self.targets, target.name))}"
            raise ArgumentError(what, hint=self._command(values, target.name) or again)
        raise self._mismatch_error(match_or_reasons, values, target.name)

    def _mismatch_error(self, reasons: Reasons, values: Values, target: str) -> ArgumentError:
        """Returns the error of a call that no program fits, with the reasons and the command that builds for the call."""
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons))
        built = "; ".join(dict.fromkeys(describe_calls(variant.signature, self._given) for variant, _ in reasons))
        named = zip(self._given, values, strict=True)
        if strided := next((name for name, value in named if isinstance(value, Tensor) and not _is_plain(value)), None):
            add = f"pass {strided}.clone(memory_format=torch.contiguous_format)"
        else:
            add = self._command(values, target) or "build it for this call too"
        return ArgumentError(f"{self.__name__}: {what}", hint=f"{add}; it was built for {built}")

    def _command(self, values: Values, target: str) -> str | None:
        """Returns the command that builds the kernel for a call into the same folder; None if no command describes the call."""
        variants = self._kernel.variants
        like = next((variant for variant in variants if variant.target == target), variants[0])
        signature, known = like.signature, like.requested
        tensors = [value for value in values if isinstance(value, Tensor)]
        has_autocast = autocast_dtype(tensors[0].device.type) is not None
        if not known.kernel or has_autocast or torch.get_default_dtype() is not signature.default_dtype.torch:
            return None
        named = self._name_from_here(known)
        if named is None:
            return None
        cpu = ["--cpu", known.cpu] if known.cpu and target == like.target else []
        shapes, words = [], ["fusegen", "build", named, "--arch", target, *cpu, "--out", str(self._folder)]
        for parameter, argument, value in zip(self._kernel.parameters, signature.arguments, values, strict=True):
            is_default = parameter.default is not None and same(value, parameter.default.value)
            if parameter.captured or (is_default and isinstance(argument, Constant) and same(value, argument.value)):
                continue
            if isinstance(value, Tensor) and value.numel() and value.dtype in _SHORT:
                shapes.append(f"{parameter.name}={'x'.join(map(str, value.shape))}:{_SHORT[value.dtype]}")
            elif _is_literal(value) or isinstance(value, torch.dtype):
                words += ["--arg", f"{parameter.name}={value!r}"]
            else:
                return None
        return shlex.join([*words, "--call", ",".join(shapes)]) if shapes else None

    def _name_from_here(self, known: RequestedCall) -> str | None:
        """Returns the kernel's name on a command line in the current folder; None if its file is not found. The file is searched
        here and in the folders above the built one, by the path that the build had."""
        if not known.place:
            return known.kernel
        path, colon, attribute = (known.kernel, "", "") if known.kernel.endswith(".py") else known.kernel.rpartition(":")
        for start in (Path(), *self._folder.parents):
            if (start / path).is_file() and place_of(start / path, self._folder) == known.place:
                return f"{start / path}{colon}{attribute}"
        return None


_SHORT = {dtype.torch: dtype.short for dtype in DType}


_LONGEST_TEXT = 100  # characters


def _is_literal(value: object) -> bool:
    """True if ``--arg`` takes a value as Python writes it."""
    if type(value) in (tuple, list):
        return all(map(_is_literal, cast(Sequence[object], value)))
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is str:
        return len(value) <= _LONGEST_TEXT
    return type(value) in (int, bool, type(None))


def _is_plain(tensor: Tensor) -> bool:
    """True if a tensor is contiguous and aligned as torch allocates them."""
    return tensor.is_contiguous() and tensor.data_ptr() % MAX_ALIGNMENT == 0


def _reload(folder: str, name: str) -> BuiltFunction:
    return load(folder)[name]


def _signature(parameters: Sequence[BuiltParameter]) -> inspect.Signature:
    kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: _POSITIONAL}
    defaults = [inspect.Parameter.empty if p.default is None else p.default.value for p in parameters]
    try:
        return inspect.Signature(
            [inspect.Parameter(p.name, kinds[p.keyword_only], default=d) for p, d in zip(parameters, defaults, strict=True)]
        )
    except ValueError as error:
        raise BundleError(f"the manifest has invalid parameter names: {error}", hint="build it again") from None


def _identity_pattern(values: Values) -> tuple[int, ...]:
    """Returns a tuple that tells which tensors of a call are identical."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(value), position) for position, value in enumerate(values) if isinstance(value, Tensor))


def _same_identities(values: Values) -> Condition:
    """Returns a condition that the same tensors of a call are identical."""
    pattern = _identity_pattern(values)
    return lambda new_values: _identity_pattern(new_values) == pattern


class BuiltPass(CallBinder):
    """A forward or a backward pass: a function of tensors, sizes and run-time numbers.

    Args:
        name: for messages.
        names: names of its values.
        kernels: the kernels of its programs.
        movable: positions of tensors that may be copied to row-major order if no program fits their strides.
    """

    def __init__(self, name: str, names: Sequence[str], kernels: Sequence[Kernels], movable: range = range(0)) -> None:
        self._name, self._names, self._kernels, self._movable = name, tuple(names), tuple(kernels), movable
        self.executable = Executable(self)

    def __call__(self, values: Values) -> Sequence[Tensor]:
        """Runs the pass. Raises if it was not built for its tensors."""
        results: Sequence[Tensor] = self.executable(values)
        return results

    def statics(self) -> list[bool]:
        """Programs are specialized to sizes, not to numbers."""
        signatures = [each.program.signature for each in self._kernels]
        return [any(isinstance(s.arguments[n], ExtentArgument) for s in signatures) for n in range(len(self._names))]

    def check(self, values: Values) -> None:
        """Checks that the tensors are readable and that none requires a gradient."""
        first = next(value for value in values if isinstance(value, Tensor))
        for name, value in zip(self._names, values, strict=True):
            if isinstance(value, Tensor):
                check_values(self._name, name, value)
                check_recorded(self._name, name, value)
                check_memory(self._name, name, value, first.device, "the first tensor")
        check_surroundings(self._name)

    def bind(self, values: Values) -> BoundMatch:
        call = self._bound(values)
        if isinstance(call, list) and self._movable:
            contiguous_call = self._bound(_with_contiguous(values, self._movable))
            call = contiguous_call if isinstance(contiguous_call, list) else _CopyingCall(contiguous_call, self._movable)
        if isinstance(call, list):
            raise self._mismatch_error(call)
        return call, NO_CAPTURED

    def sizes(self, values: Values) -> dict[str, int]:
        choice = self._choose(values)
        if isinstance(choice, list):
            raise self._mismatch_error(choice)
        return choice[1]

    def _choose(self, values: Values) -> tuple[int, dict[str, int]] | Reasons:
        programs = enumerate(each.program for each in self._kernels)
        return choose(programs, lambda program: fit(program, self._names, values), _device(values))

    def _bound(self, values: Values) -> BoundCall | Reasons:
        choice = self._choose(values)
        if isinstance(choice, list):
            return choice
        number, sizes = choice
        kernels, device = self._kernels[number], _device(values)
        call = kernels.program.call
        run = bound_call(call, tuple, sizes, device, *kernels.loaded_on(device))
        return BoundPlan(run, CallFacts(call, Numbers(), {}, sizes, self._names), None)

    def _mismatch_error(self, reasons: Reasons) -> ArgumentError:
        what = "; ".join(dict.fromkeys(reason for _, reason in reasons)) or "it was not built for this number of rows"
        built = "; ".join(dict.fromkeys(describe_calls(program.signature, self._names) for program, _ in reasons))
        return ArgumentError(f"{self._name}: {what}", hint=f"build it for this call too; it was built for {built}")


class _CopyingCall(BoundCall):
    """Copies some tensors to row-major order before the program runs."""

    def __init__(self, program: BoundCall, positions: range) -> None:
        super().__init__(None, None, NO_CAPTURED)
        self._program, self._places = program, positions

    def __call__(self, values: Values, captured: Captured) -> Any:
        return self._program(_with_contiguous(values, self._places), captured)


def _with_contiguous(values: Values, positions: range) -> list[Any]:
    return [v.clone(memory_format=torch.contiguous_format) if n in positions else v for n, v in enumerate(values)]


def _device(values: Values) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))
