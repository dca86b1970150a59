"""The user's code during a trace: the line that runs, for messages, and properties of the caller's tensors."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
import textwrap
import tokenize
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fusegen.ir.graph import Location

_PACKAGE = Path(__file__).parents[1]  # unresolved, as frames report it
_NOT_USER_CODE = (f"{_PACKAGE}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
_SAME_VALUE = frozenset(["to", "float", "half", "bfloat16", "contiguous", "reshape", "view", "flatten", "squeeze", "unsqueeze"])
_DECLARATIONS = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("specs", "nn", "parallel"))


def user_frame() -> FrameType | None:
    """Returns the innermost frame outside of fusegen's compiler and torch; prebuilt specs and modules count as user code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_user(filename: str) -> bool:
    return filename.startswith(_DECLARATIONS) or not filename.startswith(_NOT_USER_CODE)


def is_shown_to_user() -> bool:
    """True if the current string conversion of a value was requested by code outside of fusegen."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("_shown", "__repr__", "__format__"):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(_DECLARATIONS) or not file.startswith(_NOT_USER_CODE[0])


def location() -> Location | None:
    """Returns the user's current line, relative to the `def` of its function."""
    frame = user_frame()
    if frame is None:
        return None
    code = frame.f_code
    written = linecache.getline(code.co_filename, frame.f_lineno)
    printable = "".join(c if c.isprintable() else " " for c in written)  # no second line, and no reversed text, in a C comment
    text = printable.strip().rstrip("\\ ")  # a backslash would continue the comment
    first = _definition(code)
    expression = _expression(written, _positions(code)[frame.f_lasti // 2])
    return Location(code.co_filename, code.co_qualname, first, frame.f_lineno - first + 1, text, expression)


@lru_cache(maxsize=16)  # a list for each line would take quadratic time
def _positions(code: CodeType) -> list[tuple[int | None, int | None, int | None, int | None]]:
    """Returns the first and last line, and the first and last column, of each instruction."""
    return list(code.co_positions())


def _definition(code: CodeType) -> int:
    """Returns the line of a function's `def`, below its decorators; the first line of a lambda or comprehension."""
    first = code.co_firstlineno
    if not linecache.getline(code.co_filename, first).lstrip().startswith("@") or not code.co_name.isidentifier():
        return first
    below = islice(linecache.getlines(code.co_filename), first - 1, None)
    try:
        return next(first + token.start[0] - 1 for token in tokenize.generate_tokens(below.__next__) if token.string == "def")
    except (StopIteration, tokenize.TokenError, SyntaxError, UnicodeError):  # the file has changed
        return first


def _expression(line: str, span: tuple[int | None, int | None, int | None, int | None]) -> str:
    """Returns a part of a line, given its first and last line and column in bytes; empty if it has several lines or is unknown."""
    first, last, start, end = span
    return line.encode(errors="surrogatepass")[start:end].decode(errors="ignore") if first is not None and first == last else ""


def user_line() -> str | None:
    """Returns the user's current file and line, for messages."""
    frame = user_frame()
    return None if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def error_line(error: BaseException) -> str | None:
    """Returns the last user line in an error's traceback."""
    steps = [s for s in traceback.extract_tb(error.__traceback__) if _is_user(s.filename)]
    return _line(steps[-1].filename, steps[-1].lineno or 0) if steps else None


def return_line(function: Callable[..., object]) -> str | None:
    """Returns the line of a function's only return statement, else the function's first line."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if not isinstance(code, CodeType):
        return None
    lines = {step.positions.lineno for step in dis.get_instructions(code) if step.opname.startswith("RETURN_") and step.positions}
    return _line(code.co_filename, (lines.pop() if len(lines) == 1 else None) or code.co_firstlineno)


def result_names(function: Callable[..., object]) -> tuple[str, ...]:
    """Returns the variables that all of a function's return statements return, empty where they return another expression."""
    code = getattr(function, "__code__", None)  # a decorator may exchange results
    return _returned_names(code) if isinstance(code, CodeType) else ()


@lru_cache(maxsize=1024)  # functions whose state changes are traced again and again, and reading a source takes milliseconds
def _returned_names(code: CodeType) -> tuple[str, ...]:
    try:
        written = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError, IndexError, ValueError, tokenize.TokenError):  # no source, or only a part of a statement
        return ()
    if not isinstance(written, ast.FunctionDef):
        return ()
    returned = [s.value for s in _own_statements(written) if isinstance(s, ast.Return)]
    returned = [each for value in returned for each in ((value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,))]
    several = [value.elts for value in returned if isinstance(value, ast.Tuple)]
    named = {() if any(isinstance(e, ast.Starred) for e in elements) else tuple(map(_variable, elements)) for elements in several}
    return named.pop() if len(named) == 1 else ()


def _own_statements(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yields the statements of a function besides those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        statement = waiting.pop()
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(statement)


def _variable(expression: ast.expr) -> str:
    """Returns the variable of an expression that only converts it or views it; empty for another expression."""
    if isinstance(expression, ast.IfExp):
        first, second = _variable(expression.body), _variable(expression.orelse)
        return first if first == second else ""
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and expression.func.attr in _SAME_VALUE:
        return _variable(expression.func.value)
    return expression.id if isinstance(expression, ast.Name) else ""


def _line(file: str, number: int) -> str:
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


@dataclass(frozen=True)
class CallerTensor:
    """The properties of a tensor argument as a Python object.

    Attributes:
        parameter: the user's parameter, which differs from `name` for an element of a container.
        type: the class that ``isinstance`` reports.
        attributes: attributes that torch's tensors do not have.
    """

    name: str
    parameter: str
    type: type[torch.Tensor]
    attributes: frozenset[str]
    requires_grad: bool

    @classmethod
    def of(cls, name: str, parameter: str, tensor: torch.Tensor) -> CallerTensor:
        requires_grad = tensor.requires_grad
        if isinstance(tensor, FakeTensor):  # its class and attributes belong to torch's implementation
            kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
            return cls(name, parameter, kind, frozenset(), requires_grad)
        own = (vars(base) for base in type(tensor).__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))
        return cls(name, parameter, type(tensor), frozenset(vars(tensor)).union(*own), requires_grad)
