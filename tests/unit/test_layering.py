"""Imports go one way, without circles; and every operation has every rule."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fusegen.dtypes import DType
from fusegen.emit.cpu import CPP
from fusegen.emit.cuda import CUDA
from fusegen.emit.math import COMMON
from fusegen.families import FAMILIES
from fusegen.ir.index_map import _VIEWS
from fusegen.ir.infer import _SHAPES
from fusegen.ir.ops import DtypeRule, Family, Op
from fusegen.ir.reference import RULES
from fusegen.passes.expand import EXPANSIONS
from fusegen.program.numbers import arity
from tests.naming import case

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fusegen"

# A package may import packages above it in this list and itself, but none on its own line. ``fusegen`` is the public face,
# fusegen's ``__init__``: the prebuilt kernels are declared with it as a user's are. It imports public names on first use, and for
# types from any package.
ORDER = (
    ("errors", "units", "eager_cost", "threads", "integrations"),
    ("lazy",),
    ("dtypes", "files", "native", "settings", "target"),
    ("source", "guards", "progress"),
    ("program",),
    ("runtime",),
    ("ir",),
    ("passes", "trace"),
    ("autodiff",),
    ("options",),
    ("fusion",),
    ("schedule",),
    ("emit",),
    ("families",),
    ("jit",),
    ("extension",),
    ("bundle.manifest",),
    ("bundle.kernels",),
    ("compiler",),
    ("timing",),
    ("bundle", "describe", "operators"),
    ("page",),
    ("lowered",),
    ("gradients",),
    ("api",),
    ("graphs", "tuning"),
    ("integrations.patch",),
    ("declare",),
    ("integrations.fx",),
    ("integrations.torch_compile", "integrations.find"),
    ("fusegen",),
    ("specs",),
    ("ops",),
    ("nn", "integrations.hf"),
    ("parallel",),
    ("bench",),
    ("verify",),
    ("own",),
    ("cli",),
    ("__main__",),
)
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}

# Not allowed although above in the list: compilers and the disk deal in texts.
FORBIDDEN = {("jit", "ir"), ("jit", "emit")}


@dataclass(frozen=True)
class Import:
    """One module of ours mentions another one."""

    importer: str
    imported: str
    line: int
    for_types: bool  # under TYPE_CHECKING: nothing happens at run time

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    """All modules of the package, by dotted name."""
    return {_dotted(path): path for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(maxsize=1)
def imports() -> tuple[Import, ...]:
    """All imports of our own modules, in functions as well."""
    return tuple(found for name, path in modules().items() for found in _imports_of(name, path))


def _imports_of(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {id(inner) for node in ast.walk(tree) if _is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        for imported in _targets(node, name, path.name == "__init__.py"):
            yield Import(name, imported, node.lineno, id(node) in for_types)  # type: ignore[attr-defined]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _targets(node: ast.AST, importer: str, is_package: bool) -> list[str]:
    """The modules of ours that a statement imports; ``from package import module`` is the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules()]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = _absolute(node, importer, is_package)
    if base not in modules():
        return []
    names = [f"{base}.{alias.name}" for alias in node.names]
    return list(dict.fromkeys(name if name in modules() else base for name in names))


