"""Jinja's environments, where templates lie, and where they are kept compiled."""

from __future__ import annotations

import hashlib
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import sympy
import torch
from jinja2.bccache import Bucket

from fusegen.emit.text import mentions, needed
from fusegen.errors import SettingsError, VerificationError
from fusegen.files import read_regular, sealed, unsealed, write_atomically
from fusegen.settings import cache_folder


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
    raise VerificationError("fusegen's templates are missing", where=str(package), mend="install fusegen again")


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
