"""The user's lines and the emitted lines, with the keys that connect them."""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
import tokenize
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

from markupsafe import Markup, escape

from fusegen.describe import explain_title
from fusegen.emit.math import Quote, quote_of, quoted_lines
from fusegen.ir.graph import Graph, Location
from fusegen.ir.ops import Family
from fusegen.jit.nvrtc import Instruction
from fusegen.page.units import Unit
from fusegen.source import Source

_MOST_LINES = 400  # of one function
_COMMENT = re.compile(r"//[^\n]*")
_DEFINED = re.compile(r"[\w:<>*& ]*?(\w+)\(")
_MULTIPLIES = re.compile(r"\s+.*\b(?:wg)?mma\w*(?:<.*>)?\(")


# The user's lines.


@dataclass(frozen=True)
class UserLine:
    """A line of the user's code; a line without operations has no key."""

    number: int
    text: str
    key: int | None


@dataclass(frozen=True)
class UserFunction:
    title: str
    lines: tuple[UserLine, ...]


@dataclass(frozen=True)
class Keys:
    """The numbers of the user's lines that have operations.

    Attributes:
        own: the number of each line.
        lit: for each line whose operations some step computes, its number, and those of lines that became a part of it: a softmax
            between two matmuls is one operation with the second one.
    """

    own: Mapping[Quote, int]
    lit: Mapping[Quote, frozenset[int]]


def keys_of(traced: Graph, units: Sequence[Unit]) -> Keys:
    computed = dict.fromkeys(quote for unit in units for quote in _nodes_by_quote(unit.graph, unit.nodes))
    traced_nodes = _nodes_by_quote(traced, [p for p, node in traced if node.family is not Family.LEAF])
    parts = {quote: _nearest(traced, nodes, computed) for quote, nodes in traced_nodes.items() if quote not in computed}
    own = {quote: key for key, quote in enumerate([*computed, *(quote for quote, wholes in parts.items() if wholes)])}
    lit = {quote: {own[quote]} for quote in computed}
    for part, wholes in parts.items():
        for whole in wholes:
            lit[whole].add(own[part])
    return Keys(own, {quote: frozenset(keys) for quote, keys in lit.items()})


def _nearest(graph: Graph, nodes: Sequence[int], wanted: Container[Quote]) -> set[Quote]:
    """Returns the wanted lines that use the values of some nodes first; without any, those that compute their operands last."""
    users, operands = dict(enumerate(graph.users)), {position: node.args for position, node in graph}
    return _reached(users, graph, nodes, wanted) or _reached(operands, graph, nodes, wanted)


def _reached(steps: Mapping[int, Iterable[int]], graph: Graph, nodes: Sequence[int], wanted: Container[Quote]) -> set[Quote]:
    """Returns the wanted lines that are reached first in the direction of some steps between nodes."""
    reached, stack, seen = set[Quote](), list(nodes), set[int]()
    while stack:
        for position in set(steps[stack.pop()]) - seen:
            seen.add(position)
            place = graph.locations[position]
            if place is not None and quote_of(place) in wanted:
                reached.add(quote_of(place))
            else:
                stack.append(position)
    return reached


def user_functions(traced: Graph, units: Sequence[Unit], keys: Keys) -> list[UserFunction]:
    """Returns the functions whose lines have operations: complete where the file still has them, else these lines alone."""
    every = {*traced.locations, *(unit.graph.locations[position] for unit in units for position in unit.nodes)}
    known = (place for place in every if place is not None and quote_of(place) in keys.own)
    places = sorted(known, key=lambda place: (place.file, place.first, place.line))
    functions = []
    for (file, function, first), group in groupby(places, key=lambda place: (place.file, place.function, place.first)):
        by_line = {place.line: place for place in group}
        shown = _written(file, first, by_line) or {line: place.text for line, place in by_line.items()}
        lines = (
            UserLine(first + n - 1, text, keys.own[quote_of(by_line[n])] if n in by_line else None) for n, text in shown.items()
        )
        functions.append(UserFunction(f"{function.rpartition('<locals>.')[2]} in {PurePath(file).name}", tuple(lines)))
    return functions


def _written(file: str, first: int, by_line: Mapping[int, Location]) -> dict[int, str] | None:
    """Returns the lines of a function; None if the file has other ones by now."""
    try:
        block = inspect.getblock(linecache.getlines(file)[first - 1 :])
    except (tokenize.TokenError, SyntaxError, IndexError):
        return None
    lines = textwrap.dedent("".join(block)).expandtabs().splitlines()
    is_same = all(line <= len(lines) and _words(lines[line - 1]) == _words(place.text) for line, place in by_line.items())
    return dict(enumerate(lines, 1)) if is_same and len(lines) <= _MOST_LINES else None


