"""Templates: Jinja environments, the cache of compiled templates, banners, translation units, and primitives."""

from __future__ import annotations

import hashlib
import marshal
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import sympy
import torch
from jinja2.bccache import Bucket

from fusegen.dtypes import DType
from fusegen.errors import SettingsError, VerificationError
from fusegen.files import FORMAT, read_sealed, write_sealed
from fusegen.ir.formula import integer_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Axes, Index, NamedNumber
from fusegen.program.formula import Formula, FormulaKind
from fusegen.schedule.program import Launch, Traffic
from fusegen.settings import cache_folder
from fusegen.source import Primitive, Source, fitted
from fusegen.target import Target

# Indices and conditions in C, and the definitions that a text needs.


def c_text(index: Index) -> str:
    return integer_text(index, "/")


def condition_text(bounds: Bounds) -> str:
    comparisons = []
    if bounds.lower is not None and bounds.lower != 0:
        comparisons.append(f"{c_text(bounds.index)} >= {c_text(bounds.lower)}")
    if bounds.upper is not None:
        comparisons.append(f"{c_text(bounds.index)} < {c_text(bounds.upper)}")
    return " && ".join(comparisons) or "true"


@dataclass(frozen=True)
class LinearIndex:
    """A variable of the text: the row-major position that the axes' indices are decoded from.

    ``pitches`` are factors of the position that the text names.
    """

    axes: Axes
    name: str
    pitches: Mapping[int, NamedNumber] = field(default_factory=dict)

    def __call__(self, offset: Index) -> Index:
        """Writes an offset that is linear in the position with the position. No intermediate value exceeds the offset."""
        position = self.axes.symbols[0] if len(self.axes.symbols) == 1 else sympy.Symbol(self.name, integer=True, nonnegative=True)
        written = sympy.expand(sympy.sympify(self._of_position(offset, position)))
        pitch = written.coeff(position)
        named = self.pitches.get(int(pitch)) if pitch.is_Integer else None
        return written if named is None else written - pitch * position + named * position

    def _of_position(self, offset: Index, position: sympy.Symbol) -> Index:
        if position in self.axes.symbols:
            return offset
        expanded = sympy.expand(sympy.sympify(offset))
        flattened, scale = self._flattened(), expanded.coeff(self.axes.symbols[-1])
        rest = sympy.expand(expanded - scale * flattened)
        if scale == 0 or {*scale.free_symbols, *rest.free_symbols} & set(self.axes.symbols):
            return offset
        written = sympy.expand(scale * position + rest)
        return written if all(term.is_nonnegative for term in sympy.Add.make_args(written)) else offset

    def _flattened(self) -> sympy.Expr:
        position = sympy.Integer(0)
        for symbol, extent in zip(self.axes.symbols, self.axes.extents, strict=True):
            position = position * extent + symbol
        return sympy.expand(position)


_NO_CODE = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"')


def code_of(text: str) -> str:
    """Returns a text without its comments and strings, which may quote user code."""
    return _NO_CODE.sub("", text)


def mentions(text: str, name: str) -> bool:
    """True if the code mentions a name; comments and strings do not count."""
    return re.search(rf"\b{name}\b", code_of(text)) is not None


def offset_of(name: str) -> str:
    """Returns the constant for the offset of an array in shared memory. Names that differ in case alone get different constants."""
    return f"{name.upper()}_OFFSET" if name.islower() else f"OFFSET_OF_{name}"


def needed_definitions(lines: Sequence[str], text: str) -> list[str]:
    """Returns the definitions (``const type name = …``) that the text, or a later needed definition, mentions."""
    used: list[str] = []
    for line in reversed(lines):
        _, _, name, *_ = line.split()
        if mentions("\n".join([*used, text]), name):
            used.append(line)
    return used[::-1]


# The first lines of an emitted file: the kernel, its launch, its traffic, and the reason for its layout.


_NARROW = "Indices have 32 bits, also past the end in a last block: from 2^31 - 2^22 elements, tensors need the 64-bit variant."


