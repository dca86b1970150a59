"""The manifest of a folder of built kernels: its contents, as data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fusegen.errors import BundleError
from fusegen.files import read_regular
from fusegen.program.call import LaunchPlan, LibraryCall
from fusegen.program.codec import decode, encode
from fusegen.program.numbers import Operation, arity
from fusegen.program.renaming import GraphNames
from fusegen.program.signature import Constant, ResultStructure, Signature, Wiring, builder
from fusegen.runtime.library import FUNCTIONS
from fusegen.threads import without_garbage_collection

NAME = "manifest.json"

FORMAT = 15
"""The version of the manifest's format. Other versions are rejected. It is one for all releases of fusegen with the same first two
numbers, because wheels require them."""

REBUILD_HINT = "build it again, or copy the whole folder"
"""The hint if a folder has changed since the build."""


@dataclass(frozen=True)
class BuiltParameter:
    """A parameter of a kernel's function, or a captured tensor, which calls pass by keyword.

    Attributes:
        name: the user's name; for a captured tensor, its name in the graph.
        plain: its name in emitted text.
        default: None if there is no default.
        written: whether the kernel may write to it.
        captured: whether it is a captured tensor.
    """

    name: str
    plain: str
    keyword_only: bool
    default: Constant | None
    written: bool = False
    captured: bool = False


@dataclass(frozen=True)
class KernelBinary:
    """A kernel's binary.

    Attributes:
        file: path in the folder.
        sha256: digest of the file.
        source: file of the source text, for reference.
    """

    file: str
    sha256: str
    entry: str
    source: str


@dataclass(frozen=True)
class BuiltProgram:
    """A program: its assumptions about a call, its launch plan, and one binary per launch.

    Attributes:
        graph: the digest that calls match (`SpecializationCache.graph_digest`).
        names: the names in the graph, which calls replace by their own.
    """

    signature: Signature
    call: LaunchPlan
    code: tuple[KernelBinary, ...]
    graph: str
    names: GraphNames


@dataclass(frozen=True)
class BuiltPasses:
    """The passes of a kernel.

    Attributes:
        wiring: the connection of both passes.
        derivatives: for each result of the kernel, the inputs with respect to which it has a derivative.
        forward: programs of the forward pass.
        backward: programs of the backward pass.
    """

    wiring: Wiring
    derivatives: tuple[tuple[str, ...], ...]
    forward: tuple[BuiltProgram, ...]
    backward: tuple[BuiltProgram, ...]

    @property
    def programs(self) -> tuple[BuiltProgram, ...]:
        return (*self.forward, *self.backward)


@dataclass(frozen=True)
class RequestedCall:
    """A call to build for, as the command line describes it: a later build into the same folder repeats it.

    Attributes:
        kernel: the kernel's name on the command line; "" if the build was started from Python.
        place: of a kernel in a file, what `place_of` returns for the file; else "".
        target: e.g. ``sm_90a``.
        dtype: dtype of tensors without one in `shapes`; "" for the default.
        shapes: ``NAME=SIZES[:DTYPE]``.
        arguments: ``NAME=VALUE``.
        cpu: the level of x86-64 that a CPU kernel is built for; "" for the building machine's processor.
        environment: of prebuilt kernels, a digest of everything else that the binaries depend on; else "".
    """

    kernel: str = ""
    place: str = ""
    target: str = ""
    dtype: str = ""
    shapes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    cpu: str = ""
    environment: str = ""


NOT_DESCRIBED = RequestedCall()
"""The call of a build that was started from Python."""


@dataclass(frozen=True)
class BuiltVariant(BuiltProgram):
    """A program for one kind of call on a target.

    Attributes:
        requested: the call that it was built for.
        target: e.g. ``sm_90a``.
        machine: for a CPU, its level or a digest of its instruction set; else "".
        passes: for calls that require gradients; None if there is no derivative.
    """

    requested: RequestedCall
    target: str
    machine: str
    structure: ResultStructure
    passes: BuiltPasses | None


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel with its programs.

    Attributes:
        model: the model whose calls run it, as named on the command line; such a kernel has no parameters, and only calls with
            ``FUSEGEN_BUNDLE_PATH`` take it. Else "".
    """

    name: str
    parameters: tuple[BuiltParameter, ...]
    variants: tuple[BuiltVariant, ...]
    model: str = ""

    @property
    def programs(self) -> tuple[BuiltProgram, ...]:
        passes = (program for variant in self.variants if variant.passes for program in variant.passes.programs)
        return (*self.variants, *passes)

    @property
    def files(self) -> dict[str, str]:
        """The files of binaries, each with its digest, and of source texts, each with ""."""
        codes = [code for program in self.programs for code in program.code]
        return {code.source: "" for code in codes} | {code.file: code.sha256 for code in codes}


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder. `fusegen` is the version that built it; kernels have unique names."""

    fusegen: str
    kernels: tuple[BuiltKernel, ...]


def place_of(file: Path, folder: Path) -> str:
    """Returns a digest of the path from a folder to a file. It tells files apart, and stays if both are moved together."""
    return digest(os.fsencode(os.path.relpath(file.resolve(), folder.resolve())))[:16]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest_text(manifest: Manifest) -> str:
    """Returns the file's text, which contains its own digest."""
    content = encode(manifest, Manifest)
    return json.dumps({"format": FORMAT, "sha256": digest(_canonical(content)), "content": content}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder.

    Raises:
        BundleError: it is missing, was changed, has another format, or names a file outside of the folder.
    """
    with without_garbage_collection():  # it would visit the growing manifest again and again
        return _read(folder / NAME)


def _read(path: Path) -> Manifest:
    try:
        document = json.loads(read_regular(path))
    except OSError as error:
        what = f"no built kernels in {path.parent}: {NAME} cannot be read: {error.strerror}"
        raise BundleError(what, hint="give the folder that fusegen build --out wrote") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}", hint=REBUILD_HINT) from None
    try:
        return _decode_checked(document, path)
    except RecursionError:
        raise BundleError(f"{path} is nested too deeply", hint=REBUILD_HINT) from None


def _decode_checked(document: Any, path: Path) -> Manifest:
    if not isinstance(document, dict) or "format" not in document:
        raise BundleError(f"{path} is not a manifest of built kernels", hint="give the folder that fusegen build --out wrote")
    if document["format"] != FORMAT:
        what = f"{path} has format {str(document['format'])[:20]}, but this fusegen reads format {FORMAT}"
        raise BundleError(what, hint="build it again with this fusegen, or update fusegen")
    content = document.get("content")
    if document.get("sha256") != digest(_canonical(content)):
        raise BundleError(f"{path} was modified after the build: its hash differs", hint=REBUILD_HINT)
    manifest: Manifest = decode(content, Manifest, path.name)
    names = [kernel.name for kernel in manifest.kernels]
    if len(set(names)) < len(names):
        raise BundleError(f"{path} contains a kernel twice", hint=REBUILD_HINT)
    for kernel in manifest.kernels:
        for variant in kernel.variants:
            _check_variant(variant, f"{path}: {kernel.name} for {variant.target}")
        _check_files(kernel, path)
    return manifest


def _check_files(kernel: BuiltKernel, path: Path) -> None:
    """Rejects names of files that are outside of the folder, or the manifest's: builds into the folder may remove these files."""
    folder = path.parent.resolve()
    for file in kernel.files:
        try:
            resolved = (folder / file).resolve()
        except (ValueError, OSError, RuntimeError) as error:  # a null character, circular links
            raise BundleError(f"{path}: {file!r} is not a file name: {error}", hint=REBUILD_HINT) from None
        if not resolved.is_relative_to(folder) or ".." in Path(file).parts:
            raise BundleError(f"{path}: the file {file!r} is outside of the folder", hint=REBUILD_HINT)
        if resolved == folder / NAME:
            raise BundleError(f"{path}: the file {file!r} is the manifest itself", hint=REBUILD_HINT)


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _check_program(program: BuiltProgram, where: str) -> None:
    """Rejects unknown functions and launches without a binary, which the binaries' marks do not cover."""
    for numbers in (program.call.scalars, program.signature.conditions):
        for line in numbers.lines:
            if isinstance(line, Operation) and arity(line.name) != len(line.operands):
                raise BundleError(f"{where}: unknown operation {line.name!r} of {len(line.operands)} numbers", hint=REBUILD_HINT)
    for step in program.call.steps:
        if isinstance(step, LibraryCall) and step.function not in FUNCTIONS:
            raise BundleError(f"{where}: unknown function {step.function!r}", hint=REBUILD_HINT)
    if len(program.code) != len(program.call.launches):
        raise BundleError(f"{where}: {len(program.code)} binaries for {len(program.call.launches)} launches", hint=REBUILD_HINT)


def _check_variant(variant: BuiltVariant, where: str) -> None:
    for program in (variant, *(variant.passes.programs if variant.passes else ())):
        _check_program(program, where)
    try:
        builder(variant.structure)
    except ValueError as error:
        raise BundleError(f"{where}: {error}", hint=REBUILD_HINT) from None


# A binary ends with a mark: the digest of its program in the manifest. So an edited manifest cannot pass arguments to a binary in
# another order than it expects, which would crash the process.


AnyProgram = TypeVar("AnyProgram", bound=BuiltProgram)


def mark_of(parameters: Sequence[BuiltParameter], variant: BuiltVariant) -> bytes:
    """Returns the mark of a program's binaries: a digest of the program without file names and digests."""
    passes = None if variant.passes is None else _passes_without_files(variant.passes)
    content = encode(BuiltKernel("", tuple(parameters), (replace(_without_files(variant), passes=passes),)), BuiltKernel)
    return _digest(content)


def passes_mark_of(parameters: Sequence[BuiltParameter], machine: str, passes: BuiltPasses) -> bytes:
    """Returns the mark of the binaries of passes, a digest like that of `mark_of`."""
    kernel = encode(BuiltKernel("", tuple(parameters), ()), BuiltKernel)
    return _digest([kernel, machine, encode(_passes_without_files(passes), BuiltPasses)])


def _without_files(program: AnyProgram) -> AnyProgram:
    return replace(program, code=tuple(replace(each, file="", sha256="", source="") for each in program.code))


def _passes_without_files(passes: BuiltPasses) -> BuiltPasses:
    forward, backward = (tuple(map(_without_files, programs)) for programs in (passes.forward, passes.backward))
    return replace(passes, forward=forward, backward=backward)


def _digest(content: object) -> bytes:
    return digest(json.dumps(content, sort_keys=True).encode()).encode()


def binary(folder: Path, code: KernelBinary, mark: bytes) -> bytes:
    """Reads and checks a kernel's binary.

    Raises:
        BundleError: it is missing, was changed, or belongs to another call.
    """
    path = folder / code.file
    try:
        content = read_regular(path)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}", hint=REBUILD_HINT) from None
    if digest(content) != code.sha256:
        raise BundleError(f"{path} was modified after the build: its hash differs", hint=REBUILD_HINT)
    if not content.endswith(mark):
        raise BundleError(f"{path} was compiled for another call than that of {NAME}", hint=REBUILD_HINT)
    return content.removesuffix(mark)
