"""``fusegen build``: compiles kernels into a folder; `fusegen.load` calls them from there."""

from __future__ import annotations

import argparse
import inspect
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import fusegen
from fusegen.bundle import cpp
from fusegen.bundle.build import BuildRequest
from fusegen.bundle.hub import HubPackage, build_hub
from fusegen.bundle.kernels import describe_calls
from fusegen.bundle.manifest import BuiltKernel, BuiltVariant, Manifest, RequestedCall, StoredKernel
from fusegen.bundle.programs import temporary_folder
from fusegen.bundle.update import OpenFolder, open_folder
from fusegen.bundle.wheel import PackageSpec, store, wheel_of_bundle, wheel_of_extension
from fusegen.cli.arguments import add_calls, add_inputs, chosen_target, shapes_of_calls
from fusegen.cli.build_folder import FolderBuild, described, portable_name, request_of
from fusegen.cli.build_model import BuiltModel, built_models, traced_model
from fusegen.cli.load import is_location, load
from fusegen.cli.project import FORMATS, project_license, project_version, with_project
from fusegen.cli.terminal import Terminal, print_document
from fusegen.errors import ArgumentError, BundleError, TargetError
from fusegen.files import read_regular
from fusegen.program.names import ascii_name
from fusegen.runtime.devices import LEVELS, X86
from fusegen.settings import settings
from fusegen.specs import SPECS, find
from fusegen.target import CPU, Backend, Target, from_capability

_WHEELS = ("wheel", "extension-wheel")


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="NAME", nargs="*", help="a prebuilt fusion (fusegen list), FILE.py:NAME, or pkg.mod:NAME")
    model_help = (
        "build kernels of a model that fusegen.patch patches, in a bundle or a wheel; may be repeated: a function that returns "
        "(model, args), or (model, args, kwargs), the model and the inputs of one call"
    )
    parser.add_argument("--model", metavar="FILE.py:FUNCTION", action="append", default=[], help=model_help)
    parser.add_argument("--all", action="store_true", help="build all prebuilt fusions, each with its default variant")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the folder to create, or to add to; wheels are files in it")
    arch_help = (
        "targets, comma-separated or repeated: sm_80 … sm_120, cpu (default: TORCH_CUDA_ARCH_LIST, else this machine's GPU, else "
        "sm_90a)"
    )
    format_help = (
        "bundle (for fusegen.load; the default), extension (a shared library of torch operators), sources (CUDA, CMake), wheel (a "
        "Python package with a bundle), extension-wheel (a Python package with an extension, which does not need fusegen), or hub "
        "(extensions in a folder for Hugging Face's package kernels)"
    )
    parser.add_argument("--format", choices=FORMATS, help=format_help)
    library_help = (
        "name of the library, and of the package in a wheel; an extension's operators are torch.ops.NAME.… (default, but for "
        "wheels: the folder's name)"
    )
    parser.add_argument("--library", metavar="NAME", help=library_help)
    version_help = (
        "version of a wheel, such as 1.0 (default: that of [tool.fusegen.build] or [project] in pyproject.toml here), or of a hub "
        "folder: a number (default: 1)"
    )
    parser.add_argument("--version", metavar="VERSION", help=version_help)
    parser.add_argument("--arch", metavar="TARGETS", action="append", help=arch_help)
    cpu_help = f"x86-64 level of the target cpu: {', '.join(LEVELS)} (default: this machine's processor, and others like it)"
    parser.add_argument("--cpu", metavar="LEVEL", help=cpu_help)
    dtype_help = (
        "dtypes of tensors without one in --shape, one build each; comma-separated or repeated (default: a module's own, else "
        "bf16; f32 on a CPU)"
    )
    parser.add_argument("--dtype", metavar="DTYPES", action="append", help=dtype_help)
    add_inputs(parser)
    add_calls(parser, "build for")


