"""Every error that a user can meet: what went wrong, where, and a hint.

One class a kind of mistake, so that callers can catch what they can handle. A message is always built from the same
three parts; nothing in the package raises a bare ``Exception`` or uses ``assert`` for a mistake of the user's.
"""

from __future__ import annotations


class FusegenError(Exception):
    """Base of all errors that fusegen raises on purpose.

    Args:
        what: what went wrong, in one sentence.
        where: the place, usually the user's file and line.
        hint: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__("\n".join(self._parts()))

    def _parts(self) -> list[str]:
        parts = [self.what]
        if self.where:
            parts.append(f"  at: {self.where}")
        if self.hint:
            parts.append(f"  try: {self.hint}")
        return parts

    @property
    def one_line(self) -> str:
        """The message on one line, for the command line."""
        return " · ".join(part.strip() for part in self._parts())


def one_line(error: Exception) -> str:
    """Any error on one line."""
    return error.one_line if isinstance(error, FusegenError) else f"{type(error).__name__}: {error}".partition("\n")[0]


class TraceError(FusegenError):
    """The function does something that cannot be traced to a graph."""


class UnsupportedError(TraceError):
    """The function uses an operation, a dtype or a shape that fusegen does not know."""


class ShapeError(TraceError, RuntimeError):
    """Shapes that do not fit together, as torch would also refuse: with a ``RuntimeError``, for which a function may have a way."""


class DimError(ShapeError, IndexError):
    """A dim, or an element of one, that a tensor does not have: torch raises an ``IndexError``."""


class ArgumentError(FusegenError, TypeError):
    """A call's argument has the wrong type, device, dtype or shape."""


class BatchError(ArgumentError):
    """A model cannot be run on a batch."""


class GradientError(FusegenError):
    """A gradient that is not computed: a call's input requires one, or there is nothing to differentiate."""


class TargetError(FusegenError, ValueError):
    """An unknown target, or one that cannot do what is asked of it."""


class SettingsError(FusegenError, ValueError):
    """An environment variable that cannot be understood."""


class ToolNotFoundError(FusegenError):
    """A compiler or tool that the request needs is not on this machine."""


class CompileError(FusegenError):
    """A compiler refused emitted text: a defect of fusegen, with the text's place to report it."""


class BundleError(FusegenError):
    """A folder of built kernels cannot be written, or is not as it was built."""


class LaunchError(FusegenError):
    """A compiled kernel could not be launched."""


class IndexRangeError(FusegenError, IndexError):
    """A value that a kernel used as an index names no element. On a GPU it is a device assert with the same words."""


class EmulationError(FusegenError):
    """The emulator saw a kernel do something illegal: out of bounds, a race, an uninitialised read."""


class SpecNotFoundError(FusegenError, LookupError):
    """No kernel of the given name."""


class VerificationError(FusegenError):
    """A graph or a program breaks an invariant: a defect of fusegen."""