def banner(launch: Launch, target: Target) -> str:
    """Returns comment lines; grid and bytes are formulas of the sizes."""
    lines = [f"{launch.kernel.name}: {launch.description}, emitted by fusegen for {target.name}."]
    body = launch.kernel.body
    if target.warp:
        shared = f", {launch.shared_bytes} bytes of shared memory" if launch.shared_bytes else ""
        reason = f": {body.reason}" if body.reason else ""
        lines.append(f"Grid {_in_c(launch.grid)}, block {launch.block}{shared}{reason}.")
    lines.append(_moved(launch.traffic))
    if target.warp:
        lines += _tensors(launch)
    if target.warp and not launch.kernel.index64:
        lines.append(_NARROW)
    return fitted("\n".join(f"// {line}" for line in lines))


def banner_of_parts(whole: Launch, parts: Sequence[Launch], target: Target) -> str:
    """Returns the comment lines of a kernel of several parts: of the launch, then of each part."""
    lines = [f"{whole.kernel.name}: {len(parts)} kernels in one launch, emitted by fusegen for {target.name}."]
    shared = f", {whole.shared_bytes} bytes of shared memory" if whole.shared_bytes else ""
    order = "The blocks of each part follow those of the previous part."
    lines.append(f"Grid {_in_c(whole.grid)}, block {whole.block}{shared}. {order}")
    if not whole.kernel.index64:
        lines.append(_NARROW)
    for part in parts:
        reason = f"; {part.kernel.body.reason}" if part.kernel.body.reason else ""
        lines.append(f"{part.kernel.name}: {part.description}.")
        lines.append(f"Blocks: {_in_c(part.grid)}{reason}.")
        lines.append(_moved(part.traffic))
        lines += _tensors(part)
    return fitted("\n".join(f"// {line}" for line in lines))


def _tensors(launch: Launch) -> list[str]:
    """Returns sentences about the tensors that the text is valid for, and about the launches that read its temporaries."""
    pointers = list({p.buffer: p for p in (*launch.mapped, *launch.kernel.pointers)}.values())
    groups, layouts = dict[tuple[str, str], list[str]](), dict.fromkeys(p.layout for p in pointers if p.stream is None)
    for p in (p for p in pointers if p.stream is None):
        groups.setdefault((f"{p.dtype.spelling} {p.shape}", p.layout), []).append(p.name.removesuffix("_ptr"))
    of_each = len(layouts) > 1
    parts = [f"{', '.join(names)}: {shape}{f', {layout}' if of_each else ''}" for (shape, layout), names in groups.items()]
    every = [] if of_each or len(parts) < 2 else [f"all {layout}" for layout in layouts]
    if not of_each and len(parts) == 1:
        parts = [f"{parts[0]}, {layout}" for layout in layouts]
    read = [f"A launch of its own reads {p.name.removesuffix('_ptr')}: {', '.join(p.readers)}." for p in pointers if p.readers]
    return [*([f"{'; '.join([*parts, *every])}."] if parts else []), *read]


def _in_c(count: Formula) -> str:
    text = count.text("/")
    return text[1:-1] if count.operator is FormulaKind.QUOTIENT else text


def _moved(traffic: Traffic) -> str:
    return f"Reads {_in_c(traffic.read)} bytes, writes {_in_c(traffic.written)}."


# Several kernels in one translation unit: primitives once, and a namespace for each kernel's own text.


def unit_text(sources: Sequence[Source]) -> str:
    """Returns the text of a C++ unit that defines the distinct entries of several kernels; for one kernel, its text unchanged."""
    if len(sources) == 1:
        return sources[0].text
    own = [f"{s.banner}\nnamespace kernel_{number} {{\n{s.kernel_text}}}\n" for number, s in enumerate(sources)]
    primitives = primitives_of("".join(s.kernel_text for s in sources), "cpu")
    return "\n".join([*(p.text for p in primitives), *own])