@dataclass(frozen=True)
class _Wanted:
    """The kernels and models that a command builds.

    Attributes:
        names: names of kernels in the folder, by their names on the command line.
        modules: the user's modules, imported.
        models: targets of models, by location.
    """

    names: Mapping[str, str]
    calls: Sequence[RequestedCall]
    modules: dict[str, ModuleType]
    models: Mapping[str, Sequence[Target]]

    def build_into(
        self, folder: OpenFolder, terminal: Terminal, *, repeatable: bool = True
    ) -> tuple[tuple[StoredKernel, ...], list[BuiltModel]]:
        """Builds them into a folder. Returns all kernels of the folder, and the models."""
        traced = []
        for location, targets in self.models.items():
            terminal.progress(f"tracing {location} …")
            traced.append(traced_model(location, targets))
        kernels = FolderBuild(folder, self.names, self.modules, terminal, repeatable).kernels(self.calls)
        models = built_models(traced, folder, terminal, repeatable=repeatable)
        kernels += [kernel for model in models for kernel in model.kernels]
        return folder.finish(kernels, fusegen.__version__, models={model.key for model in models}), models


def run_build(options: argparse.Namespace, terminal: Terminal) -> int:
    builds = [options] if options.kernel or options.all or options.model else with_project(options)
    for build in builds:
        named = (name if is_location(name) else find(name).name for name in build.kernel)
        build.kernel = list(dict.fromkeys([*(SPECS if build.all else ()), *named]))
    first = builds[0]
    models = _models(options, builds)
    modules: dict[str, ModuleType] = {}
    names = _names(builds, modules)
    wanted = _Wanted(names, [call for build in builds for call in _calls(build, _targets(build))], modules, models)
    if first.version and first.format not in (*_WHEELS, "hub"):
        raise ArgumentError("--version applies only to wheels and hub folders", hint="add --format wheel or hub")
    for call in wanted.calls:
        request_of(call, modules)  # errors of all arguments come before the first compilation
    if first.out is not None and first.format in ("extension", "sources", "hub"):
        requests, library = _requests(wanted.calls, modules, terminal), str(first.library or first.out.name)
        docs = {ascii_name(name): doc for name, doc in _docs(names, modules).items()}
        return _run_without_adding(first, requests, library, docs, _command(options, library, wanted.calls), terminal)
    return _run(first, wanted, terminal)


def _models(options: argparse.Namespace, builds: Sequence[argparse.Namespace]) -> dict[str, list[Target]]:
    """Returns the targets of the builds' models, by location.

    Raises:
        ArgumentError: an option or the format does not apply to models.
    """
    models: dict[str, list[Target]] = {}
    for build in builds:
        targets = [t if t.backend is Backend.CUDA else replace(t, level=build.cpu or "") for t in _targets(build)]
        for location in build.model:
            models[location] = list(dict.fromkeys([*models.get(location, ()), *targets]))
    if models and builds[0].format not in (None, "bundle", "wheel"):
        what = f"--format {builds[0].format} does not apply to a model, whose kernels are a bundle"
        raise ArgumentError(what, hint="leave it out, or give --format wheel")
    given = next((option for option in ("dtype", "shape", "arg", "call") if getattr(options, option)), None)
    if models and given and not any(build.kernel for build in builds):
        what = f"--{given} does not apply to --model"
        raise ArgumentError(what, hint="leave it out: the inputs of a model's call have their own dtypes and shapes")
    return models


def _run(options: argparse.Namespace, wanted: _Wanted, terminal: Terminal) -> int:
    if options.out is None:
        raise ArgumentError("no folder is given", hint="add --out DIR")
    if options.format in _WHEELS:
        return _run_wheel(options, wanted, terminal)
    if options.library:
        raise ArgumentError("--library does not apply to --format bundle", hint="add --format extension or wheel")
    with open_folder(options.out) as folder:
        stored, models = wanted.build_into(folder, terminal)
    kernels = [each for each in stored if not each.file.model]
    if options.json:
        facts = {"kernels": [_facts(each.kernel) for each in kernels], "models": [model.facts for model in models]}
        print_document(terminal, "build", folder=str(options.out), **facts)
        return 0
    for model in models:
        model.print(terminal)
    if models:
        terminal.line(f"with FUSEGEN_BUNDLE_PATH={options.out}, calls of the patched models take these kernels")
    if wanted.names:
        _print(terminal, kernels, folder.known, options.out)
    return 0


