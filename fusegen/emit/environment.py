"""Templates: Jinja's environments, the cache of compiled templates, banners, units, and the primitives that a text needs."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import sympy
import torch
from jinja2.bccache import Bucket

from fusegen.dtypes import DType
from fusegen.errors import SettingsError, VerificationError
from fusegen.files import read_regular, sealed, unsealed, write_atomically
from fusegen.ir.formula import integer_text
from fusegen.ir.index_map import Bounds
from fusegen.ir.symbolic import Index
from fusegen.schedule.program import Launch
from fusegen.settings import cache_folder
from fusegen.source import Primitive, Source
from fusegen.target import Target

# Indices and conditions in C, and which definitions a text needs.


def c_text(index: Index) -> str:
    """An index in C."""
    return integer_text(index, "/")


def condition_text(bounds: Bounds) -> str:
    """A condition in C."""
    parts = []
    if bounds.lower is not None and bounds.lower != 0:
        parts.append(f"{c_text(bounds.index)} >= {c_text(bounds.lower)}")
    if bounds.upper is not None:
        parts.append(f"{c_text(bounds.index)} < {c_text(bounds.upper)}")
    return " && ".join(parts) or "true"


_NO_CODE = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"')


def code_of(text: str) -> str:
    """A text without its comments and strings, in which users' lines and names stand."""
    return _NO_CODE.sub("", text)


def mentions(text: str, name: str) -> bool:
    """True if a name stands in a text."""
    return re.search(rf"\b{name}\b", text) is not None


def needed(lines: Sequence[str], text: str) -> list[str]:
    """Definitions (``const type name = …``) that a text behind them, or a later one of them, mentions."""
    kept: list[str] = []
    for line in reversed(lines):
        _, _, name, *_ = line.split()
        if mentions("\n".join([*kept, text]), name):
            kept.append(line)
    return kept[::-1]


# The first lines of an emitted file: what it is, how it is launched, what it moves, and why it is laid out as it is.


def banner(launch: Launch, target: Target) -> str:
    """Lines of comment; grid and bytes are formulas of the sizes."""
    lines = [f"{launch.kernel.name}: {launch.words}, emitted by fusegen for {target.name}."]
    body = launch.kernel.body
    if target.warp:
        shared = f", {launch.shared_bytes} bytes of shared memory" if launch.shared_bytes else ""
        reason = f": {body.reason}" if body.reason else ""
        lines.append(f"Grid {launch.grid}, block {launch.block}{shared}{reason}.")
    lines.append(f"Reads {launch.traffic.read} bytes, writes {launch.traffic.written}.")
    return "\n".join(f"// {line}" for line in lines)


# Several kernels in one translation unit: primitives once, each kernel's own text in a namespace.


def unit_text(sources: Sequence[Source]) -> str:
    """The text of a C++ unit that defines the entries of some kernels; of one kernel, its text as it is.

    Args:
        sources: in C++, with entries that differ; at least one.
    """
    if len(sources) == 1:
        return sources[0].text
    own = [f"{s.banner}\nnamespace kernel_{number} {{\n{s.kernel_text}}}\n" for number, s in enumerate(sources)]
    primitives = primitives_of("".join(s.kernel_text for s in sources), "cpu")
    return "\n".join([*(p.text for p in primitives), *own])


@lru_cache(maxsize=1)
def templates() -> Path:
    """The folder of templates: inside the package in a wheel, beside our ``pyproject.toml`` in a checkout.

    Raises:
        VerificationError: when the installation lacks them.
    """
    package = Path(__file__).resolve().parents[1]
    shipped, checkout = package / "templates", package.parent / "templates"
    if shipped.is_dir():
        return shipped
    if checkout.is_dir() and _is_ours(package.parent / "pyproject.toml"):
        return checkout
    raise VerificationError("fusegen's templates are missing", where=str(package), hint="install fusegen again")


def _is_ours(project: Path) -> bool:
    return project.is_file() and 'name = "fusegen"' in project.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def generator() -> str:
    """The digest of all that decides what is emitted: the package, its templates, Python and the libraries that take part."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256(repr((sys.version, sympy.__version__, jinja2.__version__, torch.__version__)).encode())
    for folder, pattern in ((package, "*.py"), (templates(), "*")):
        for path in sorted(p for p in folder.rglob(pattern) if p.is_file()):
            content = path.read_bytes()
            found.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The environment of emitted text, which is not escaped."""
    made = strict(autoescape=False, lstrip_blocks=True)
    made.tests["mentioning"] = mentions
    made.filters["needed"] = needed
    return made


def html_environment() -> jinja2.Environment:
    """A new environment for pages, which escapes all text."""
    return strict(autoescape=True, lstrip_blocks=True)


def strict(**options: Any) -> jinja2.Environment:
    """A new environment: an undefined name is an error, and nothing of the machine is visible to a template."""
    options |= {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(
        cache_size=-1,  # no lock of its own, which another thread could hold while the process forks
        loader=jinja2.FileSystemLoader(templates()),
        bytecode_cache=_Compiled(repr(sorted(options.items()))),
        **options,
    )


class _Compiled(jinja2.BytecodeCache):
    """Compiled templates in the cache: to compile those of a first kernel takes longer than all else that it needs.

    Jinja compares the text of the template itself. A file that cannot be read or written, or that is damaged, costs time only.

    Args:
        options: of the environment, which decide what a text compiles to.
    """

    def __init__(self, options: str) -> None:
        self._options = options

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        parts = (sys.version, jinja2.__version__, self._options, name, filename)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, SettingsError):
            if (content := unsealed(read_regular(_path(bucket)))) is not None:
                bucket.bytecode_from_string(content)

    def dump_bytecode(self, bucket: Bucket) -> None:
        with suppress(OSError, SettingsError):
            write_atomically(_path(bucket), sealed(bucket.bytecode_to_string()))


