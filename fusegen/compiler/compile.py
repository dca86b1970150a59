"""From a trace to sources: runs the stages in their order, or reads their results from the cache."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch

from fusegen.bundle.kernels import Kernels, has_built_kernels, kernels_for
from fusegen.compiler.canonical import canonical_facts, names_of
from fusegen.compiler.lower import Specialization
from fusegen.compiler.pipeline import Rules, Stage, run
from fusegen.compiler.signature import SymbolicSizes
from fusegen.compiler.specialize import Specializer
from fusegen.dtypes import DType
from fusegen.emit.environment import generator
from fusegen.errors import FusegenError, SettingsError
from fusegen.files import read_sealed, write_sealed
from fusegen.guards.check import StateGuard
from fusegen.ir.formula import numbers_of, relation
from fusegen.ir.graph import Graph, InputSpec, Location
from fusegen.program.call import LaunchPlan
from fusegen.program.codec import decode, encode
from fusegen.program.formula import Relation
from fusegen.program.names import stride_name
from fusegen.program.numbers import Numbers
from fusegen.program.renaming import GraphNames
from fusegen.runtime.arguments import WIDE
from fusegen.schedule.choices import Measured
from fusegen.schedule.program import Program
from fusegen.settings import cache_folder
from fusegen.source import Source
from fusegen.target import Backend, Target
from fusegen.threads import cached_property, new_lock
from fusegen.trace.run import ResultTree, Trace
from fusegen.trace.scalars import NeedsFact
from fusegen.trace.user import CallerTensor


@dataclass(frozen=True)
class Request:
    """A request to compile a kernel for one kind of call.

    Attributes:
        name: the kernel's name.
        function: the user's function.
        specs: its tensors, by parameter.
        arguments: the same tensors as objects.
        scalars: its run-time scalars with their dtypes, by parameter.
        statics: all other arguments, by parameter.
        sizes: the symbolic sizes.
        device: the value of ``x.device`` in the function.
        index64: whether indices need 64 bits.
        numbers: this call's values of the scalars, and of ints that are used as sizes.
        repeated_tensors: parameters that receive the same tensor.
        mutates: parameters that the function may write to.
        tied: ints used as sizes that share a symbol with dims of equal size.
        fast_math, plans: the options of the declaration.
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
    index64: bool
    numbers: tuple[tuple[str, int | float], ...] = ()
    repeated_tensors: tuple[str, ...] = ()
    mutates: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    fast_math: bool = False
    plans: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CompiledGraph:
    """A graph with its specialization for some sizes.

    Attributes:
        traced: the graph as traced.
        structure: the pytree of its results.
        cache: all specializations of the graph, shared by kernels of equal graphs.
        specialization: the one for `sizes`.
    """

    traced: Graph
    structure: ResultTree
    cache: SpecializationCache
    specialization: AnySpecialization
    sizes: Mapping[str, int]

    def at(self, sizes: Mapping[str, int]) -> Self:
        """The same graph, specialized for other sizes."""
        specialization = self.cache.at(sizes)
        return self if specialization is self.specialization else replace(self, specialization=specialization, sizes=sizes)

    def with_specialization(self, specialization: AnySpecialization) -> Self:
        """The same graph with another of its specializations."""
        return replace(self, specialization=specialization)

    @property
    def target(self) -> Target:
        """The machine."""
        return self.cache.target

    @property
    def call(self) -> LaunchPlan:
        """The launch plan of a call."""
        return self.specialization.call

    @property
    def sources(self) -> tuple[Source, ...]:
        """The text of each launch."""
        return self.planned.sources if self.specialization.sources is None else self.specialization.sources

    @property
    def specializer(self) -> Specializer:
        """Plans specializations for other sizes."""
        return self.cache.specializer

    @property
    def planned(self) -> Specialization:
        """The specialization with its graph, groups and program. A specialization from the cache is planned again, which takes
        time."""
        return self.specialization if isinstance(self.specialization, Specialization) else self.cache.planned(self.sizes)

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
    """A compiled trace of a function, with the conditions under which it serves a call.

    Attributes:
        request: the request, without ``statics``, which a variant must not keep alive.
        trace: the trace, without the captured tensors.
        guards: relations of sizes that must hold.
        conditions: relations of run-time scalars that must hold.
        state: all other Python state that the function read, captured tensors included.
        switches_gradients: whether torch's autograd would record something that the graph does not show.
        constants: values of promoted literals, see `tracing.ProgramFamilies`.
    """

    request: Request
    trace: Trace
    guards: tuple[Relation, ...]
    conditions: Numbers
    state: StateGuard
    switches_gradients: bool
    constants: tuple[tuple[str, int | float], ...] = ()


