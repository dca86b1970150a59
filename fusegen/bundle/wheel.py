"""Wheels: Python packages around built kernels, for ``pip install``."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import keyword
import logging
import os
import re
import secrets
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from fusegen.bundle.cpp import BuiltExtension
from fusegen.bundle.programs import cache_writes
from fusegen.errors import ArgumentError, BundleError
from fusegen.files import read_regular

_VERSION = re.compile(
    r"([1-9]\d*!)?(0|[1-9]\d*)(\.(0|[1-9]\d*))*((a|b|rc)(0|[1-9]\d*))?(\.post(0|[1-9]\d*))?(\.dev(0|[1-9]\d*))?"
    r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?",
    re.ASCII,
)
"""Versions in the normal form of PEP 440, so that file names and metadata need no conversion."""

_GENERATOR = "Generator: fusegen"


@dataclass(frozen=True)
class PackageSpec:
    """The package in a wheel.

    Attributes:
        name: name of the package and of its distribution.
        docs: the kernels' docstrings, by name.
        models: the models whose calls take its kernels.
    """

    name: str
    version: str
    docs: Mapping[str, str]
    models: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `ArgumentError` if a name or the version is invalid, or if the package would hide another one."""
        if keyword.iskeyword(self.name):
            raise ArgumentError(f"the package name {self.name!r} is a keyword of Python", hint="give another name by --library")
        if not re.fullmatch(r"[A-Za-z](\w*[A-Za-z0-9])?", self.name, re.ASCII):
            what = f"the package name {self.name!r} is not an identifier of ASCII letters, digits and _ that starts with a letter"
            raise ArgumentError(f"{what} and does not end with _", hint="give a name such as mylib by --library")
        if owner := _owner(self.name):
            raise ArgumentError(f"a package {self.name} would hide {owner}", hint="give another name by --library")
        if not _VERSION.fullmatch(self.version):
            what = f"the version {self.version!r} is not in the normal form of PEP 440"
            raise ArgumentError(what, hint="give a version such as 1.2.0, 1.2.0rc1, 1.2.0.post1 or 1.2.0.dev3 by --version")
        require_names(self.name, self.docs)


def require_names(package: str, kernels: Iterable[str]) -> None:
    """Raises `ArgumentError` if a module cannot have a kernel's name."""
    for kernel in kernels:
        if not kernel.isidentifier() or keyword.iskeyword(kernel) or kernel.startswith("_"):
            what = f"{kernel!r} cannot be a name in the package {package}: it is no identifier, a keyword, or starts with _"
            raise ArgumentError(what, hint="rename the kernel")


def _owner(name: str) -> str | None:
    """Returns the module or the installed distribution, other than a wheel of fusegen, that has a name in any case."""
    modules = {module.lower(): module for module in (*sys.stdlib_module_names, "fusegen", "torch")}
    if name.lower() in modules:
        return f"the module {modules[name.lower()]}"
    installed = {module.lower(): owners for module, owners in packages_distributions().items()}
    for owner in (name, *installed.get(name.lower(), ())):
        with suppress(PackageNotFoundError):
            found = distribution(owner)
            if _GENERATOR not in (found.read_text("WHEEL") or ""):
                return f"the installed package {found.name}"
    return None


@dataclass(frozen=True)
class Wheel:
    """A wheel.

    Attributes:
        file: its file name.
        requires: the required distributions.
        warning: the reason why PyPI would refuse its tag, and a hint; "" if it would not.
    """

    file: str
    requires: tuple[str, ...]
    content: bytes
    warning: str = ""


