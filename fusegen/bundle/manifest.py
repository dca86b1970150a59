"""The manifest of a folder of built kernels, and one file for each kernel: its programs, as data. Equal parts are one line."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fusegen.errors import BundleError
from fusegen.files import read_regular
from fusegen.lazy import dataclass
from fusegen.program.call import LaunchPlan, LibraryCall
from fusegen.program.codec import Deferred, Line, Lines, Shared, decode, encode, encoded_fields, read_all
from fusegen.program.formula import Relation
from fusegen.program.names import ascii_name
from fusegen.program.renaming import GraphNames
from fusegen.program.signature import Constant, ResultStructure, Signature, Wiring, builder
from fusegen.runtime.library import FUNCTIONS
from fusegen.threads import cached_property, without_garbage_collection

NAME = "manifest.json"

FORMAT = 16
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
class BuiltProgram(Deferred):
    """A program: its assumptions about a call, its launch plan, and one binary per launch.

    Attributes:
        rows: relations that select between several applicable programs.
        graph: the digest that calls match (`SpecializationCache.graph_digest`).
        names: the names in the graph, which calls replace by their own.
    """

    signature: Shared[Signature]
    rows: tuple[Relation, ...]
    call: Shared[LaunchPlan]
    code: tuple[KernelBinary, ...]
    graph: str
    names: GraphNames


@dataclass(frozen=True)
class BuiltPasses(Deferred):
    """The passes of a kernel.

    Attributes:
        wiring: the connection of both passes.
        derivatives: for each result of the kernel, the inputs with respect to which it has a derivative.
        forward: programs of the forward pass.
        backward: programs of the backward pass.
    """

    wiring: Wiring
    derivatives: tuple[tuple[str, ...], ...]
    forward: tuple[Shared[BuiltProgram], ...]
    backward: tuple[Shared[BuiltProgram], ...]

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
    passes: Shared[BuiltPasses] | None


@dataclass(frozen=True)
class BuiltKernel(Deferred):
    """A kernel with its programs.

    Attributes:
        model: the model whose calls run it, as named on the command line; such a kernel has no parameters, and only calls of
            the patched model take it, in place of compilation. Else "".
    """

    name: str
    parameters: tuple[BuiltParameter, ...]
    variants: tuple[Shared[BuiltVariant], ...]
    model: str

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
    """Facts of a kernel for which its programs need not be read.

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


class StoredKernel:
    """A kernel as its file describes it. The lines of the file are the summary, the kernel, and the parts that it names.

    Args:
        text: contents of the file.
        where: the file, for messages.
    """

    def __init__(self, file: KernelFile, text: bytes, where: str) -> None:
        self.file, self.text, self.where = file, text, where
        self._first, _, rest = text.partition(b"\n")
        self._lines = Lines(rest.splitlines(), where)
        self._kernel = digest(rest.partition(b"\n")[0])

    @cached_property
    def summary(self) -> KernelSummary:
        """The summary. Raises `BundleError` if it is invalid."""
        summary: KernelSummary = _decoded(_parsed(self._first, self.where), KernelSummary, self.where)
        return summary

    @property
    def files(self) -> dict[str, str]:
        """Files as in `BuiltKernel`, and the kernel's own."""
        return dict(self.summary.files) | {self.file.file: self.file.sha256}

    @cached_property
    def deferred(self) -> BuiltKernel:
        """The kernel. Each part is decoded when it is first read, and may be invalid until then.

        Raises:
            BundleError: the file describes another kernel.
        """
        kernel: BuiltKernel = self._lines.read(BuiltKernel, self._kernel)
        if (kernel.name, kernel.model) != (self.file.name, self.file.model):
            raise BundleError(f"{self.where} describes the kernel {kernel.name}, not {self.file.name}", hint=REBUILD_HINT)
        return kernel

    @cached_property
    def kernel(self) -> BuiltKernel:
        """The kernel, decoded and checked as a whole.

        Raises:
            BundleError: it is invalid.
        """
        kernel = self.deferred
        if summary_of(kernel) != self.summary:
            raise self.other_summary
        for variant in kernel.variants:
            results_of(variant, self.where)
        for program in kernel.programs:
            check_program(program, f"{self.where}: {kernel.name}")
        return kernel

    def check(self, program: BuiltProgram) -> None:
        """Decodes and checks one of the kernel's programs.

        Raises:
            BundleError: it is invalid, or the summary lacks a file of it.
        """
        read_all(program)
        check_program(program, f"{self.where}: {self.file.name}")
        if not {(code.file, code.sha256) for code in program.code} <= {*self.summary.files}:
            raise self.other_summary

    @property
    def other_summary(self) -> BundleError:
        return BundleError(f"{self.where}: its summary is that of another kernel", hint=REBUILD_HINT)