def compile_trace(request: Request, traced: Trace, state: StateGuard) -> Variant:
    """Fuses, plans and emits a trace.

    Raises:
        UnsupportedError: recomputation grows without bound.
        NeedsFact: ints that are used as sizes must be literals.
    """
    try:
        return _compiled(request, traced, state)
    except FusegenError:
        parameters = request.sizes.parameters
        if not parameters:
            raise
        raise NeedsFact("static", tuple(parameters)) from None


def _compiled(request: Request, traced: Trace, state: StateGuard) -> Variant:
    hints = dict(request.sizes.hints)
    compiled = compile_graph(traced.graph, traced.structure, request.target, hints, index64=request.index64)
    return Variant(
        **vars(compiled),
        request=replace(request, statics=()),
        trace=replace(traced, captured=()),
        guards=guards_of(traced),
        conditions=numbers_of(traced.conditions),
        state=state,
        switches_gradients=traced.switches_gradients,
    )


def compile_graph(graph: Graph, structure: ResultTree, target: Target, sizes: Mapping[str, int], *, index64: bool) -> CompiledGraph:
    """Fuses, plans and emits a graph.

    Args:
        structure: the pytree of its results.
        sizes: the sizes to specialize it for.
        index64: whether indices need 64 bits.

    Raises:
        UnsupportedError: recomputation grows without bound.
    """
    cache = specializations_of(graph, graph.locations, target, index64)
    return CompiledGraph(graph, structure, cache, cache.at(sizes), sizes)


def needs_index64(compiled: CompiledGraph, sizes: Mapping[str, int]) -> bool:
    """True if kernels need indices beyond 31 bits.

    Args:
        sizes: values of all sizes.
    """
    return compiled.call.largest(sizes) >= WIDE


def guards_of(traced: Trace) -> tuple[Relation, ...]:
    """The relations of sizes that a trace assumes."""
    return tuple(map(relation, traced.guards))


# The cache of specializations, in memory and on disk.
#
# A specialization follows from the graph, the target, the sizes, the records of `fg.tune`, and fusegen's own code. A digest of
# these names a file that holds the name of a second file: the launch plan as JSON, with the text of its kernels. Removing files
# is safe.


GENERATOR_DIGITS = 16
"""Digits of the generator's digest at the start of `SpecializationCache.graph_digest`."""
_MOST_KNOWN = 1024  # sizes of one graph in memory
_MOST_STORED = 256  # sizes of one graph that one process writes to disk


@dataclass(frozen=True, repr=False)
class StoredSpecialization:
    """A specialization as the disk cache keeps it.

    Attributes:
        call: the launch plan of a call.
        texts: the text of each launch; empty if no call has run it yet.
    """

    call: LaunchPlan
    texts: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...] | None:
        """The text of each launch; None if it is missing."""
        return self.texts if len(self.texts) == len(self.call.launches) else None

    @cached_property
    def bound(self) -> dict[object, Any]:
        """Calls bound to exact sizes (`Specialization.bound`)."""
        return {}


@dataclass(frozen=True, eq=False, repr=False)
class BuiltSpecialization:
    """A specialization that was built into a folder. It only runs: `lower` shows a planned one.

    Attributes:
        call: the launch plan of a call, with the names of the call's graph.
        names: these names.
    """

    kernels: Kernels
    call: LaunchPlan
    names: GraphNames

    @property
    def sources(self) -> None:
        """None: machine code has no text."""
        return

    def serves(self, sizes: Mapping[str, int]) -> bool:
        """True if the program is built for some sizes and strides, which have the names of the call's graph."""
        built = self.kernels.program.names.sizes
        return self.kernels.serves({own: sizes[name] for own, name in zip(built, self.names.sizes, strict=True) if name in sizes})

    @cached_property
    def bound(self) -> dict[object, Any]:
        """Calls bound to exact sizes (`Specialization.bound`)."""
        return {}


