"""The kernels and models that a project ships: ``[tool.fusegen.build]`` in ``pyproject.toml``."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fusegen.cli.arguments import DTYPES, tensor_of
from fusegen.cli.build_model import require_function
from fusegen.cli.load import is_location
from fusegen.dtypes import DType
from fusegen.errors import ArgumentError, FusegenError
from fusegen.runtime.devices import LEVELS
from fusegen.specs import find
from fusegen.target import target

_FILE = Path("pyproject.toml")
_TABLE = "[tool.fusegen.build]"
FORMATS = ("bundle", "extension", "sources", "wheel", "extension-wheel", "hub")
_TEXTS = ("out", "format", "library", "version", "cpu")
_LISTS = ("arch", "dtype")
_OF_KERNEL = ("shape", "arg", "call")


def with_project(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Returns the options of one build for each kernel and model that the project in the current folder lists. Options of the
    command line replace those of the file.

    Raises:
        ArgumentError: there is no such table, or an entry is invalid.
    """
    table = _table()
    _refuse_unknown(_TABLE, table, (*_TEXTS, *_LISTS, "all", "kernels", "models"))
    common = _values(_TABLE, table, _TEXTS, _LISTS)
    if "out" in common:
        common["out"] = Path(common["out"])
    given = {name: value for name, value in vars(options).items() if value not in (None, [], False)}
    is_all = table.get("all", False)
    if type(is_all) is not bool:
        raise ArgumentError(f"{_FILE}: all of {_TABLE} is {is_all!r}", hint="write true or false")
    builds = [vars(options) | common | given | {"all": True}] if is_all else []
    kernels = [_entry("kernel", entry, (*_LISTS, *_OF_KERNEL)) for entry in _entries(table, "kernels")]
    models = [_entry("model", entry, ("arch",)) for entry in _entries(table, "models")]
    builds += [vars(options) | common | entry | given for entry in (*kernels, *models)]
    if not builds:
        hint = 'write kernels = ["rms_norm"], models = ["models.py:make"], or all = true'
        raise ArgumentError(f"{_FILE}: {_TABLE} lists no kernels", hint=hint)
    return [argparse.Namespace(**build) for build in builds]


def project_version() -> str:
    """Returns the version of the project in the current folder.

    Raises:
        ArgumentError: no project there has a version, or the file cannot be read.
    """
    project = _document().get("project")
    version = project.get("version") if isinstance(project, dict) else None
    if not isinstance(version, str):
        raise ArgumentError("the wheel has no version", hint=f"add --version 1.0, or a version to [project] of {_FILE}")
    return version


def project_license() -> str:
    """Returns the license of the project in the current folder; "unknown" if it names none."""
    project = _document().get("project")
    name = project.get("license") if isinstance(project, dict) else None
    return name if isinstance(name, str) else "unknown"