def _command(options: argparse.Namespace, library: str, calls: Sequence[RequestedCall]) -> str:
    """Returns the command that builds some calls, without its folder. Those of a project are in its file."""
    is_project = not (options.kernel or options.all)
    named = dict.fromkeys(portable_name(call.kernel) for call in calls if not options.all or is_location(call.kernel))
    names = [] if is_project else [*(["--all"] if options.all else []), *named]
    targets = options.arch or () if is_project else [",".join(dict.fromkeys(call.target for call in calls))]
    given = {"--format": [options.format or ()], "--library": [library], "--arch": targets, "--cpu": [options.cpu or ()]}
    given |= {
        "--version": [options.version or ()],
        "--dtype": options.dtype or (),
        "--shape": options.shape,
        "--arg": options.arg,
        "--call": options.call,
    }
    words = [word for option, values in given.items() for value in values if value for word in (option, value)]
    return shlex.join(["fusegen", "build", *names, *words])


def _require_new(folder: Path) -> None:
    """Refuses a folder that exists: one library, or one CMake target, is built as a whole."""
    if not folder.exists():
        return
    try:
        command = read_regular(folder / cpp.COMMAND).decode().strip()
    except (OSError, ValueError):
        raise BundleError(f"{folder} exists already", hint="remove it, or build into another folder") from None
    what = f"{folder} exists already, and calls can be added only to a bundle"
    raise BundleError(what, hint=f"build all calls into another folder; these were built by: {command}")


def _run_without_adding(
    options: argparse.Namespace,
    requests: Iterable[BuildRequest],
    library: str,
    docs: Mapping[str, str],
    command: str,
    terminal: Terminal,
) -> int:
    _require_new(options.out)
    if options.format == "hub":
        package = HubPackage(library, options.version or "1", project_license(), docs)
        return _run_hub(requests, package, command, options, terminal)
    if options.format == "extension":
        return _run_extension(requests, library, command, options, terminal)
    return _run_sources(requests, library, command, options, terminal)


def _run_extension(
    requests: Iterable[BuildRequest], library: str, command: str, options: argparse.Namespace, terminal: Terminal
) -> int:
    level = options.cpu or ""
    shipped = cpp.build_extension(options.out, requests, library, fusegen.__version__, level=level, command=command)
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


def _run_hub(
    requests: Iterable[BuildRequest], package: HubPackage, command: str, options: argparse.Namespace, terminal: Terminal
) -> int:
    package.check()  # before kernels are loaded
    level = options.cpu or ""
    hub = build_hub(options.out, [*requests], package, fusegen.__version__, level=level, command=command)
    terminal.progress()
    if options.json:
        facts = {"variants": list(hub.variants), "schemas": list(hub.schemas), "layers": list(hub.layers)}
        print_document(terminal, "build", folder=str(options.out), library=package.name, **facts)
        return 0
    for schema in hub.schemas:
        terminal.line(schema)
    if hub.layers:
        terminal.line(f"layers: {', '.join(hub.layers)}")
    call = f"kernels.get_local_kernel(Path({str(options.out)!r}))"
    terminal.line(f"{call} loads them, for {' and '.join(hub.variants)}; fusegen is not needed")
    return 0


def _run_sources(
    requests: Iterable[BuildRequest], library: str, command: str, options: argparse.Namespace, terminal: Terminal
) -> int:
    names = cpp.build_sources(options.out, requests, library, command=command)
    terminal.progress()
    if options.json:
        print_document(terminal, "build", folder=str(options.out), library=library, functions=list(names))
        return 0
    for name in names:
        terminal.line(f"{name}: {name}.h, {name}.cu")
    terminal.line(f"CMake builds {library} from these files; nvcc also compiles each file alone")
    return 0