def wheel_of_bundle(package: PackageSpec, folder: Path, version: str) -> Wheel:
    """Returns a wheel of a folder of built kernels, which `fusegen.load` reads when the package is imported.

    Args:
        version: version of fusegen. Only releases with the same first two numbers read the folder's format. Calls of models take
            only kernels that the same versions of all packages built.
    """
    models = f", also for calls of models that fusegen.patch patches: {', '.join(package.models)}" if package.models else ""
    lines = [
        f"{f'Kernels built by fusegen{models}.'!r}\n",
        "from pathlib import Path as _Path\n",
        "from fusegen import load as _load\n",
        *_head(package, package.docs),
        '_built = _load(_Path(__file__).parent / "_kernels")\n',
    ]
    for kernel, doc in package.docs.items():
        lines += [f'{kernel} = _built["{kernel}"]', f"{kernel}.__doc__ = {doc!r}"]
    requires: tuple[str, ...] = (f"fusegen~={version.partition('+')[0]}", "torch")
    python = ">=3.11"
    if package.models:
        versions = {"fusegen": version} | {name: distribution(name).version for name in ("torch", "sympy", "jinja2")}
        requires = tuple(f"{name}=={known.partition('+')[0]}" for name, known in versions.items())
        python = f"=={sys.version_info.major}.{sys.version_info.minor}.*"
    return _wheel(package, _contents(package, lines, folder, "_kernels"), requires, python)


def wheel_of_extension(package: PackageSpec, folder: Path, built: BuiltExtension) -> Wheel:
    """Returns a wheel of a folder with a built library, which torch loads when the package is imported."""
    torch = ".".join(built.requires.split(".")[:2])
    needed = f"{package.name} {package.version} needs torch {torch}"
    docs = {schema.partition("(")[0]: schema for schema in built.schemas}
    lines = [
        '"""Operators of torch built by fusegen."""\n',
        *IMPORTS,
        *_head(package, docs),
        f'if not _torch.__version__.startswith("{torch}."):',
        f'    raise ImportError(f"{needed}, not {{_torch.__version__}}")\n',
        *loading_lines(f"_operators/{built.library}", package.name, is_checked=bool(built.cpu)),
        "",
    ]
    lines += operator_lines(package.name, docs, package.docs)
    return _wheel(package, _contents(package, lines, folder, "_operators"), (f"torch=={torch}.*",), ">=3.10")


IMPORTS = ("import ctypes as _ctypes", "from pathlib import Path as _Path\n", "import torch as _torch\n")
"""Imports of modules that load a library."""


def loading_lines(library: str, name: str, *, is_checked: bool) -> Iterator[str]:
    """Yields the lines of a module that load a library.

    Args:
        library: its path beside the module.
        name: the name of the package.
        is_checked: whether the library has CPU kernels, so that it may refuse this processor.
    """
    yield f'_library = str(_Path(__file__).parent / "{library}")'
    yield "_torch.ops.load_library(_library)"
    if is_checked:
        yield "_refusal = _ctypes.CDLL(_library).fg_refusal"
        yield "_refusal.restype = _ctypes.c_char_p"
        yield "if _refusal():"
        yield f'    raise ImportError("{name}: " + _refusal().decode())'


