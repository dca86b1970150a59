"""Units to shared libraries by `torch.utils.cpp_extension` and ninja, kept by content.

Each build is a process of its own in a folder of its own: one that is killed leaves no lock that others wait for, and no half of a
library. What is finished takes its place in the cache in one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fusegen.errors import CompileError, ToolNotFoundError
from fusegen.files import is_whole, sealed, write_atomically, writing_to
from fusegen.jit.host import find_compiler
from fusegen.jit.process import Done, run
from fusegen.settings import cache_folder, settings

_SECONDS = 600
# With -P, for "-c" puts the current folder first, where a json.py of the user's may lie.
_BUILDER = """
import json, os, signal, sys, threading

def end_with_parent():
    os.read(0, 1)  # returns when the parent has ended, in whatever way
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]), verbose=True)
"""


@dataclass(frozen=True)
class Texts:
    """Texts that become a library.

    Attributes:
        name: what it is for, in messages.
        files: C++ texts by file name.
        flags: of the compiler.
    """

    name: str
    files: Mapping[str, str]
    flags: tuple[str, ...]


def library_of(texts: Texts) -> Path:
    """The path of a library, which is built unless it was before.

    Raises:
        ToolNotFoundError: there is no C++ compiler, or no ninja.
        CompileError: the compiler refused the text, or took too long; holds all of its output.
        SettingsError: the cache cannot be written to.
    """
    folder = cache_folder("extension")
    library = folder / f"{key_of(texts)}.so"
    if not is_whole(library):
        print(f"fusegen: building the extension of {texts.name} (torch's headers take a while) …", file=sys.stderr, flush=True)
        with writing_to(folder), tempfile.TemporaryDirectory(dir=folder, prefix="building-", ignore_cleanup_errors=True) as place:
            content = built(texts, Path(place))
            write_atomically(library.with_suffix(".cpp"), next(iter(texts.files.values())).encode())
            write_atomically(library, sealed(content))
    return library


def built(texts: Texts, folder: Path) -> bytes:
    """Builds a library in a folder.

    Raises:
        As `library_of`.
    """
    for name, text in texts.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    request = {
        "name": "extension",
        "sources": [str(folder / name) for name in texts.files if name.endswith(".cpp")],
        "extra_cflags": list(texts.flags),
        "extra_ldflags": ["-fopenmp"],
        "build_directory": str(folder),
        "is_python_module": False,
        "with_cuda": False,
    }
    done = run([sys.executable, "-P", "-c", _BUILDER, json.dumps(request)], _SECONDS, _variables(folder))
    library = folder / "extension.so"
    if done.code != 0 or not library.is_file():
        raise _refused(texts.name, done)
    return library.read_bytes()


def _variables(folder: Path) -> dict[str, str]:
    """The environment of a build: our compiler, our ninja, and no other one's settings."""
    try:
        import ninja  # a package that holds a program; here: nothing else needs it
    except ImportError as error:
        raise ToolNotFoundError(f"ninja cannot be used: {error}", mend="pip install ninja") from error
    path = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    command = find_compiler(settings().cxx).command
    return {"PATH": path, "CXX": " ".join(command), "TMPDIR": str(folder), "TORCH_EXTENSIONS_DIR": str(folder)}


def _refused(name: str, done: Done) -> CompileError | ToolNotFoundError:
    if done.code is None:
        return CompileError(f"the extension of {name} was not built in {_SECONDS} s", mend="build it on a machine with less to do")
    what = f"the extension of {name} was not built: torch's builder {done.manner}\n{done.output.strip()}"
    return CompileError(what, mend="see fusegen doctor; if the compiler works, report it with this text")


def key_of(texts: Texts) -> str:
    """The name of a library: a digest of its texts, the compiler and torch."""
    compiler = find_compiler(settings().cxx)
    parts = (*texts.files, *texts.files.values(), *texts.flags, *compiler.command, compiler.version, torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
