"""From a trace to sources: the stages in their order, and the plans that the cache holds."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch

from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.compiler.signature import SymbolicSizes
from fusegen.compiler.specialize import GraphChoices, Specialization
from fusegen.dtypes import DType
from fusegen.emit.environment import generator
from fusegen.errors import FusegenError, SettingsError
from fusegen.files import read_regular, sealed, unsealed, write_atomically
from fusegen.guards import StateGuard
from fusegen.ir.formula import numbers_of, relation
from fusegen.ir.graph import Graph, InputSpec, Location
from fusegen.program.call import LaunchPlan
from fusegen.program.codec import decode, encode
from fusegen.program.formula import Relation
from fusegen.program.numbers import Numbers
from fusegen.runtime.arguments import WIDE
from fusegen.schedule.context import Pins
from fusegen.schedule.names import stride_name
from fusegen.schedule.program import Program
from fusegen.settings import cache_folder, settings
from fusegen.source import Source
from fusegen.target import Backend, Target
from fusegen.threads import cached_property, new_lock
from fusegen.trace.run import ResultTree, Trace
from fusegen.trace.scalars import NeedsFact
from fusegen.trace.user import CallerTensor


@dataclass(frozen=True)
class Request:
    """The subject of a compilation: a kernel for a kind of calls.

    Attributes:
        name: the kernel's name.
        function: the user's.
        specs: its tensors, by parameter.
        arguments: the same tensors as objects.
        scalars: its run-time scalars, by parameter, with their dtypes.
        statics: everything else, by parameter.
        sizes: the symbolic sizes.
        device: what ``x.device`` answers.
        wide: whether indices need 64 bits.
        numbers: values of the scalars in this call, and those of ints that are used as sizes.
        one_tensor_twice: parameters that are given one and the same tensor.
        mutates: parameters that the function may write to.
        tied: ints that are used as sizes, and share symbols with dims of their size.
        fast_math: True if the kernel was declared so.
    """

    name: str
    function: Callable[..., Any]
    specs: tuple[InputSpec, ...]
    arguments: tuple[CallerTensor, ...]
    scalars: tuple[tuple[str, DType], ...]
    statics: tuple[tuple[str, object], ...]
    sizes: SymbolicSizes
    target: Target
    device: torch.device
    wide: bool
    numbers: tuple[tuple[str, int | float], ...] = ()
    one_tensor_twice: tuple[str, ...] = ()
    mutates: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    fast_math: bool = False


@dataclass(frozen=True)
class CompiledGraph:
    """A graph as text.

    Attributes:
        traced: the graph as it was given.
        structure: how its results are put together.
        programs: those for all sizes, which kernels of equal graphs share.
        form: the program for some sizes.
        sizes: these sizes.
    """

    traced: Graph
    structure: ResultTree
    programs: PlanCache
    form: AnySpecialization
    sizes: Mapping[str, int]

    def at(self, sizes: Mapping[str, int]) -> Self:
        """The same as it is laid out for some sizes."""
        form = self.programs.at(sizes)
        return self if form is self.form else replace(self, form=form, sizes=sizes)

    def in_form(self, form: AnySpecialization) -> Self:
        """The same in one of its forms."""
        return replace(self, form=form)

    @property
    def target(self) -> Target:
        """The machine."""
        return self.programs.target

    @property
    def call(self) -> LaunchPlan:
        """The steps of a call, as data."""
        return self.form.call

    @property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch."""
        return self.planned.sources if self.form.sources is None else self.form.sources

    @property
    def alternatives(self) -> GraphChoices:
        """The plans for other sizes."""
        return self.programs.alternatives

    @property
    def planned(self) -> Specialization:
        """The form with all that it was made of, which takes time for one that the cache gave."""
        return self.form if isinstance(self.form, Specialization) else self.programs.planned(self.sizes)

    @property
    def graph(self) -> Graph:
        """The graph in primitives."""
        return self.planned.graph

    @property
    def program(self) -> Program:
        """The steps of a call."""
        return self.planned.program


@dataclass(frozen=True)
class Variant(CompiledGraph):
    """One compiled form of a function.

    Attributes:
        request: what was asked for, but for ``statics``, which a variant does not keep alive.
        trace: that it was made of, without the tensors that the function closes over.
        guards: relations of sizes that must hold.
        conditions: what must hold of the scalars.
        state: what else the function read, tensors that it closes over among it.
        switches_gradients: whether torch records something that the graph does not show, or otherwise than it does.
        constants: values of scalars that are none of the function's own (`runtime.promotion`).
    """

    request: Request
    trace: Trace
    guards: tuple[Relation, ...]
    conditions: Numbers
    state: StateGuard
    switches_gradients: bool
    constants: tuple[tuple[str, int | float], ...] = ()


