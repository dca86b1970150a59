"""The stages of a kernel to inspect: graphs, groups, programs, texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusegen.compiler.compile import Compiled
from fusegen.describe import Stages, page, summary
from fusegen.explain import SavedValue, explain, explain_saved
from fusegen.ir.graph import Graph
from fusegen.jit import disassemble, nvrtc
from fusegen.passes.fuse import Group
from fusegen.program.workspace import bytes_of
from fusegen.schedule.choose import Choice
from fusegen.schedule.program import Program
from fusegen.source import Source
from fusegen.target import Backend, Target


class Lowered:
    """Every stage of a kernel for some arguments.

    A terminal prints a summary of it, a notebook shows a page with collapsible sections.

    Attributes:
        traced: the graph as the function was traced.
        graph: the graph in primitives, simplified.
        groups: which nodes became which step.
        program: the steps, with sizes as formulas.
        sources: the text of each launch.
        sizes: values of the symbolic sizes and strides of the example arguments.
        choices: for products, by their positions in the graph, what was chosen for these sizes, with the expected times.
        asm: the text of all launches: ``cuda`` or ``cpp``, ``ptx``, ``sass``.
    """

    def __init__(self, compiled: Compiled, sizes: Mapping[str, int], saved: Sequence[SavedValue] | None = None) -> None:
        self.target: Target = compiled.program.target
        self.traced: Graph = compiled.traced
        self.graph: Graph = compiled.graph
        self.groups: tuple[Group, ...] = compiled.groups
        self.program: Program = compiled.program
        self.sources: tuple[Source, ...] = compiled.sources
        self.sizes = dict(sizes)
        self.choices: Mapping[int, Choice] = compiled.alternatives.of(sizes).choices(sizes)
        self._forms, self._saved = compiled.alternatives.of(sizes), saved
        self.asm = Assembly(self.sources, self.target)

    def explain(self) -> str:
        """The kernels that run, with the layout, the bytes, the FLOPs and the bound of each; of a forward pass also the
        values that it saves for its backward pass.

        A pointwise operation of `graph` is one FLOP an element: an addition, a comparison, an exponential. A
        multiplication and an addition are two. A reduction is one an element that it reduces; moments and the normalizer
        of a softmax are four. A matmul is 2mnk; attention is its two matmuls, over the keys up to the last that a query
        sees. A value counts once. Conversions, copies, integers, logic, random bits and the softmax of attention are not
        counted.

        The expected time is that of a model of plans, in µs, beside the best other plan's; of a step without a model it is the
        time at peak rates. A warning says where a launch of much work has so few blocks that most of the GPU idles.

        Bandwidth binds a kernel below the GPU's ridge point, arithmetic one above it. Launch latency binds a kernel whose
        work at peak rates takes less time than a launch.
        """
        text = explain(self.program, self.sizes, self.choices)
        saved = self._saved_text()
        return f"{text}\n{saved}" if saved else text

    @property
    def workspace_bytes(self) -> int:
        """The bytes of a `fg.Workspace` for a call of these sizes."""
        return bytes_of(self.program.call, self.sizes)

    def __repr__(self) -> str:
        return summary(self._stages())

    def _repr_html_(self) -> str:
        """The page that a notebook shows."""
        return page(self._stages())

    def _stages(self) -> Stages:
        saved = self._saved_text().partition("\n")[0]
        return Stages(self.traced, self.program, self.sources, self.sizes, self.choices, tuple(self.asm), saved)

    def _saved_text(self) -> str:
        return "" if self._saved is None else explain_saved(self._saved, self.sizes)

    @property
    def plans(self) -> tuple[LoweredForm, ...]:
        """The programs of all numbers of rows that products can have, with rows and points laid out for these sizes; made when they
        are asked for."""
        forms = self._forms.all(self.sizes)
        return tuple(LoweredForm({str(dim): numbers for dim, numbers in rows.items()}, f.program, f.sources) for rows, f in forms)


@dataclass(frozen=True, repr=False)
class LoweredForm:
    """The program of calls with some numbers of rows.

    Attributes:
        rows: for each number of rows that is known at the call only, from where to where; the last range has no end, in fact.
        program: the steps.
        sources: the text of each launch.
    """

    rows: Mapping[str, range]
    program: Program
    sources: tuple[Source, ...]

    def __repr__(self) -> str:
        ranges = ", ".join(f"{name} from {numbers[0]} to {numbers[-1]}" for name, numbers in self.rows.items())
        return f"<program for {ranges or 'all sizes'}: {', '.join(map(repr, self.program.steps))}>"


class Assembly(Mapping[str, str]):
    """The text of a program's launches in each language; compiled only when asked for.

    Args:
        sources: of the launches.
        target: the machine.
    """

    def __init__(self, sources: tuple[Source, ...], target: Target) -> None:
        self.sources = sources
        self.target = target

    def __getitem__(self, language: str) -> str:
        """The text.

        Raises:
            KeyError: the target has no such language.
            ToolNotFoundError: NVRTC or nvdisasm is not installed.
        """
        if language not in self._languages:
            raise KeyError(f"no {language!r} for {self.target.name}; there is {', '.join(self._languages)}")
        return "\n".join(self._text(source, language) for source in self.sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self._languages)

    def __len__(self) -> int:
        return len(self._languages)

    def __repr__(self) -> str:
        entries = ", ".join(source.entry for source in self.sources) or "no kernel"
        return f"<asm of {entries} for {self.target.name}: {', '.join(self._languages)}>"

    @property
    def _languages(self) -> tuple[str, ...]:
        return ("cpp",) if self.target.backend is Backend.CPU else ("cuda", "ptx", "sass")

    def _text(self, source: Source, language: str) -> str:
        if language == "ptx":
            return nvrtc.compile_ptx(source, self.target.name)
        if language == "sass":
            return disassemble.sass(nvrtc.compile_cubin(source, self.target.name).cubin)
        return source.text