AnySpecialization: TypeAlias = Specialization | StoredSpecialization | BuiltSpecialization


class SpecializationCache:
    """The specializations of a graph for a machine, in memory and on disk. Kernels of equal graphs share one.

    Args:
        graph: as traced.
        index64: whether indices need 64 bits.

    Attributes:
        target: the target of the machine.
    """

    def __init__(self, graph: Graph, target: Target, *, index64: bool) -> None:
        self._graph, self.target, self._index64 = graph, target, index64
        self._lock = new_lock()
        self._known: dict[str, AnySpecialization] = {}  # by file name
        self._with_text: dict[str, StoredSpecialization] = {}  # read from disk, by digest
        self._without_text: dict[str, AnySpecialization] = {}  # those of `_known` whose text is not on disk
        self._written: dict[tuple[int, bool], str] = {}  # digest, by the id of a specialization and whether its text was written

    def at(self, sizes: Mapping[str, int], *, may_be_built: bool = True) -> AnySpecialization:
        """The specialization for some sizes: a built one, else one that calls compile.

        Args:
            sizes: values of all sizes and strides.

        Raises:
            SettingsError: others can write to a folder of built kernels.
            UnsupportedError: recomputation grows without bound.
        """
        for built in self._built if may_be_built else ():
            if built.serves(sizes):
                return built
        return self._get(self._name(sizes), lambda: self.planned(sizes), is_measured=False)

    def measured(self, sizes: Mapping[str, int], records: str, measured: Measured) -> AnySpecialization:
        """The specialization for some sizes with measured candidates. It only runs: `lower` never shows it.

        Args:
            sizes: values of all sizes and strides.
            records: digest of all measurements.
            measured: returns the measured candidate of a choice.
        """
        return self._get(self._name(sizes, records), lambda: self.specializer.at(sizes, measured), is_measured=True)

    def planned(self, sizes: Mapping[str, int]) -> Specialization:
        """The specialization for some sizes, with its graph, groups and program."""
        return self.specializer.at(sizes)

    def store_text(self, specialization: AnySpecialization, sources: Sequence[Source]) -> None:
        """Writes a specialization to disk, with its text."""
        with self._lock:
            names = [name for name, each in self._without_text.items() if each is specialization]
            for name in names:
                del self._without_text[name]
                self._write(name, specialization, tuple(sources))

    @cached_property
    def specializer(self) -> Specializer:
        """The specializer, with the graph ready for fusion."""
        graph, target = self._graph, self.target
        if target.backend is Backend.CPU:  # it has no approximate functions
            graph = replace(graph, fast_math=False)
        rules = Rules(target)
        traced = run(graph, rules, Stage.TRACED)
        by_library = run(traced, rules, Stage.LIBRARY)
        own = by_library
        if target.wgmma:  # kernels compute attention without dropout; some of torch's use 32-bit indices
            own = traced if self._index64 else run(traced, replace(rules, only_dropout=True), Stage.LIBRARY)
        has_choice = by_library != own and not self._index64
        library = run(by_library, rules, Stage.PRIMITIVE, Stage.READY) if has_choice else None
        ready = run(own, rules, Stage.PRIMITIVE, Stage.READY)
        return Specializer(ready, target, index64=self._index64, library=library)

    def _get(self, name: str, plan: Callable[[], Specialization], *, is_measured: bool) -> AnySpecialization:
        """The specialization of a file, or a new one. A new one is written at once if its sizes alone determine its text."""
        with self._lock:
            if name in self._known:
                return self._known[name]
            if len(self._known) >= _MOST_KNOWN:
                for known in (self._known, self._without_text, self._written):
                    known.clear()
            specialization: AnySpecialization | None = self._read(name)
            if specialization is None:
                specialization = plan()
                if not is_measured or self._has_text(specialization):
                    self._write(name, specialization)
            if not self._has_text(specialization):
                self._without_text[name] = specialization
            self._known[name] = specialization
            return specialization

    def _read(self, name: str) -> StoredSpecialization | None:
        """The specialization of a file; None if the file is missing or damaged."""
        with suppress(OSError, ValueError, zlib.error, FusegenError, RecursionError):
            digest = _digest_in(_read(name))
            if digest in self._with_text:
                return self._with_text[digest]
            content = json.loads(zlib.decompress(_read(digest)))
            specialization: StoredSpecialization = decode(content, StoredSpecialization, digest)
            if specialization.sources is not None:  # other sizes with an equal call may emit another text
                self._with_text[digest] = specialization
            return specialization
        return None

    def _has_text(self, specialization: AnySpecialization) -> bool:
        """True if the text is on disk, maybe written for another size."""
        if isinstance(specialization, StoredSpecialization):
            return specialization.sources is not None
        return (id(specialization), True) in self._written

    def _write(self, name: str, specialization: AnySpecialization, texts: tuple[Source, ...] = ()) -> None:
        """Writes a specialization. Later processes plan it again if that fails, or beyond `_MOST_STORED` sizes."""
        with suppress(OSError, SettingsError):
            if len(self._known) < _MOST_STORED:
                folder, key = cache_folder("plans"), (id(specialization), bool(texts) or self._has_text(specialization))
                if key not in self._written:
                    self._written[key] = _write(folder, StoredSpecialization(specialization.call, texts))
                write_sealed(folder / name, self._written[key].encode())

    def _name(self, sizes: Mapping[str, int], records: str = "") -> str:
        independent = sorted((name, size) for name, size in sizes.items() if name not in self._implied)
        return hashlib.sha256(repr((self._digest, independent, records)).encode()).hexdigest()

    @cached_property
    def _built(self) -> tuple[BuiltSpecialization, ...]:
        try:
            has_folders = has_built_kernels()
        except SettingsError:  # `lower` needs no settings; calls report the error
            return ()
        found = kernels_for(self.graph_digest, self.names, self.target) if has_folders else ()
        return tuple(BuiltSpecialization(kernels, plan, self.names) for kernels, plan in found)

    @cached_property
    def graph_digest(self) -> str:
        """The digest that selects built kernels: of the generator, and of the graph without names and source lines."""
        facts = (self._index64, canonical_facts(self._graph))
        return f"{generator()[:GENERATOR_DIGITS]}-{hashlib.sha256(repr(facts).encode()).hexdigest()}"

    @cached_property
    def names(self) -> GraphNames:
        """The names in the graph."""
        return names_of(self._graph)

    @cached_property
    def _implied(self) -> frozenset[str]:
        """Names of strides that follow from other sizes."""
        names = ((stride_name(spec.name, d), stride) for spec in self._graph.inputs for d, stride in enumerate(spec.strides))
        return frozenset(name for name, stride in names if str(stride) != name)

    @cached_property
    def _digest(self) -> str:
        """The digest of everything that plans depend on except sizes and measurements."""
        facts = (generator(), self.target, self._index64, self._graph.facts, self._graph.locations)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@lru_cache(maxsize=256)