def _absolute(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    above = node.level - 1 if is_package else node.level
    parts = importer.split(".")[: len(importer.split(".")) - above]
    return ".".join([*parts, *([node.module] if node.module else [])])


def package_of(module: str) -> str:
    """The package of a module: the first name below fusegen; integrations, and modules in ORDER, are packages of their own."""
    parts = module.split(".")
    is_own = parts[1:2] == ["integrations"] or ".".join(parts[1:3]) in LEVEL
    return ".".join(parts[1:3] if is_own else parts[1:2]) or parts[0]


def is_allowed(importer: str, imported: str) -> bool:
    """True if a package may import another one."""
    return importer == imported or (LEVEL[imported] < LEVEL[importer] and (importer, imported) not in FORBIDDEN)


def test_every_package_has_its_place() -> None:
    packages = {package_of(name) for name in modules()}
    assert packages <= set(LEVEL), f"not in ORDER: {', '.join(sorted(packages - set(LEVEL)))}"


def test_imports_go_one_way() -> None:
    for for_types in (False, True):
        with case(for_types):
            wrong = [
                str(i)
                for i in imports()
                if i.for_types is for_types
                and not (for_types and i.importer == PACKAGE)
                and not is_allowed(package_of(i.importer), package_of(i.imported))
            ]
            assert not wrong, "\n".join(wrong)


def test_there_are_no_circles() -> None:
    """An import in a function hides a circle, it does not remove it; imports for types may go in circles within a package."""
    circle = find_circle({name: [i.imported for i in imports() if i.importer == name and not i.for_types] for name in modules()})
    assert circle is None, " -> ".join(circle or ())


HEAVY = ("sympy", "jinja2", "nvrtc")


def test_what_loads_built_kernels_imports_neither_compilers_nor_computer_algebra() -> None:
    edges = {name: [i.imported for i in imports() if i.importer == name and not i.for_types] for name in modules()}
    closure, stack = set[str](), ["fusegen.bundle.load"]
    while stack:
        name = stack.pop()
        if name not in closure:
            closure.add(name)
            packages = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
            stack += [*edges[name], *packages]
    found = [f"{name} imports {outside}" for name in sorted(closure) for outside in _outside(modules()[name])]
    assert not [line for line in found if line.endswith(HEAVY)]
    assert "fusegen.runtime.execute" in closure and "fusegen.ir.graph" not in closure


def _outside(path: Path) -> Iterator[str]:
    """Names that a file imports, each with what it is imported from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(alias.name for alias in node.names))


def find_circle(edges: dict[str, list[str]]) -> list[str] | None:
    """One circle, as the modules along it, or None."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str] | None:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return None
        for following in edges[name]:
            if following != name and (found := visit(following, [*trail, name])):
                return found
        done.add(name)
        return None

    return next((found for name in edges if (found := visit(name, []))), None)


# Operations.

PRIMITIVES = [op for op in Op if op.family is Family.POINTWISE and op.is_primitive and op is not Op.CAST]
OF_ROWS = (Op.SORT_KEY, Op.DESCENDING_KEY, Op.SORTED_VALUE, Op.DESCENDING_VALUE, Op.KEY_INDEX)
"""Primitives that the compiler applies to the elements of rows alone."""


def test_every_operation_has_its_rules() -> None:
    for op in Op:
        with case(op):
            by_graph = op.family in (Family.LEAF, Family.WRITE) or op is Op.BLOCKS
            assert (op in RULES) is not by_graph, "ir/reference.py: one rule an operation, but for what is more than its operands"
            assert (op in EXPANSIONS) is (not op.is_primitive), "passes/expand.py: one expansion an operation that is no primitive"
            assert (op in _VIEWS) is (op.family is Family.VIEW), "ir/index_map.py: one index map a view"


def test_every_family_has_a_rule_for_shapes() -> None:
    assert set(_SHAPES) == set(Family), "ir/infer.py"


def test_every_kind_of_group_has_one_family() -> None:
    kinds = [kind for family in FAMILIES for kind in family.kinds]
    assert len(set(kinds)) == len(kinds) and len({kind.name for kind in kinds}) == len(kinds)


def test_every_primitive_is_an_operation_on_numbers() -> None:
    for op in (op for op in PRIMITIVES if op not in OF_ROWS):
        with case(op):
            assert arity(op.row.name) == op.row.arity, "program/numbers.py: how Python writes it, or that torch computes it"


def test_every_primitive_can_be_written() -> None:
    for op in PRIMITIVES:
        for language in (CUDA, CPP):
            with case((op, language)):
                types = [DType.FLOAT32, DType.FLOAT64] + ([] if op.row.result is DtypeRule.FLOAT else [DType.INT64])
                missing = [str(dtype) for dtype in types if op not in COMMON and op not in language.forms[dtype]]
                assert not missing, f"{op!r} has no form for {', '.join(missing)}"
