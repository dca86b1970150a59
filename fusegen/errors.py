"""All errors that fusegen raises on purpose, one class per kind of mistake. Each has a problem, a location and a hint."""

from __future__ import annotations


class FusegenError(Exception):
    """Base of all errors that fusegen raises on purpose.

    Args:
        what: the problem, in one sentence.
        where: the location, usually the user's file and line.
        hint: how to fix it.
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
        return " · ".join(part.strip() for part in self._parts())


def one_line(error: Exception) -> str:
    """Returns the message of an error, of fusegen or not, on one line."""
    return error.one_line if isinstance(error, FusegenError) else f"{type(error).__name__}: {error}".partition("\n")[0]


class TraceError(FusegenError):
    """The function does something that cannot be traced."""


class UnsupportedError(TraceError):
    """The function uses an operation, dtype or shape that fusegen does not support."""


class ShapeError(TraceError, RuntimeError):
    """Shapes do not fit together. torch raises a ``RuntimeError`` too, which a function may catch."""


class DimError(ShapeError, IndexError):
    """A tensor has no such dim or index; torch raises an ``IndexError``."""


class ArgumentError(FusegenError, TypeError):
    """A call's argument has the wrong type, device, dtype or shape."""


class BatchError(ArgumentError):
    """The model of `fg.find` does not run on the batch."""


class GradientError(FusegenError):
    """A gradient cannot be computed: an input requires an unsupported one, or there is nothing to differentiate."""


class TargetError(FusegenError, ValueError):
    """The target is unknown, or lacks a capability."""


class SettingsError(FusegenError, ValueError):
    """An environment variable has an invalid value."""


class ToolNotFoundError(FusegenError):
    """A compiler or tool is missing on this machine."""


class CompileError(FusegenError):
    """A compiler rejected emitted text: a bug of fusegen."""


class BundleError(FusegenError):
    """A folder of built kernels cannot be written, or was modified after the build."""


class LaunchError(FusegenError):
    """A compiled kernel could not be launched."""


class IndexRangeError(FusegenError, IndexError):
    """A kernel used an index outside its range. A GPU reports it as a device assert with the same message."""


class EmulationError(FusegenError):
    """The emulator found an illegal operation: out of bounds, a race, an uninitialised read."""


class SpecNotFoundError(FusegenError, LookupError):
    """There is no kernel of that name."""


class VerificationError(FusegenError):
    """A graph or a program breaks an invariant: a bug of fusegen."""
