"""What a probe finds, and how a probe that fails is itself a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fusegen.errors import FusegenError


class State(Enum):
    """How something is."""

    FOUND = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: of the thing.
        state: how it is.
        needed_for: what does not work without it.
        required: whether this machine needs it.
        version: as it names itself.
        where: its file or folder.
        detail: what else there is to say; of something broken, how it fails.
        mend: how to get it, where it is not as it should be.
    """

    name: str
    state: State
    needed_for: str
    required: bool
    version: str | None = None
    where: str | None = None
    detail: str | None = None
    mend: str | None = None

    @property
    def is_problem(self) -> bool:
        """Whether this machine needs it, and it does not work."""
        return self.required and self.state is not State.FOUND


@dataclass(frozen=True)
class Look:
    """What a probe saw; the fields are those of a finding."""

    state: State
    version: str | None = None
    where: str | None = None
    detail: str | None = None
    mend: str | None = None


@dataclass(frozen=True)
class Probe:
    """Looks for one thing.

    Attributes:
        name, needed_for: as in a finding.
        look: may fail in any way.
    """

    name: str
    needed_for: str
    look: Callable[[], Look]

    def find(self) -> Finding:
        """What is there; a probe that fails says that the thing is broken, and how. Whether it is required is not known here."""
        try:
            look = self.look()
        except FusegenError as error:
            look = broken(error.what, error.mend)
        except Exception as error:
            look = broken(described(error))
        return Finding(self.name, look.state, self.needed_for, False, look.version, look.where, look.detail, look.mend)


def found(version: str | None = None, where: str | None = None, detail: str | None = None) -> Look:
    """It is there and works."""
    return Look(State.FOUND, version, where, detail)


def missing(detail: str, mend: str | None = None) -> Look:
    """It is not there."""
    return Look(State.MISSING, detail=detail, mend=mend)


def broken(detail: str, mend: str | None = None, *, version: str | None = None, where: str | None = None) -> Look:
    """It is there and does not work."""
    return Look(State.BROKEN, version, where, detail, mend)


def described(error: BaseException) -> str:
    """An exception in words."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its class may fail to give any
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