def operator_lines(namespace: str, schemas: Mapping[str, str], docs: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of a module that has a library's operators, with docstrings: their schemas, then their kernels'."""
    for operator, schema in schemas.items():
        doc = "\n\n".join(filter(None, (schema, docs.get(operator))))
        yield f"{operator} = _torch.ops.{namespace}.{operator}"
        yield f"{operator}.__doc__ = {doc!r}"


def _head(package: PackageSpec, kernels: Iterable[str]) -> list[str]:
    names = ", ".join(f'"{kernel}"' for kernel in kernels)
    return [f"__all__ = [{names}]", f'__version__ = "{package.version}"\n']


def _contents(package: PackageSpec, lines: Iterable[str], folder: Path, subfolder: str) -> dict[str, bytes]:
    """Returns the files of the package, by path: its module, and those of a built folder."""
    built = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files = {f"{package.name}/{subfolder}/{name}": content for name, content in built.items()}
    return {f"{package.name}/__init__.py": "\n".join([*lines, ""]).encode()} | dict(sorted(files.items()))


def _wheel(package: PackageSpec, files: Mapping[str, bytes], requires: tuple[str, ...], python: str) -> Wheel:
    is_native = any(path.endswith(".so") for path in files)
    platform = re.sub(r"\W", "_", sysconfig.get_platform()) if is_native else "any"
    wheel = _tagged(package, files, requires, python, platform)
    if not is_native:
        return wheel
    portable, warning = _portable_platform(wheel, platform)
    return replace(_tagged(package, files, requires, python, portable), warning=warning)


_OF_TORCH = frozenset(("libtorch*.so", "libc10*.so", "libgomp.so.1"))
"""Libraries that torch's wheels contain."""


def _portable_platform(wheel: Wheel, platform: str) -> tuple[str, str]:
    """Returns the tag of all systems that have the C and C++ libraries of a wheel, and "", or `platform` and a warning."""
    refused = f"PyPI does not accept the tag {platform}"
    try:
        from auditwheel.error import AuditwheelError  # a package for builds alone
        from auditwheel.libc import Libc
        from auditwheel.wheel_abi import analyze_wheel_abi
    except ImportError:
        return platform, f"{refused}; pip install auditwheel, then build again for a manylinux tag"
    logging.getLogger(analyze_wheel_abi.__module__).setLevel(logging.ERROR)  # it would warn that it ignores cubins
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, wheel.file)
        path.write_bytes(wheel.content)
        try:
            found = analyze_wheel_abi(Libc.detect(), None, path, _OF_TORCH, disable_isa_ext_check=True, allow_graft=False)
        except AuditwheelError as error:
            return platform, f"{refused}; auditwheel: {error}"
    tag: str = found.overall_policy.name
    return tag, f"{refused}; this system is newer than all manylinux tags that auditwheel has" if tag == platform else ""


def _tagged(package: PackageSpec, files: Mapping[str, bytes], requires: tuple[str, ...], python: str, platform: str) -> Wheel:
    stem = f"{re.sub('_+', '_', package.name).lower()}-{package.version}"
    tag, is_pure = f"py3-none-{platform}", platform == "any"
    wheel = ["Wheel-Version: 1.0", _GENERATOR, f"Root-Is-Purelib: {'true' if is_pure else 'false'}", f"Tag: {tag}", ""]
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {package.name}",
        f"Version: {package.version}",
        "Summary: Kernels built by fusegen",
        f"Requires-Python: {python}",
        *(f"Requires-Dist: {requirement}" for requirement in requires),
        "",
    ]
    info = f"{stem}.dist-info"
    described = {f"{info}/METADATA": "\n".join(metadata).encode(), f"{info}/WHEEL": "\n".join(wheel).encode()}
    return Wheel(f"{stem}-{tag}.whl", requires, _archive({**files, **described}, f"{info}/RECORD"))


def _archive(files: Mapping[str, bytes], record: str) -> bytes:
    """Returns a zip file whose bytes depend only on the files, with a record of their digests."""
    digests = io.StringIO()
    rows = csv.writer(digests, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(content)])
    rows.writerow([record, "", ""])
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for path, content in {**files, record: digests.getvalue().encode()}.items():
            entry = zipfile.ZipInfo(path)  # its time is the first that a zip file can have
            entry.create_system, entry.external_attr = 3, 0o100644 << 16  # Unix, on every system
            file.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def store(wheel: Wheel, folder: Path) -> Path:
    """Writes a wheel into a folder, atomically, and returns its path.

    Raises:
        BundleError: a file of its name has other contents, or the folder cannot be written.
    """
    path = folder / wheel.file
    unfinished = folder / f".{wheel.file}-{secrets.token_hex(8)}"
    with cache_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(wheel.content)
            os.link(unfinished, path)  # unlike a rename, it replaces no file, not even one of a build at the same time
        except FileExistsError:
            _require_equal(path, wheel.content)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def _require_equal(path: Path, content: bytes) -> None:
    with suppress(OSError):  # it is no file, or cannot be read
        if read_regular(path) == content:
            return
    raise BundleError(f"{path} exists already, with other contents", hint="give another --version, or remove it")
