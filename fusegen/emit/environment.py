"""The one Jinja environment, and where templates lie."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jinja2

from fusegen.emit.text import mentions, needed
from fusegen.errors import VerificationError


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
def environment() -> jinja2.Environment:
    """The environment of emitted text, which is not escaped."""
    made = _strict(autoescape=False)
    made.tests["mentioning"] = mentions
    made.filters["needed"] = needed
    return made


def html_environment() -> jinja2.Environment:
    """A new environment for pages, which escapes all text."""
    return _strict(autoescape=True)


def _strict(*, autoescape: bool) -> jinja2.Environment:
    """An undefined name is an error, and nothing of the machine is visible to a template."""
    return jinja2.Environment(
        cache_size=-1,  # no lock of its own, which another thread could hold while the process forks
        loader=jinja2.FileSystemLoader(templates()),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, /, **context: object) -> str:
    """A template's text."""
    return environment().get_template(template).render(**context)