def specializations_of(graph: Graph, _locations: Sequence[Location | None], target: Target, index64: bool) -> SpecializationCache:
    """The specializations of a graph, shared by all functions with an equal trace, e.g. a model's layers.

    Args:
        _locations: locations of the graph. Graph equality ignores them, but emitted text contains them.
    """
    return SpecializationCache(graph, target, index64=index64)


def _read(name: str) -> bytes:
    """The content of a cache file.

    Raises:
        SettingsError: others can write to the cache.
        ValueError: it is missing or damaged.
    """
    content = read_sealed(cache_folder("plans") / name)
    if content is None:
        raise ValueError(f"{name} is missing or damaged")
    return content


def _digest_in(content: bytes) -> str:
    """The name of the file that a file names. Raises `ValueError` if it is no digest: no path leads out of the folder."""
    if re.fullmatch(rb"[0-9a-f]{64}", content) is None:
        raise ValueError("no digest")
    return content.decode()


def _write(folder: Path, specialization: StoredSpecialization) -> str:
    """Writes a specialization. Returns its digest, which is the file's name.

    Raises:
        OSError: it cannot be written.
    """
    content = zlib.compress(json.dumps(encode(specialization, StoredSpecialization), separators=(",", ":")).encode(), 1)
    digest = hashlib.sha256(content).hexdigest()
    write_sealed(folder / digest, content)
    return digest