def compile_trace(request: Request, found: Trace, state: StateGuard) -> Variant:
    """Fuses, schedules and emits what was traced.

    Raises:
        UnsupportedError: values multiply without end.
        NeedsFact: ints that are used as sizes must be literal for it.
    """
    try:
        return _compiled(request, found, state)
    except FusegenError:
        parameters = request.sizes.parameters
        if not parameters:
            raise
        raise NeedsFact("static", tuple(parameters)) from None


def _compiled(request: Request, found: Trace, state: StateGuard) -> Variant:
    hints = dict(request.sizes.hints)
    compiled = compile_graph(found.graph, found.structure, request.target, hints, wide=request.wide)
    return Variant(
        **vars(compiled),
        request=replace(request, statics=()),
        trace=replace(found, hidden=()),
        guards=guards_of(found),
        conditions=numbers_of(found.conditions),
        state=state,
        switches_gradients=found.switches_gradients,
    )


def compile_graph(graph: Graph, structure: ResultTree, target: Target, sizes: Mapping[str, int], *, wide: bool) -> CompiledGraph:
    """Fuses, schedules and emits a graph.

    Args:
        graph: as traced, or made otherwise.
        structure: how its results are put together.
        sizes: for which it is laid out first.
        wide: whether indices need 64 bits.

    Raises:
        UnsupportedError: values multiply without end.
    """
    programs = plans_of(graph, graph.locations, target, wide)
    return CompiledGraph(graph, structure, programs, programs.at(sizes), sizes)


def needs_wide(compiled: CompiledGraph, sizes: Mapping[str, int]) -> bool:
    """Tells if 31 bits cannot hold what kernels count.

    Args:
        sizes: values of all sizes.
    """
    return compiled.call.largest(sizes) >= WIDE


def guards_of(found: Trace) -> tuple[Relation, ...]:
    """The assumptions of a trace about sizes."""
    return tuple(map(relation, found.guards))


# The programs of one graph: those that an earlier process made are read from the cache, others are planned.
#
# A plan is a function of its graph, its target, the sizes, what `fg.tune` measured, and fusegen itself. Their digest names a file.
# It holds the name of another file: the plan as JSON, with the text of its kernels. Removing the files is safe.


_MOST_KNOWN = 1024  # sizes of one graph
_MOST_KEPT = 256  # of them, by one process


@dataclass(frozen=True, repr=False)
class StoredSpecialization:
    """A form as the cache keeps it: all that a call needs.

    Attributes:
        call: what runs the form.
        texts: of all launches; none of a form whose kernels nobody has run.
    """

    call: LaunchPlan
    texts: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...] | None:
        """The text of each launch, if that is there."""
        return self.texts if len(self.texts) == len(self.call.launches) else None

    @cached_property
    def bound(self) -> dict[object, Any]:
        """As of a `Specialization`."""
        return {}


AnySpecialization: TypeAlias = Specialization | StoredSpecialization