def stored(kernel: BuiltKernel) -> StoredKernel:
    """Returns a kernel with the file that describes it, which is not written."""
    described = Line(encode(kernel, BuiltKernel))
    lines = [Line(encode(summary_of(kernel), KernelSummary)).text, described.text]
    text = b"\n".join([*lines, *(line for line in described.lines.values() if line != described.text), b""])
    file = f"{ascii_name(kernel.name)}/kernel-{digest(text)[:16]}.jsonl"
    return StoredKernel(KernelFile(kernel.name, file, digest(text), kernel.model), text, file)


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


def read_kernels(folder: Path) -> tuple[Manifest, list[StoredKernel]]:
    """Reads the manifest of a folder, and all its kernels with their summaries.

    Raises:
        BundleError: as for `read_manifest` and `read_kernel`, or a summary is invalid or names a file outside of the folder.
    """
    manifest = read_manifest(folder)
    kernels = [read_kernel(folder, file) for file in manifest.kernels]
    for kernel in kernels:
        _check_files((name for name, _ in kernel.summary.files), folder / NAME)
    return manifest, kernels


def read_kernel(folder: Path, file: KernelFile) -> StoredKernel:
    """Reads the file of a kernel.

    Raises:
        BundleError: it is missing or was changed.
    """
    path = folder / file.file
    text = _read_checked(path, file.sha256)
    if b"\n" not in text:
        raise BundleError(f"{path} does not describe a kernel", hint=REBUILD_HINT)
    return StoredKernel(file, text, str(path))


def _parsed(text: bytes, path: Path | str) -> Any:
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
    resolved_folder = cache(os.path.realpath)  # thousands of files are in few folders
    for file in files:
        try:
            parent, _, name = f"{folder}/{file}".rpartition("/") if not file.startswith("/") else file.rpartition("/")
            resolved = f"{resolved_folder(parent or '/')}/{name}"
            if name in ("", ".", "..") or _is_link(resolved):
                resolved = os.path.realpath(resolved)
        except (ValueError, OSError) as error:  # a null character
            raise BundleError(f"{path}: {file!r} is not a file name: {error}", hint=REBUILD_HINT) from None
        if os.path.commonpath((folder, resolved)) != folder or ".." in file.split("/"):
            raise BundleError(f"{path}: the file {file!r} is outside of the folder", hint=REBUILD_HINT)
        if resolved == manifest:
            raise BundleError(f"{path}: the file {file!r} is the manifest itself", hint=REBUILD_HINT)


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def check_program(program: BuiltProgram, where: str) -> None:
    """Rejects unknown functions and launches without a binary, which the binaries' marks do not cover."""
    for step in program.call.steps:
        if isinstance(step, LibraryCall) and step.function not in FUNCTIONS:
            raise BundleError(f"{where}: unknown function {step.function!r}", hint=REBUILD_HINT)
    if len(program.code) != len(program.call.launches):
        raise BundleError(f"{where}: {len(program.code)} binaries for {len(program.call.launches)} launches", hint=REBUILD_HINT)


def results_of(variant: BuiltVariant, where: str) -> Callable[[list[Any]], Any] | None:
    """Returns a function that builds a variant's results from their tensors, or None if the result is a tensor."""
    try:
        return builder(variant.structure)
    except ValueError as error:
        raise BundleError(f"{where}: {error}", hint=REBUILD_HINT) from None


# A binary ends with a mark: the digest of its program in the manifest. So an edited manifest cannot pass arguments to a binary in
# another order than it expects, which would crash the process.


AnyProgram = TypeVar("AnyProgram", bound=BuiltProgram)


def mark_of(parameters: Sequence[BuiltParameter], variant: BuiltVariant) -> bytes:
    """Returns the mark of a program's binaries: a digest of the program without file names and digests, and of its passes' mark."""
    passes = None if variant.passes is None else passes_mark_of(parameters, variant.machine, variant.passes).decode()
    return _mark(parameters, _without_files(variant) | {"passes": passes})


def passes_mark_of(parameters: Sequence[BuiltParameter], machine: str, passes: BuiltPasses) -> bytes:
    """Returns the mark of the binaries of passes, a digest like that of `mark_of`."""
    forward, backward = ([_without_files(program) for program in programs] for programs in (passes.forward, passes.backward))
    return _mark(parameters, [machine, encoded_fields(passes) | {"forward": forward, "backward": backward}])


def _without_files(program: BuiltProgram) -> dict[str, Any]:
    """Returns a program as JSON, with its entries in place of its binaries."""
    encoded = encoded_fields(program)
    return encoded | {"code": [code.entry for code in program.code]}


def _mark(parameters: Sequence[BuiltParameter], content: object) -> bytes:
    return digest(_canonical([encode(tuple(parameters), tuple[BuiltParameter, ...]), content])).encode()


def binary(folder: Path, code: KernelBinary, mark: bytes) -> bytes:
    """Reads and checks a kernel's binary.

    Raises:
        BundleError: it is missing, was changed, is outside of the folder, or belongs to another call.
    """
    _check_files((code.file,), folder / NAME)
    path = folder / code.file
    content = _read_checked(path, code.sha256)
    if not content.endswith(mark):
        raise BundleError(f"{path} was compiled for another call than that of {NAME}", hint=REBUILD_HINT)
    return content.removesuffix(mark)
