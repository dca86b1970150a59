"""Binaries of a folder, which know the call that they were compiled for.

A kernel takes addresses and sizes as they come. A manifest that hands them over in another order than the binary expects would
end the process, however well its own hash fits. So a binary ends with a mark: the digest of what the manifest says of its call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fusegen.bundle.manifest import AGAIN, NAME, BuiltKernel, BuiltPasses, BuiltProgram, BuiltVariant, Code, Parameter, digest
from fusegen.errors import BundleError
from fusegen.program.codec import encode

Program = TypeVar("Program", bound=BuiltProgram)


def mark_of(parameters: Sequence[Parameter], variant: BuiltVariant) -> bytes:
    """The mark of a program's binaries: a digest of all that the manifest says of it but names and digests of files."""
    passes = None if variant.passes is None else _nameless_passes(variant.passes)
    content = encode(BuiltKernel("", tuple(parameters), (replace(_nameless(variant), passes=passes),)), BuiltKernel)
    return _digest(content)


def passes_mark_of(parameters: Sequence[Parameter], machine: str, passes: BuiltPasses) -> bytes:
    """The mark of the binaries of passes, likewise."""
    kernel = encode(BuiltKernel("", tuple(parameters), ()), BuiltKernel)
    return _digest([kernel, machine, encode(_nameless_passes(passes), BuiltPasses)])


def _nameless(program: Program) -> Program:
    return replace(program, code=tuple(replace(each, file="", sha256="", source="") for each in program.code))


def _nameless_passes(passes: BuiltPasses) -> BuiltPasses:
    forward, backward = (tuple(map(_nameless, programs)) for programs in (passes.forward, passes.backward))
    return replace(passes, forward=forward, backward=backward)


def _digest(content: object) -> bytes:
    return digest(json.dumps(content, sort_keys=True).encode()).encode()


def binary(folder: Path, code: Code, mark: bytes) -> bytes:
    """A kernel's binary, as it was compiled.

    Args:
        folder: where it lies.
        code: what the manifest says of it.
        mark: of the program that it belongs to.

    Raises:
        BundleError: it is missing, has been changed, lies outside of the folder, or belongs to another call.
    """
    path = folder / code.file
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError) as error:  # a null in it, say, or links in a circle
        raise BundleError(f"{folder / NAME}: {code.file!r} is no name of a file: {error}", mend=AGAIN) from None
    if not is_inside:
        raise BundleError(f"{folder / NAME}: the file {code.file!r} is outside of the folder", mend=AGAIN)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}", mend=AGAIN) from None
    if digest(content) != code.sha256:
        raise BundleError(f"{path} is not as it was built: its hash differs", mend=AGAIN)
    if not content.endswith(mark):
        raise BundleError(f"{path} was compiled for another call than {NAME} says", mend=AGAIN)
    return content.removesuffix(mark)