def _run_wheel(options: argparse.Namespace, wanted: _Wanted, terminal: Terminal) -> int:
    package = _package(options, wanted)
    if options.out.exists() and not options.out.is_dir():
        raise BundleError(f"{options.out} is not a folder", hint="give the folder of the wheel by --out")
    beside = options.out / package.name if options.out.exists() else options.out  # its parent may be somebody else's
    models: list[BuiltModel] = []
    with temporary_folder(beside) as unfinished:
        folder = unfinished / package.name
        if options.format == "extension-wheel":
            requests, level = _requests(wanted.calls, wanted.modules, terminal), options.cpu or ""
            built = cpp.build_extension(folder, requests, package.name, fusegen.__version__, level=level)
            terminal.progress()
            wheel = wheel_of_extension(package, folder, built)
        else:
            with open_folder(folder) as opened:
                _, models = wanted.build_into(opened, terminal, repeatable=False)
            wheel = wheel_of_bundle(package, folder, fusegen.__version__)
        path = store(wheel, options.out)
    if options.json:
        facts = {"kernels": list(package.docs), "models": [model.facts for model in models]}
        print_document(terminal, "build", wheel=str(path), requires=list(wheel.requires), **facts)
        return 0
    for model in models:
        model.print(terminal)
    terminal.line(f"pip install {shlex.quote(str(path))} installs it; it requires {' and '.join(wheel.requires)}")
    if package.docs:
        terminal.line(f"import {package.name} has {', '.join(package.docs)}")
    if models:
        terminal.line(f"after import {package.name}, calls of the patched models take these kernels")
    targets = [target for targets in wanted.models.values() for target in targets if target.backend is Backend.CPU]
    if any(call.target == CPU.name and not call.cpu for call in wanted.calls) or not all(target.level for target in targets):
        terminal.line("its CPU kernels need a processor like this one; --cpu builds for others")
    if wheel.warning:
        terminal.line(wheel.warning)
    return 0


def _package(options: argparse.Namespace, wanted: _Wanted) -> PackageSpec:
    if not options.library:
        raise ArgumentError("the wheel has no name", hint="add --library mylib: import mylib then has the kernels")
    name_of = ascii_name if options.format == "extension-wheel" else str
    docs = {name_of(name): doc for name, doc in _docs(wanted.names, wanted.modules).items()}
    models = tuple(portable_name(location) for location in wanted.models)
    package = PackageSpec(options.library, options.version or project_version(), docs, models)
    package.check()
    return package


def _docs(names: Mapping[str, str], modules: dict[str, ModuleType]) -> dict[str, str]:
    """Returns the docstrings of kernels by their names."""
    functions = {name: load(command_name, modules).kernel.function for command_name, name in names.items()}
    return {name: inspect.cleandoc(function.__doc__ or "") for name, function in functions.items()}


def _words(texts: Sequence[str] | None) -> list[str | None]:
    return [None] if texts is None else list(dict.fromkeys(word.strip() for text in texts for word in text.split(",")))


def _names(builds: Sequence[argparse.Namespace], modules: dict[str, ModuleType]) -> dict[str, str]:
    """Loads the kernels that the builds name, and returns their names in the folder by those on the command line.

    Raises:
        ArgumentError: two have the same name, or shapes are given for several kernels.
    """
    for build in builds:
        if len({*build.kernel}) > 1 and (build.shape or build.arg):
            raise ArgumentError("--shape and --arg describe one kernel", hint="name one kernel per command")
    names = {name: load(name, modules).name for name in dict.fromkeys(name for build in builds for name in build.kernel)}
    if duplicates := [name for name in names.values() if [*names.values()].count(name) > 1]:
        raise ArgumentError(f"two kernels have the name {duplicates[0]}", hint="build them into two folders")
    return names


def _targets(options: argparse.Namespace) -> list[Target]:
    if options.arch is None and settings().arch_list:
        return list(dict.fromkeys(target for architecture in settings().arch_list for target in _of_torch(architecture)))
    return [chosen_target(name) for name in _words(options.arch)]


_FIRST_WITH_SUFFIX = 9  # major version; 8.0a does not exist
_GENERATIONS = {"Ampere": ("8.0", "8.6"), "Ada": ("8.9",), "Hopper": ("9.0",), "Blackwell": ("10.0", "12.0")}
"""Names of `torch.utils.cpp_extension`, with the capabilities that have targets of their own."""