def _document() -> Mapping[str, Any]:
    """Returns the file's contents; none if there is no file."""
    try:
        return tomllib.loads(_FILE.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read {_FILE}: {error}", hint="correct the file, or give the options that it lists") from None


def _table() -> Mapping[str, Any]:
    hint = f"name a kernel, a model by --model, all prebuilt fusions by --all, or list kernels in {_TABLE} of {_FILE}"
    table = _document()
    for key in ("tool", "fusegen", "build"):
        if key not in table:
            raise ArgumentError("no kernel is named", hint=hint)
        value: object = table[key]
        if not isinstance(value, dict):
            raise ArgumentError(f"{_FILE}: {key} is {value!r}, not a table", hint=f"write {_TABLE}, and kernels = [...] below it")
        table = value
    return table


def _entries(table: Mapping[str, Any], key: str) -> list[object]:
    entries = table.get(key, [])
    if not isinstance(entries, list):
        raise ArgumentError(f"{_FILE}: {key} of {_TABLE} is {entries!r}, not a list", hint=f"write {key} = [{entries!r}]")
    return entries


def _entry(kind: str, entry: object, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the options of a kernel or a model: its name, or a table with its name."""
    entry = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        examples = {
            "kernel": '"rms_norm", or {name = "mine.py:scaled", call = "x=8192x4096"}',
            "model": '"models.py:make", or {name = "models.py:make", arch = "sm_90a"}',
        }
        raise ArgumentError(f"{_FILE}: the {kind} {entry!r} in {_TABLE} has no name", hint=examples[kind])
    _check(f"name of the {kind}", _TABLE, entry["name"])
    where = f"{entry['name']} in {_TABLE}"
    _refuse_unknown(where, entry, ("name", *keys))
    return {kind: [entry["name"]], **_values(where, entry, (), keys)}


def _values(where: str, table: Mapping[str, Any], texts: Sequence[str], lists: Sequence[str]) -> dict[str, Any]:
    """Returns the values of some keys; one string stands for a list of one."""
    values: dict[str, Any] = {}
    for name in (*texts, *lists):
        if name not in table:
            continue
        value = [table[name]] if name in lists and isinstance(table[name], str) else table[name]
        elements = value if name in lists and isinstance(value, list) else [value]
        if not all(isinstance(element, str) for element in elements):
            expected = "strings" if name in lists else "a string"
            raise ArgumentError(f"{_FILE}: {name} of {where} is {table[name]!r}", hint=f"write {expected}")
        for element in map(str, elements):
            _check(name, where, element)
        values[name] = value
    return values


def _check(name: str, where: str, text: str) -> None:
    """Refuses a value that no build accepts, before anything is built.

    Raises:
        ArgumentError: it names the key, its table and, if the text is there once, its line.
    """
    try:
        if not text.strip():
            raise ArgumentError("it is empty", hint="leave it out")
        if name in _SHAPES and len(text.split()) > 1:
            parts = ", ".join(f'"{part}"' for part in text.split())
            raise ArgumentError(f"there is a space in {text!r}", hint=f"write one string for each: {name} = [{parts}]")
        if name in _CHECKS:
            _CHECKS[name](text)
    except FusegenError as error:
        what = f"{_FILE}: {name} of {where}: {error.what}"
        raise ArgumentError(what, where=_line_of(text), hint=(error.hint or "").replace(f"--{name} ", "")) from None


def _check_argument(text: str) -> None:
    name, equals, _ = text.partition("=")
    if not equals or not name.isidentifier():
        raise ArgumentError(f"cannot read the argument {text!r}", hint='write NAME=VALUE, such as "by=0.5"')


def _require_one_of(known: Sequence[str], text: str) -> None:
    if text not in known:
        raise ArgumentError(f"there is no {text!r}", hint=f"write one of {', '.join(known)}")


def _of_words(check: Callable[[str], object], text: str) -> None:
    for word in text.split(","):
        check(word.strip())


_SHAPES = ("shape", "call")
_CHECKS: Mapping[str, Callable[[str], object]] = {
    "shape": lambda text: tensor_of(text, DType.FLOAT32),
    "call": partial(_of_words, lambda text: tensor_of(text, DType.FLOAT32)),
    "arg": _check_argument,
    "arch": partial(_of_words, target),
    "dtype": partial(_of_words, partial(_require_one_of, tuple(DTYPES))),
    "cpu": partial(_require_one_of, LEVELS),
    "format": partial(_require_one_of, FORMATS),
    "name of the kernel": lambda text: is_location(text) or find(text),
    "name of the model": require_function,
}


def _line_of(text: str) -> str | None:
    """Returns the file with the line of a string; None if several lines, or none, have it."""
    lines = [
        n for n, line in enumerate(_FILE.read_text(encoding="utf-8").splitlines(), 1) if f'"{text}"' in line or f"'{text}'" in line
    ]
    return f"{_FILE}:{lines[0]}" if len(lines) == 1 else None


def _refuse_unknown(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in table:
        if name not in known:
            raise ArgumentError(f"{_FILE}: {where} has no key {name!r}", hint=f"its keys are {', '.join(known)}")