def _path(bucket: Bucket) -> Path:
    return cache_folder("templates") / bucket.key


def render(template: str, /, **context: object) -> str:
    """A template's text."""
    return environment().get_template(template).render(**context)


# Primitives: one named function a file, included when the text mentions it, in the overloads and widths that it needs.

_STATEMENT, _WORD, _ASKED = re.compile(r"//%.*|\{\{.*?\}\}"), re.compile(r"\w+"), re.compile(r'"(\w+)" in (\w+)')
_CALLED = re.compile(r"\b([a-z_]\w*)\s*[(<]")


def closure(text: str, known: frozenset[str], body_of: Callable[[str], str]) -> dict[str, str]:
    """Name and body of ``types`` and of all primitives that a text mentions, each after those that it mentions itself."""
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
    """The primitives of a language: the file names of its folder."""
    return frozenset(path.stem for path in (templates() / folder / "primitives").iterdir() if path.suffix in (".cuh", ".h"))


@dataclass(frozen=True)
class StoredType:
    """A type of elements in memory, as an instruction moves it.

    Attributes:
        name: in the text.
        size: bytes.
        unsigned: the unsigned integer of its bits.
        register, letter: the type that an instruction takes for it, and the constraint of one.
        access: the instruction's suffix.
        bits: of what was loaded, those of the element.
    """

    name: str
    size: int

    @property
    def unsigned(self) -> str:
        return f"u{8 * self.size}"

    @property
    def register(self) -> str:
        return f"u{max(16, 8 * self.size)}"  # there are no registers of 8 bits

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
        stored: types of elements in memory.
        computed: types in which the math computes.
        widths: bytes of an access to several neighbours.
        maps: whether it takes tensor maps.
        converts_float8: whether the target has instructions that convert 8-bit floats.
    """

    stored: frozenset[DType]
    computed: frozenset[DType]
    widths: frozenset[int]
    maps: bool
    converts_float8: bool

    def __or__(self, other: PrimitiveUses) -> PrimitiveUses:
        """Joins what two texts use."""
        lists = (self.stored | other.stored, self.computed | other.computed, self.widths | other.widths)
        return PrimitiveUses(*lists, self.maps or other.maps, self.converts_float8 or other.converts_float8)

    @property
    def context(self) -> dict[str, object]:
        """The variables of a primitive's template."""
        stored = [StoredType(d.spelling, d.itemsize) for d in DType if d in self.stored]
        return {
            "stored": stored,
            "types": [t.name for t in stored],
            "computed": [d.spelling for d in DType if d in self.computed],
            "widths": sorted(self.widths),
            "maps": self.maps,
            "converts_float8": self.converts_float8,
        }


EVERYTHING = PrimitiveUses(frozenset(DType), frozenset(DType), frozenset((1, 2, 4, 8, 16)), maps=True, converts_float8=True)
"""For a text of which nothing is known."""


@lru_cache(maxsize=1024)
def body(folder: str, name: str, uses: PrimitiveUses = EVERYTHING) -> str:
    """The text of a primitive."""
    written = _written(folder, name)
    return _environment().get_template(_file(folder, name)).render(uses.context) if _is_template(written) else written


def primitives_of(text: str, folder: str, uses: PrimitiveUses = EVERYTHING) -> tuple[Primitive, ...]:
    """All primitives that a text needs."""
    bodies = closure(text, names(folder), lambda name: body(folder, name, uses))
    return tuple(Primitive(name, _variant(_written(folder, name), uses), text.rstrip("\n") + "\n") for name, text in bodies.items())


@lru_cache(maxsize=1024)
def _variant(written: str, uses: PrimitiveUses) -> tuple[str, ...]:
    """The words for what a primitive's text follows from, but for the target: types by name, bytes of accesses."""
    statements = "\n".join(_STATEMENT.findall(written))
    mentioned, asked = set(_WORD.findall(statements)), set(_ASKED.findall(statements))
    context: dict[str, Any] = uses.context
    types = [t for t in context["types"] if "stored" in mentioned or (t, "types") in asked]
    computed = [t for t in context["computed"] if (t, "computed") in asked]
    widths = [str(width) for width in context["widths"] if "widths" in mentioned]
    maps = ["maps"] if "maps" in mentioned and uses.maps else []
    return tuple(dict.fromkeys([*types, *computed, *widths, *maps]))


@lru_cache(maxsize=1024)
def _written(folder: str, name: str) -> str:
    return (templates() / _file(folder, name)).read_text(encoding="utf-8")


def _file(folder: str, name: str) -> str:
    return f"{folder}/primitives/{name}{'.cuh' if folder == 'cuda' else '.h'}"


def _is_template(written: str) -> bool:
    return "//% " in written or "{{ " in written


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Statements stand in comments, so that braces and percent signs of instructions are text."""
    return strict(
        line_statement_prefix="//%",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
