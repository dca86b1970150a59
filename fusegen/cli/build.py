"""``fusegen build``: compiles kernels into a folder; `fusegen.load` calls them from there."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import fusegen
from fusegen.bundle.build import BuildRequest
from fusegen.bundle.cpp import build_extension, build_sources
from fusegen.bundle.kernels import describe_calls
from fusegen.bundle.manifest import BuiltVariant, Manifest, RequestedCall
from fusegen.bundle.update import open_folder
from fusegen.cli.arguments import add_inputs, chosen_target
from fusegen.cli.build_folder import FolderBuild, described, request_of
from fusegen.cli.load import NamedKernel, load_all
from fusegen.cli.terminal import Terminal, print_document
from fusegen.errors import ArgumentError
from fusegen.target import Target


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="NAME", nargs="+", help="a prebuilt fusion (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    parser.add_argument("--out", metavar="DIR", required=True, type=Path, help="the folder to create")
    arch_help = "targets, comma-separated or repeated: sm_80 … sm_120, cpu (default: this machine's GPU, else sm_90a)"
    format_help = (
        "bundle (for fusegen.load; the default), extension (a shared library of torch operators), or sources (CUDA, CMake)"
    )
    parser.add_argument("--format", choices=("bundle", "extension", "sources"), default="bundle", help=format_help)
    library_help = "name of the library; an extension's operators are torch.ops.NAME.… (default: the folder's name)"
    parser.add_argument("--library", metavar="NAME", help=library_help)
    parser.add_argument("--arch", metavar="TARGETS", action="append", help=arch_help)
    dtype_help = (
        "dtypes of tensors without one in --shape, one build each; comma-separated or repeated (default: a module's own, else "
        "bf16; f32 on a CPU)"
    )
    parser.add_argument("--dtype", metavar="DTYPES", action="append", help=dtype_help)
    add_inputs(parser)
    call_help = "argument shapes of one call to build for; may be repeated (x=1x4096:bf16,w=4096); --shape applies to all calls"
    parser.add_argument("--call", metavar="NAME=SIZES[:DTYPE],…", action="append", default=[], help=call_help)


def run_build(options: argparse.Namespace, terminal: Terminal) -> int:
    kernels = _kernels(options)
    targets = [chosen_target(name) for name in _words(options.arch)]
    calls = _calls(kernels, targets, options)
    if options.format == "extension":
        return _run_extension(calls, options, terminal)
    if options.format == "sources":
        return _run_sources(calls, options, terminal)
    if options.library:
        raise ArgumentError("--library applies only to --format extension and sources", hint="add --format extension")
    with open_folder(options.out) as folder:
        build = FolderBuild(folder, {name: kernel.name for name, kernel in kernels.items()}, terminal)
        manifest = folder.finish(build.kernels(calls), fusegen.__version__)
    if options.json:
        print_document(terminal, "build", folder=str(options.out), kernels=_facts(manifest))
    else:
        _print(terminal, manifest, options.out)
    return 0


def _run_extension(calls: Sequence[RequestedCall], options: argparse.Namespace, terminal: Terminal) -> int:
    library = options.library or options.out.name
    shipped = build_extension(options.out, _requests(calls, terminal), library, fusegen.__version__)
    terminal.progress()
    if options.json:
        facts = {"library": shipped.library, "torch": shipped.requires, "schemas": list(shipped.schemas)}
        print_document(terminal, "build", folder=str(options.out), **facts)
        return 0
    for schema in shipped.schemas:
        terminal.line(f"torch.ops.{library}.{schema}")
    path = str(options.out / shipped.library)
    terminal.line(f"torch.ops.load_library({path!r}) loads them, with torch {shipped.requires}; fusegen is not needed")
    return 0


def _run_sources(calls: Sequence[RequestedCall], options: argparse.Namespace, terminal: Terminal) -> int:
    library = options.library or options.out.name
    names = build_sources(options.out, _requests(calls, terminal), library)
    terminal.progress()
    if options.json:
        print_document(terminal, "build", folder=str(options.out), library=library, functions=list(names))
        return 0
    for name in names:
        terminal.line(f"{name}: {name}.h, {name}.cu")
    terminal.line(f"CMake builds {library} from these files; nvcc also compiles each file alone")
    return 0


def _words(texts: Sequence[str] | None) -> list[str | None]:
    return [None] if texts is None else list(dict.fromkeys(word.strip() for text in texts for word in text.split(",")))


def _kernels(options: argparse.Namespace) -> dict[str, NamedKernel]:
    """Loads the kernels that the options name.

    Raises:
        ArgumentError: two have the same name, or shapes are given for several kernels.
    """
    kernels = load_all(options.kernel, options)
    names = [kernel.name for kernel in kernels.values()]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"two kernels have the name {duplicates[0]}", hint="build them into two folders")
    return kernels


def _calls(names: Iterable[str], targets: Sequence[Target], options: argparse.Namespace) -> list[RequestedCall]:
    calls = product(names, targets, _words(options.dtype), options.call or [None])
    return [
        RequestedCall(name, target.name, dtype or "", (*options.shape, *(call.split(",") if call else ())), tuple(options.arg))
        for name, target, dtype, call in calls
    ]


def _requests(calls: Iterable[RequestedCall], terminal: Terminal) -> Iterator[BuildRequest]:
    modules: dict[str, ModuleType] = {}
    for call in calls:
        terminal.progress(f"building {described(call)} …")
        yield request_of(call, modules)


def _print(terminal: Terminal, manifest: Manifest, folder: Path) -> None:
    for kernel in manifest.kernels:
        terminal.title(kernel.name)
        names = [parameter.name for parameter in kernel.parameters]
        for variant in kernel.variants:
            rows = ", ".join(map(str, variant.signature.rows))
            target = f"{variant.target}{f', {rows}' if rows else ''}, {variant.call.summary}"
            terminal.line(f"{target}: {describe_calls(variant.signature, names)}")
    terminal.line(f"kernels = fusegen.load({str(folder)!r}) loads them")


def _facts(manifest: Manifest) -> list[dict[str, object]]:
    return [
        {"name": kernel.name, "variants": [_fact(variant, [p.name for p in kernel.parameters]) for variant in kernel.variants]}
        for kernel in manifest.kernels
    ]


def _fact(variant: BuiltVariant, names: Sequence[str]) -> dict[str, object]:
    arguments = {name: str(argument) for name, argument in zip(names, variant.signature.arguments, strict=True)}
    files = sorted({file for code in variant.code for file in (code.file, code.source)})
    return {"target": variant.target, "arguments": arguments, "steps": len(variant.call.steps), "files": files}