def _words(text: str) -> str:
    """Returns the words of a line: a location has no unprintable characters and no backslash at the end."""
    return re.sub(r"[\W_]+", " ", text).strip()


# The emitted lines.


@dataclass(frozen=True)
class CodeBlock:
    """Consecutive emitted lines, or instructions, that come from the same lines of the user."""

    keys: tuple[int, ...]
    html: Markup


def code_blocks(unit: Unit, keys: Keys) -> list[CodeBlock]:
    """Returns the text of a unit's kernel, without primitives, with the keys of the user's lines."""
    if unit.source is None:
        lit = frozenset().union(*(keys.lit[quote] for quote in _nodes_by_quote(unit.graph, unit.nodes)))
        return [CodeBlock(tuple(sorted(lit)), escape(f"{explain_title(unit.parts[0])}\n"))]
    return list(_joined(unit.source.kernel_text.splitlines(), _keys_of_lines(unit, unit.source, keys)))


def machine_blocks(unit: Unit, source: Source, keys: Keys, instructions: Sequence[Instruction]) -> list[CodeBlock]:
    """Returns the instructions of a unit's kernel, each with the keys of the innermost emitted line that has some.

    Lines of primitives have none.
    """
    found = _keys_of_lines(unit, source, keys)
    first = len(source.text.splitlines()) - len(found)
    of_instructions = (
        next((found[line - first] for line in each.lines if line >= first and found[line - first]), set[int]())
        for each in instructions
    )
    return list(_joined([each.text for each in instructions], list(of_instructions)))


def _keys_of_lines(unit: Unit, source: Source, keys: Keys) -> list[set[int]]:
    """Returns the keys of the user's lines for each line of a kernel's text.

    A line that the text does not quote is inlined, or computed by the template: it belongs to the lines that use its values first,
    to those that multiply matrices, or else to the signature of the kernel.
    """
    inside, by_quote = unit.nodes, _nodes_by_quote(unit.graph, unit.nodes)
    lines = quoted_lines(source.kernel_text)
    found = [set() if quote is None else set(keys.lit.get(quote, ())) for _, quote in lines]
    quoted = {quote for _, quote in lines if quote is not None}
    texts = [line for line, _ in lines]
    users_inside = {position: inside.intersection(unit.graph.users[position]) for position in inside}
    for quote, nodes in by_quote.items():
        users = {quote} if quote in quoted else _reached(users_inside, unit.graph, nodes, quoted)
        places = [number for number, (_, own) in enumerate(lines) if own in users]
        if any(unit.graph.nodes[p].family is Family.CONTRACTION for p in nodes):
            places += [number for number, line in enumerate(texts) if _MULTIPLIES.match(line)]
        for number in places or _signature(texts):
            found[number] |= keys.lit[quote]
    _add_calls(texts, found)
    return found


def _nodes_by_quote(graph: Graph, positions: Iterable[int]) -> dict[Quote, list[int]]:
    """Maps the user's lines to their operations among some nodes."""
    nodes: dict[Quote, list[int]] = {}
    for position in sorted(positions):
        place = graph.locations[position]
        if place is not None and place.text:
            nodes.setdefault(quote_of(place), []).append(position)
    return nodes


def _signature(lines: Sequence[str]) -> list[int]:
    """Returns the numbers of the lines of a kernel's signature."""
    first = next((number for number, line in enumerate(lines) if line.startswith('extern "C"')), 0)
    last = next((number for number, line in enumerate(lines[first:], first) if line.rstrip().endswith("{")), first)
    return list(range(first, last + 1))


def _add_calls(lines: Sequence[str], found: list[set[int]]) -> None:
    """Adds the keys of a function's lines to the lines that call it."""
    by_function: dict[str, set[int]] = {}
    name = ""
    for line, keys in zip(lines, found, strict=True):
        if not line.startswith((" ", "}", "/")) and (defined := _DEFINED.match(line)):
            name = defined[1]
        if keys and line.startswith(" ") and name:
            by_function.setdefault(name, set()).update(keys)
    called = re.compile(rf"\b({'|'.join(map(re.escape, by_function))})\(")
    for line, keys in zip(lines, found, strict=True):
        if by_function and line.startswith(" ") and not keys:
            keys.update(*(by_function[call] for call in called.findall(line)))


def _joined(lines: Sequence[str], found: Sequence[set[int]]) -> Iterator[CodeBlock]:
    for keys, group in groupby(zip(lines, found, strict=True), key=lambda pair: sorted(pair[1])):
        text = str(escape("".join(f"{line}\n" for line, _ in group)))
        yield CodeBlock(tuple(keys), Markup(_COMMENT.sub(r"<i>\g<0></i>", text)))