class PlanCache:
    """The programs of a graph for a machine, which kernels of equal graphs share.

    Args:
        graph: as traced, or made otherwise.
        wide: whether indices need 64 bits.

    Attributes:
        target: as given.
    """

    def __init__(self, graph: Graph, target: Target, *, wide: bool) -> None:
        self._graph, self.target, self._wide = graph, target, wide
        self._lock = new_lock()
        self._known: dict[str, AnySpecialization] = {}  # by the names of their files
        self._stored: dict[str, StoredSpecialization] = {}  # those with text, by their digests
        self._without_text: dict[str, AnySpecialization] = {}  # of `_known`, those whose text is not in the cache
        self._written: dict[tuple[int, bool], str] = {}  # digests, by the id of a form of `_known`, and whether with its text

    def at(self, sizes: Mapping[str, int]) -> AnySpecialization:
        """The form for some sizes.

        Args:
            sizes: values of all sizes and strides.

        Raises:
            UnsupportedError: values multiply without end.
        """
        return self._form(self._name(sizes), lambda: self.planned(sizes), is_measured=False)

    def measured(self, sizes: Mapping[str, int], records: str, pins: Callable[[Program], Pins]) -> AnySpecialization:
        """The form for some sizes of which some launches have plans that were measured; it is run, and never explained.

        Args:
            sizes: values of all sizes and strides.
            records: a digest of all that was measured.
            pins: gives these plans, by the outputs of their groups.
        """

        def made() -> Specialization:
            return self.alternatives.of(sizes).at(sizes, pins(self.planned(sizes).program))

        return self._form(self._name(sizes, records), made, is_measured=True)

    def planned(self, sizes: Mapping[str, int]) -> Specialization:
        """The form for some sizes, with all that it was made of."""
        return self.alternatives.of(sizes).at(sizes)

    def keep(self, form: AnySpecialization, sources: Sequence[Source]) -> None:
        """Keeps a form in the cache, with its text."""
        with self._lock:
            names = [name for name, each in self._without_text.items() if each is form]
            for name in names:
                del self._without_text[name]
                self._write(name, form, tuple(sources))

    @cached_property
    def alternatives(self) -> GraphChoices:
        """All that there are."""
        graph, target = self._graph, self.target
        if target.backend is Backend.CPU:  # it has no such functions
            graph = replace(graph, fast_math=False)
        rules = Rules(target)
        traced = run(graph, rules, Stage.TRACED)
        by_library = run(traced, rules, Stage.LIBRARY)
        own = by_library
        if target.wgmma:  # whose kernels of ours compute attention, if nothing is dropped; torch's count with 32 bits in places
            own = traced if self._wide else run(traced, replace(rules, only_dropout=True), Stage.LIBRARY)
        has_choice = by_library != own and not self._wide
        library = run(by_library, rules, Stage.PRIMITIVE, Stage.READY) if has_choice else None
        ready = run(own, rules, Stage.PRIMITIVE, Stage.READY)
        return GraphChoices(ready, target, wide=self._wide, library=library)

    def _form(self, name: str, make: Callable[[], Specialization], *, is_measured: bool) -> AnySpecialization:
        """The form of a file, or a new one; its plan is kept at once where its text can be made anew of it."""
        with self._lock:
            if name in self._known:
                return self._known[name]
            if len(self._known) >= _MOST_KNOWN:
                for known in (self._known, self._without_text, self._written):
                    known.clear()
            form: AnySpecialization | None = self._recalled(name)
            if form is None:
                form = make()
                if not is_measured or self._has_text(form):
                    self._write(name, form)
            if not self._has_text(form):
                self._without_text[name] = form
            self._known[name] = form
            return form

    def _recalled(self, name: str) -> StoredSpecialization | None:
        """The form of a file; None where there is none, or it is damaged."""
        with suppress(OSError, ValueError, zlib.error, FusegenError, RecursionError):
            digest = _read(name).decode()
            if digest in self._stored:
                return self._stored[digest]
            form: StoredSpecialization = decode(json.loads(zlib.decompress(_read(digest))), StoredSpecialization, digest)
            if form.sources is not None:  # else the text of another size, with the same call, may be another one
                self._stored[digest] = form
            return form
        return None

    def _has_text(self, form: AnySpecialization) -> bool:
        """True if the text of a form is in the cache, by another size perhaps."""
        return (form.sources is not None) if isinstance(form, StoredSpecialization) else (id(form), True) in self._written

    def _write(self, name: str, form: AnySpecialization, texts: tuple[Source, ...] = ()) -> None:
        """Keeps a form, if that can be: else later processes plan it again, as they do for sizes of which there are very many."""
        with suppress(OSError, SettingsError):
            if len(self._known) < _MOST_KEPT:
                folder, key = cache_folder("plans"), (id(form), bool(texts) or self._has_text(form))
                if key not in self._written:
                    self._written[key] = _write(folder, StoredSpecialization(form.call, texts))
                write_atomically(folder / name, sealed(self._written[key].encode()))

    def _name(self, sizes: Mapping[str, int], records: str = "") -> str:
        given = sorted((name, size) for name, size in sizes.items() if name not in self._implied)
        return hashlib.sha256(repr((self._digest, given, records)).encode()).hexdigest()

    @cached_property
    def _implied(self) -> frozenset[str]:
        """Names of strides that follow from other sizes."""
        names = ((stride_name(spec.name, d), stride) for spec in self._graph.inputs for d, stride in enumerate(spec.strides))
        return frozenset(name for name, stride in names if str(stride) != name)

    @cached_property
    def _digest(self) -> str:
        """The digest of all that plans follow from, but for the sizes and what was measured."""
        given = (generator(), self.target, self._wide, self._graph.facts, self._graph.locations)
        return hashlib.sha256(repr(given).encode()).hexdigest()


@lru_cache(maxsize=256)
def plans_of(graph: Graph, _locations: Sequence[Location | None], target: Target, wide: bool) -> PlanCache:
    """The programs of a graph: the same for all functions that are traced to it, as those of a model's layers are.

    Args:
        _locations: of the graph, which its equality leaves out, and its texts name.
    """
    return PlanCache(graph, target, wide=wide)


def _read(name: str) -> bytes:
    """The content of a file of the cache.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
    content = unsealed(read_regular(settings().cache_dir / "plans" / name))
    if content is None:
        raise ValueError(f"{name} is damaged")
    return content


def _write(folder: Path, form: StoredSpecialization) -> str:
    """Writes a form; gives its digest, which names the file.

    Raises:
        OSError: it cannot be written.
    """
    content = zlib.compress(json.dumps(encode(form, StoredSpecialization), separators=(",", ":")).encode(), 1)
    digest = hashlib.sha256(content).hexdigest()
    write_atomically(folder / digest, sealed(content))
    return digest