def _of_torch(architecture: str) -> list[Target]:
    """The targets of an architecture of ``TORCH_CUDA_ARCH_LIST``, such as ``9.0a``, ``8.6+PTX`` or ``Hopper``."""
    if architecture == "native":
        return [chosen_target(None)]
    return [_of_capability(capability) for capability in _GENERATIONS.get(architecture, (architecture,))]


def _of_capability(capability: str) -> Target:
    match = re.fullmatch(r"(\d\d?)\.(\d)([af]?)(\+PTX)?", capability)
    if match is None or (match[3] and int(match[1]) < _FIRST_WITH_SUFFIX):
        what = f"TORCH_CUDA_ARCH_LIST names {capability!r}, which is not a compute capability"
        hint = f"write numbers such as 8.0;8.6;8.9;9.0a;10.0;12.0, or {', '.join(_GENERATIONS)}, or give --arch"
        raise ArgumentError(what, hint=hint)
    try:
        return from_capability(int(match[1]), int(match[2]))
    except TargetError as error:
        raise TargetError(f"TORCH_CUDA_ARCH_LIST: {error.what}", hint="leave it out, or give --arch") from None


def _calls(options: argparse.Namespace, targets: Sequence[Target]) -> list[RequestedCall]:
    _check_level(options, targets)
    if "" in _words(options.dtype):
        raise ArgumentError("unknown dtype ''", hint="separate dtypes by single commas")
    return [
        RequestedCall(
            kernel=name,
            target=target.name,
            dtype=dtype or "",
            shapes=shapes,
            arguments=tuple(options.arg),
            cpu=(options.cpu or "") if target.backend is Backend.CPU else "",
        )
        for name, target, dtype, shapes in product(options.kernel, targets, _words(options.dtype), shapes_of_calls(options))
    ]


def _check_level(options: argparse.Namespace, targets: Sequence[Target]) -> None:
    if options.cpu is None:
        return
    if options.cpu not in LEVELS:
        raise ArgumentError(f"there is no x86-64 level {options.cpu!r}", hint=f"give one of {', '.join(LEVELS)}")
    if not any(target.backend is Backend.CPU for target in targets):
        raise ArgumentError("--cpu applies only to the target cpu", hint="add --arch cpu")
    if platform.machine() not in X86:
        raise ArgumentError(f"--cpu {options.cpu}: this machine is a {platform.machine()}", hint="build on an x86-64 machine")


def _requests(calls: Iterable[RequestedCall], modules: dict[str, ModuleType], terminal: Terminal) -> Iterator[BuildRequest]:
    for call in calls:
        terminal.progress(f"building {described(call)} …")
        yield request_of(call, modules)


def _print(terminal: Terminal, kernels: Sequence[StoredKernel], before: Manifest | None, folder: Path) -> None:
    unchanged = [each for each in kernels if before is not None and each.file in before.kernels]
    for kernel in (each.kernel for each in kernels if each not in unchanged):
        terminal.title(kernel.name)
        names = [parameter.name for parameter in kernel.parameters]
        for variant in kernel.variants:
            rows = ", ".join(map(str, variant.rows))
            target = f"{variant.target}{f', {rows}' if rows else ''}, {variant.call.summary}"
            terminal.line(f"{target}: {describe_calls(variant.signature, names)}")
    if unchanged:
        terminal.line(f"unchanged: {', '.join(each.summary.name for each in unchanged)}")
    terminal.line(f"kernels = fusegen.load({str(folder)!r}) loads them")


def _facts(kernel: BuiltKernel) -> dict[str, object]:
    return {"name": kernel.name, "variants": [_fact(variant, [p.name for p in kernel.parameters]) for variant in kernel.variants]}


def _fact(variant: BuiltVariant, names: Sequence[str]) -> dict[str, object]:
    arguments = {name: str(argument) for name, argument in zip(names, variant.signature.arguments, strict=True)}
    files = sorted({file for code in variant.code for file in (code.file, code.source)})
    return {"target": variant.target, "arguments": arguments, "steps": len(variant.call.steps), "files": files}
