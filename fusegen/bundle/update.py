"""A folder that kernels are built into: a new one, or one of built kernels, which gets more."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fusegen.bundle.build import merged
from fusegen.bundle.manifest import (
    NAME,
    AnyProgram,
    BuiltKernel,
    BuiltVariant,
    Manifest,
    StoredKernel,
    digest,
    manifest_text,
    read_kernels,
    stored,
)
from fusegen.bundle.programs import cache_writes, locked, new_folder, temporary_folder, write
from fusegen.errors import BundleError
from fusegen.files import read_regular, write_atomically


@dataclass(frozen=True)
class OpenFolder:
    """A folder that is built into. `finish` changes it.

    Attributes:
        folder: the requested folder.
        unfinished: a folder for new files.
        known: its manifest so far; None for a new folder.
        kernels: its kernels so far, by name.
    """

    folder: Path
    unfinished: Path
    known: Manifest | None
    kernels: Mapping[str, StoredKernel]

    @property
    def tag(self) -> str:
        """Part of new files' names that no earlier build into the folder had, so that no file is replaced."""
        return "" if self.known is None else f"{digest(manifest_text(self.known).encode())[:8]}-"

    def is_whole(self, kernel: StoredKernel | BuiltKernel) -> bool:
        """True if the binaries of a kernel are undamaged."""
        files = kernel.files
        try:
            return all(digest(read_regular(self.folder / file)) == known for file, known in files.items() if known)
        except OSError:
            return False

    def finish(self, built: Iterable[BuiltKernel], version: str, *, models: Container[str] = ()) -> tuple[StoredKernel, ...]:
        """Replaces kernels of the folder, or adds new ones, whose binaries were written. Files that nothing names any more are
        removed. Returns all kernels of the folder.

        Args:
            models: models whose other kernels are removed.
        """
        parts = list(built)
        new = {kernel.name: stored(self._with_known_files(kernel)) for kernel in merged(parts)}
        kept = {name: kernel for name, kernel in self.kernels.items() if kernel.file.model not in models}
        kernels = tuple({**kept, **new}.values())
        manifest = Manifest(version, tuple(kernel.file for kernel in kernels))
        used = {file for kernel in kernels for file in kernel.files}
        known = {file for kernel in self.kernels.values() for file in kernel.files}
        unused = known.union(*(kernel.files for kernel in parts)) - used
        for kernel in new.values():
            write(self.unfinished / kernel.file.file, kernel.text)
        if self.known is None:
            write(self.unfinished / NAME, manifest_text(manifest).encode())
            _remove(self.unfinished, unused)
        elif manifest != self.known:
            with cache_writes(self.folder):
                self._replace(manifest, used)
            _remove(self.folder, unused)
        return kernels

    def _with_known_files(self, kernel: BuiltKernel) -> BuiltKernel:
        """Returns a kernel with the folder's files in place of new ones with the same contents."""
        if kernel.name not in self.kernels:
            return kernel
        known = self.kernels[kernel.name].kernel
        whole = {_without_paths(v): v for v in known.variants if self.is_whole(replace(known, variants=(v,)))}
        return replace(kernel, variants=tuple(whole.get(_without_paths(v), v) for v in kernel.variants))

    def _replace(self, manifest: Manifest, used: Iterable[str]) -> None:
        """Moves new files into the folder, which does not name them yet, then replaces its manifest atomically."""
        for file in used:
            if (new := self.unfinished / file).exists():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                new.replace(self.folder / file)
        write_atomically(self.folder / NAME, manifest_text(manifest).encode())


@contextmanager
def open_folder(folder: Path) -> Iterator[OpenFolder]:
    """Yields a folder to build into.

    Raises:
        BundleError: it exists and contains no kernels built by this fusegen, another process builds into it, or it cannot be
            written.
    """
    if not folder.exists():
        with new_folder(folder) as unfinished:
            yield OpenFolder(folder, unfinished, None, {})
        return
    with locked(folder):
        try:
            known, kernels = read_kernels(folder)
        except BundleError as error:
            what = f"{folder} exists already, and nothing can be added: {error.what}"
            raise BundleError(what, hint="remove it, or build into another folder") from None
        with temporary_folder(folder) as unfinished:
            yield OpenFolder(folder, unfinished, known, {kernel.file.name: kernel for kernel in kernels})


def _without_paths(variant: BuiltVariant) -> BuiltVariant:
    passes = variant.passes
    if passes is not None:
        forward, backward = (tuple(map(_program_without_paths, some)) for some in (passes.forward, passes.backward))
        passes = replace(passes, forward=forward, backward=backward)
    return replace(_program_without_paths(variant), passes=passes)


def _program_without_paths(program: AnyProgram) -> AnyProgram:
    return replace(program, code=tuple(replace(code, file="", source="") for code in program.code))


def _remove(folder: Path, files: Iterable[str]) -> None:
    """Removes files, and their folders if these become empty."""
    for file in files:
        path = folder / file
        with suppress(OSError):  # the folder may be in use elsewhere; nothing names the file any more
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            path.parent.parent.rmdir()