@lru_cache(maxsize=1)
def templates() -> Path:
    """Returns the folder of templates: inside the package in a wheel, next to ``pyproject.toml`` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped, checkout = package / "templates", package.parent / "templates"
    if shipped.is_dir():
        return shipped
    if checkout.is_dir() and _is_checkout(package.parent / "pyproject.toml"):
        return checkout
    raise VerificationError("fusegen's templates are missing", where=str(package), hint="install fusegen again")


def _is_checkout(project: Path) -> bool:
    return project.is_file() and 'name = "fusegen"' in project.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def generator() -> str:
    """Returns the digest of everything that emitted text depends on: the package, its templates, Python, and libraries."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(repr((sys.version, sympy.__version__, jinja2.__version__, torch.__version__)).encode())
    for folder, pattern in ((package, "*.py"), (templates(), "*")):
        for path in sorted(p for p in folder.rglob(pattern) if p.is_file()):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Returns the environment of emitted text, without escaping."""
    env = strict_environment(autoescape=False, lstrip_blocks=True)
    env.tests["mentioning"] = mentions
    env.filters["needed_definitions"] = needed_definitions
    env.filters["offset_of"] = offset_of
    env.filters["mentioned_in"] = lambda names, text: [name for name in names if mentions(text, name)]
    return env


def html_environment() -> jinja2.Environment:
    """Returns a new environment for HTML pages, with escaping."""
    return strict_environment(autoescape=True, lstrip_blocks=True)


def strict_environment(**options: Any) -> jinja2.Environment:
    """Returns a new environment in which undefined names are errors and templates have no access to the machine."""
    options |= {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(
        cache_size=-1,  # avoids Jinja's lock, which another thread could hold while the process forks
        loader=jinja2.FileSystemLoader(templates()),
        bytecode_cache=_Compiled(repr(sorted(options.items()))),
        **options,
    )


class _Compiled(jinja2.BytecodeCache):
    """Caches compiled templates on disk: compiling those of a first kernel takes longer than everything else it needs.

    A file holds the digest of the template's text and the code, as in Python's own ``__pycache__``; Jinja's format would pickle the
    digest. An unreadable, unwritable or damaged file only costs time.
    """

    def __init__(self, options: str) -> None:
        self._options = options

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        parts = (FORMAT, sys.version, jinja2.__version__, self._options, name, filename)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(SettingsError, ValueError, EOFError, TypeError):
            checksum, _, code = (read_sealed(_path(bucket)) or b"").partition(b"\n")
            if checksum == bucket.checksum.encode():
                bucket.code = marshal.loads(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, SettingsError):
            write_sealed(_path(bucket), bucket.checksum.encode() + b"\n" + marshal.dumps(bucket.code))


def _path(bucket: Bucket) -> Path:
    return cache_folder("templates") / bucket.key


def render(template: str, /, **context: object) -> str:
    return environment().get_template(template).render(**context)


# Primitives: one function per file, included if the text mentions it, in the overloads and widths that it needs.

_STATEMENT, _WORD, _ASKED = re.compile(r"//%.*|\{\{.*?\}\}"), re.compile(r"\w+"), re.compile(r'"(\w+)" in (\w+)')
_CALLED = re.compile(r"\b([a-z_]\w*)\s*[(<]")


def closure(text: str, known: frozenset[str], body_of: Callable[[str], str]) -> dict[str, str]:
    """Maps ``types`` and all primitives that a text mentions to their bodies, in dependency order."""
    bodies = {"types": body_of("types")}
    under_way: set[str] = set()

    def visit(mentioning: str) -> None:
        for name in sorted(known.intersection(_CALLED.findall(code_of(mentioning))) - bodies.keys() - under_way):
            under_way.add(name)
            body = body_of(name)
            visit(body)
            bodies[name] = body

    visit(text)
    return bodies


@lru_cache(maxsize=4)
def names(folder: str) -> frozenset[str]:
    return frozenset(path.stem for path in (templates() / folder / "primitives").iterdir() if path.suffix in (".cuh", ".h"))


@dataclass(frozen=True)
class StoredType:
    """An element type in memory, as PTX instructions move it.

    Attributes:
        name: the name in the text.
        size: bytes.
        unsigned: the unsigned integer of its bits.
        register, letter: the instruction's register type, and its asm constraint.
        access: the instruction's suffix.
        bits: the expression for the element's bits in a loaded register.
    """

    name: str
    size: int

    @property
    def unsigned(self) -> str:
        return f"u{8 * self.size}"

    @property
    def register(self) -> str:
        return f"u{max(16, 8 * self.size)}"  # there are no 8-bit registers

    @property
    def letter(self) -> str:
        return {1: "h", 2: "h", 4: "r", 8: "l"}[self.size]

    @property
    def access(self) -> str:
        return "u8" if self.size == 1 else f"b{8 * self.size}"

    @property
    def bits(self) -> str:
        return "static_cast<u8>(bits)" if self.size == 1 else "bits"


@dataclass(frozen=True)
class PrimitiveUses:
    """The types and widths of primitives that a text uses.

    Attributes:
        loaded, stored: dtypes of elements that single loads and stores move.
        widened, narrowed: dtypes that are converted to their computing type, and from it.
        computed: dtypes of the math.
        load_widths, store_widths: bytes of vector accesses.
        maps: whether the kernel takes tensor maps.
        converts_float8: whether the target has instructions that convert 8-bit floats.
    """

    loaded: frozenset[DType]
    stored: frozenset[DType]
    widened: frozenset[DType]
    narrowed: frozenset[DType]
    computed: frozenset[DType]
    load_widths: frozenset[int]
    store_widths: frozenset[int]
    maps: bool
    converts_float8: bool

    def __or__(self, other: PrimitiveUses) -> PrimitiveUses:
        return PrimitiveUses(*(getattr(self, each.name) | getattr(other, each.name) for each in fields(self)))

    @property
    def context(self) -> dict[str, object]:
        types = self.loaded | self.stored | self.widened | self.narrowed
        lists = {"types": types, "widened": self.widened, "narrowed": self.narrowed, "computed": self.computed}
        return {
            "loaded": [StoredType(d.spelling, d.itemsize) for d in DType if d in self.loaded],
            "stored": [StoredType(d.spelling, d.itemsize) for d in DType if d in self.stored],
            **{name: [d.spelling for d in DType if d in dtypes] for name, dtypes in lists.items()},
            "load_widths": sorted(self.load_widths),
            "store_widths": sorted(self.store_widths),
            "maps": self.maps,
            "converts_float8": self.converts_float8,
        }


_ALL, _WIDTHS = frozenset(DType), frozenset((1, 2, 4, 8, 16))
EVERYTHING = PrimitiveUses(_ALL, _ALL, _ALL, _ALL, _ALL, _WIDTHS, _WIDTHS, maps=True, converts_float8=True)
"""For a text whose uses are unknown."""


@lru_cache(maxsize=1024)
def body(folder: str, name: str, uses: PrimitiveUses = EVERYTHING) -> str:
    written = _template_text(folder, name)
    return _environment().get_template(_file(folder, name)).render(uses.context) if _is_template(written) else written


def primitives_of(text: str, folder: str, uses: PrimitiveUses = EVERYTHING) -> tuple[Primitive, ...]:
    """Returns all primitives that a text needs, in dependency order."""
    bodies = closure(text, names(folder), lambda name: body(folder, name, uses))
    return tuple(
        Primitive(name, _variant(_template_text(folder, name), uses), text.rstrip("\n") + "\n") for name, text in bodies.items()
    )


@lru_cache(maxsize=1024)
def _variant(written: str, uses: PrimitiveUses) -> tuple[str, ...]:
    """Returns the type names and access widths that a primitive's text depends on, besides the target."""
    statements = "\n".join(_STATEMENT.findall(written))
    mentioned, asked = set(_WORD.findall(statements)), set(_ASKED.findall(statements))
    context: dict[str, Any] = uses.context
    moved = [t.name for name in ("loaded", "stored") if name in mentioned for t in context[name]]
    types = [t for name in ("types", "widened", "narrowed", "computed") for t in context[name] if (t, name) in asked]
    widths = [str(width) for name in ("load_widths", "store_widths") if name in mentioned for width in context[name]]
    maps = ["maps"] if "maps" in mentioned and uses.maps else []
    return tuple(dict.fromkeys([*moved, *types, *widths, *maps]))


@lru_cache(maxsize=1024)
def _template_text(folder: str, name: str) -> str:
    return (templates() / _file(folder, name)).read_text(encoding="utf-8")


def _file(folder: str, name: str) -> str:
    return f"{folder}/primitives/{name}{'.cuh' if folder == 'cuda' else '.h'}"


def _is_template(written: str) -> bool:
    return "//% " in written or "{{ " in written


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Puts template statements in comments, so that braces and percent signs of instructions stay text."""
    return strict_environment(
        line_statement_prefix="//%",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
