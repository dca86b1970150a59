"""The manifest of a folder of built kernels, and one file for each kernel: its programs, as data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
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
from fusegen.schedule.names import ascii_name
from fusegen.threads import cached_property, without_garbage_collection

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
        model: the model whose calls run it, as named on the command line; such a kernel has no parameters, and only calls of
            the patched model take it, in place of compilation. Else "".
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
class KernelSummary:
    """Facts of a kernel for which its programs need not be decoded.

    Attributes:
        calls: the calls that it was built for.
        graphs: digests of its programs' graphs.
        files: as in `BuiltKernel`.
    """

    name: str
    calls: tuple[RequestedCall, ...]
    graphs: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def summary_of(kernel: BuiltKernel) -> KernelSummary:
    calls = dict.fromkeys(variant.requested for variant in kernel.variants)
    graphs = dict.fromkeys(program.graph for program in kernel.programs)
    return KernelSummary(kernel.name, tuple(calls), tuple(graphs), tuple(kernel.files.items()))


@dataclass(frozen=True)
class KernelFile:
    """The file that describes a kernel.

    Attributes:
        name: the kernel's name.
        file: path in the folder, unique for the contents.
        sha256: digest of the file.
        model: as in `BuiltKernel`.
    """

    name: str
    file: str
    sha256: str
    model: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder. `fusegen` is the version that built it; kernels have unique names."""

    fusegen: str
    kernels: tuple[KernelFile, ...]


@dataclass(frozen=True, eq=False)
class StoredKernel:
    """A kernel as its file describes it. Its programs are decoded when they are needed.

    Attributes:
        text: contents of the file.
        encoded: the kernel as JSON.
        where: the file, for messages.
    """

    file: KernelFile
    text: bytes
    summary: KernelSummary
    encoded: Any
    where: str

    @property
    def files(self) -> dict[str, str]:
        """Files as in `BuiltKernel`, and the kernel's own."""
        return dict(self.summary.files) | {self.file.file: self.file.sha256}

    @cached_property
    def kernel(self) -> BuiltKernel:
        """The decoded kernel.

        Raises:
            BundleError: it is invalid.
        """
        kernel: BuiltKernel = _decoded(self.encoded, BuiltKernel, self.where)
        if summary_of(kernel) != self.summary or kernel.model != self.file.model:
            raise BundleError(f"{self.where}: its summary is that of another kernel", hint=REBUILD_HINT)
        for variant in kernel.variants:
            _check_variant(variant, f"{self.where}: {kernel.name} for {variant.target}")
        return kernel


def stored(kernel: BuiltKernel) -> StoredKernel:
    """Returns a kernel with the file that describes it, which is not written."""
    summary, encoded = summary_of(kernel), encode(kernel, BuiltKernel)
    text = _canonical({"summary": encode(summary, KernelSummary), "kernel": encoded})
    file = f"{ascii_name(kernel.name)}/kernel-{digest(text)[:16]}.json"
    return StoredKernel(KernelFile(kernel.name, file, digest(text), kernel.model), text, summary, encoded, file)


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
    path = folder / NAME
    try:
        document = _parsed(read_regular(path), path)
    except OSError as error:
        what = f"no built kernels in {folder}: {NAME} cannot be read: {error.strerror}"
        raise BundleError(what, hint="give the folder that fusegen build --out wrote") from None
    if not isinstance(document, dict) or "format" not in document:
        raise BundleError(f"{path} is not a manifest of built kernels", hint="give the folder that fusegen build --out wrote")
    if document["format"] != FORMAT:
        what = f"{path} has format {str(document['format'])[:20]}, but this fusegen reads format {FORMAT}"
        raise BundleError(what, hint="build it again with this fusegen, or update fusegen")
    content = document.get("content")
    if document.get("sha256") != digest(_canonical(content)):
        raise _changed(path)
    manifest: Manifest = _decoded(content, Manifest, NAME)
    names = [kernel.name for kernel in manifest.kernels]
    if len(set(names)) < len(names):
        raise BundleError(f"{path} contains a kernel twice", hint=REBUILD_HINT)
    _check_files((kernel.file for kernel in manifest.kernels), path)
    return manifest


def read_kernel(folder: Path, file: KernelFile) -> StoredKernel:
    """Reads the file of a kernel.

    Raises:
        BundleError: it is missing, was changed, or names a file outside of the folder.
    """
    path = folder / file.file
    text = _read_checked(path, file.sha256)
    document = _parsed(text, path)
    if not isinstance(document, dict) or document.keys() != {"summary", "kernel"}:
        raise BundleError(f"{path} does not describe a kernel", hint=REBUILD_HINT)
    summary: KernelSummary = _decoded(document["summary"], KernelSummary, file.file)
    if summary.name != file.name:
        raise BundleError(f"{path} describes the kernel {summary.name}, not {file.name}", hint=REBUILD_HINT)
    _check_files((name for name, _ in summary.files), folder / NAME)
    return StoredKernel(file, text, summary, document["kernel"], str(path))


def _parsed(text: bytes, path: Path) -> Any:
    try:
        with without_garbage_collection():  # it would visit the growing document again and again
            return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}", hint=REBUILD_HINT) from None


def _decoded(encoded: Any, kind: Any, where: str) -> Any:
    try:
        with without_garbage_collection():
            return decode(encoded, kind, where)
    except RecursionError:
        raise BundleError(f"{where} is nested too deeply", hint=REBUILD_HINT) from None


def _read_checked(path: Path, sha256: str) -> bytes:
    try:
        content = read_regular(path)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}", hint=REBUILD_HINT) from None
    if digest(content) != sha256:
        raise _changed(path)
    return content


def _changed(path: Path) -> BundleError:
    return BundleError(f"{path} was modified after the build: its hash differs", hint=REBUILD_HINT)


def _check_files(files: Iterable[str], path: Path) -> None:
    """Rejects names of files that are outside of the folder, or the manifest's: builds into the folder may remove these files."""
    folder, manifest = os.path.realpath(path.parent), os.path.realpath(path.parent / NAME)
    for file in files:
        try:
            resolved = os.path.realpath(path.parent / file)  # faster than `Path.resolve`
        except (ValueError, OSError) as error:  # a null character
            raise BundleError(f"{path}: {file!r} is not a file name: {error}", hint=REBUILD_HINT) from None
        if os.path.commonpath((folder, resolved)) != folder or ".." in file.split("/"):
            raise BundleError(f"{path}: the file {file!r} is outside of the folder", hint=REBUILD_HINT)
        if resolved == manifest:
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
    content = _read_checked(path, code.sha256)
    if not content.endswith(mark):
        raise BundleError(f"{path} was compiled for another call than that of {NAME}", hint=REBUILD_HINT)
    return content.removesuffix(mark)
