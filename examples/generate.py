"""Tokens per second of `generate` with a static cache: eager, compiled by `generate`, patched, and patched with CUDA graphs.

python examples/generate.py                 # GPU: 8 layers of 2048 channels, and 4 of Llama-3-8B; CPU: a small model
python examples/generate.py --out FOLDER    # also stores the run and a plot; needs transformers
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

import fusegen as fg
from fusegen.extension.native import wait
from fusegen.integrations.patch.report import Report

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

T = TypeVar("T")
IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
PROMPT = 16
RATE = "tokens a second"
FIRST_CALLS = 3  # these calls trace, compile and record
ROUNDS = 5 if IS_GPU else 1
BATCHES = (1, 16) if IS_GPU else (2,)
SAME_EACH_TIME = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's bits vary
WAYS = ("eager", "compile", "patched", "with graphs", "by hand")
SMALL = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=256)
MODELS = {
    "Llama": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8
    ),
    "Llama-3-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
}
"""Configs by name, each with only some of the model's layers."""


@dataclass(frozen=True)
class Row:
    """A figure of one model and batch size, for each of `WAYS`."""

    model: str
    what: str
    unit: str
    figures: dict[str, float]

    def stored(self) -> dict[str, object]:
        """The row for the file; a figure that was not measured is None."""
        return {"model": self.model, "what": self.what, "unit": self.unit, **{way: self.figures.get(way) for way in WAYS}}


class ByHand:
    """A model's one-token step as a CUDA graph that is replayed without checks: a lower bound on the cost of a graph.

    Args:
        model: a patched model. This object replaces its forward pass, or an earlier `ByHand`.
    """

    def __init__(self, model: Any) -> None:
        given = model.forward
        self.original: Callable[..., Any] = given.original if isinstance(given, ByHand) else given
        self.__signature__ = inspect.signature(self.original)
        self.steps = 0
        self.inputs: dict[str, Any] = {}
        self.cache: Any = None
        self.graph = torch.cuda.CUDAGraph()
        self.result: Any = None
        model.forward = self

    def __call__(self, **given: Any) -> Any:
        """Runs or replays a forward pass. The next replay overwrites a replay's result."""
        self.steps += is_step(given)
        if not is_step(given) or self.steps <= FIRST_CALLS:
            return self.original(**given)
        if self.cache is None:
            self.capture(given)
        if self.cache is not cache_of(given):
            self.adopt(cache_of(given))
        torch._foreach_copy_(tensors_of(self.inputs), tensors_of(given))  # pyright: ignore[reportPrivateImportUsage]
        self.graph.replay()
        return self.result

    def capture(self, given: Mapping[str, Any]) -> None:
        """Records a step without running it."""
        self.cache = cache_of(given)
        self.inputs = {
            name: value if value is self.cache else tree_map_only(Tensor, Tensor.clone, value) for name, value in given.items()
        }
        with torch.cuda.graph(self.graph):
            self.result = self.original(**self.inputs)

    def adopt(self, cache: Any) -> None:
        """Moves the tensors of a new cache to the memory that the graph reads."""
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            for name, tensor in vars(ours).items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(getattr(theirs, name))
                    setattr(theirs, name, tensor)
        self.cache = cache


def is_step(given: Mapping[str, Any]) -> bool:
    """True if a call has one token per sequence."""
    return bool(given["input_ids"].shape[1] == 1)


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call; its parameter's name depends on the version of transformers."""
    return next(value for value in given.values() if hasattr(value, "layers"))


def tensors_of(given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, without the cache's tensors."""
    cache = cache_of(given)
    values = [value for value in given.values() if value is not cache]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def generated(model: Any, ids: Tensor, tokens: int, *, compiled: bool = False) -> Tensor:
    """The tokens that greedy decoding generates after a prompt."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    found: Tensor = model.generate(ids, **options, cache_implementation="static", disable_compile=not compiled)
    return found[:, ids.shape[1] :]


def step_inputs(model: Any, generate: Callable[[], object]) -> dict[str, Any]:
    """The arguments that `generate` passes to the model for the last token."""
    found: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, given: found.append(given), with_kwargs=True)
    generate()
    hook.remove()
    return found[-1]


def seconds(call: Callable[[], object], count: int = 1) -> float:
    """The mean seconds of a call, including host and GPU time."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def step_seconds(model: Any, given: Mapping[str, Any], count: int) -> float:
    """The mean seconds of a one-token step. The cache is emptied first, so that all steps fit."""
    cache_of(given).reset()
    with torch.no_grad():
        return seconds(partial(model, **given), count)


def synchronize() -> None:
    """Waits for the GPU."""
    if IS_GPU:
        torch.cuda.synchronize()


def memory(call: Callable[[], object]) -> tuple[float, float]:
    """The GPU memory of the first calls in MiB: the peak, and the part that stays allocated."""
    before = held_bytes()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(FIRST_CALLS):
        call()
    most = torch.cuda.max_memory_reserved()
    return (most - before) / 2**20, (held_bytes() - before) / 2**20


def held_bytes() -> int:
    """The bytes that torch's allocator still reserves after it has freed its unused blocks."""
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def medians(calls: Mapping[str, Callable[[], float]], label: str) -> dict[str, float]:
    """The medians of the calls' results. In each round, every call runs once."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in shown(range(ROUNDS), label):
        for name, call in calls.items():
            found[name].append(call())
    return {name: statistics.median(each) for name, each in found.items()}


def shown(several: Iterable[T], label: str) -> Iterable[T]:
    """Yields the items and shows a progress bar."""
    several = list(several)
    return track(several, f"{label:44}", len(several), console=Console(stderr=True))


def models_of(plain: Any) -> tuple[dict[str, Any], Report]:
    """The model for each of `WAYS` that this machine supports, and the patch report of the model with graphs."""
    patched, graphs = copy.deepcopy(plain), copy.deepcopy(plain)
    fg.patch(patched)
    report = fg.patch(graphs, cuda_graphs=True)
    models = {"eager": plain, "patched": patched, "with graphs": graphs}
    if IS_GPU:  # on a CPU, `generate` does not compile, and there are no graphs
        models |= {"compile": copy.deepcopy(plain), "by hand": copy.deepcopy(plain)}
        fg.patch(models["by hand"])
    return {way: models[way] for way in WAYS if way in models}, report


def rows(label: str, models: Mapping[str, Any], batch: int, tokens: int) -> Iterator[Row]:
    """All figures of a model at one batch size."""
    torch.compiler.reset()
    ids = torch.randint(models["eager"].config.vocab_size, (batch, PROMPT), device=DEVICE)
    if "by hand" in models:
        ByHand(models["by hand"])
    compiled = ("compile", "with graphs")  # with graphs, the patch prevents the compilation
    calls = {way: partial(generated, model, ids, tokens, compiled=way in compiled) for way, model in models.items()}
    name = f"{label}, batch {batch}"
    given = step_inputs(models["eager"], calls["eager"])
    taken = {way: memory(call) for way, call in shown(calls.items(), f"{name}: first calls")} if IS_GPU else {}
    with sdpa_kernel(SAME_EACH_TIME):
        if not torch.equal(calls["patched"](), calls["with graphs"]()):
            raise SystemExit(f"{name}: the tokens with and without graphs differ")
    times = medians({way: partial(seconds, call) for way, call in calls.items()}, f"{name}: generate")
    yield Row(label, f"{RATE}, batch {batch}", "", {way: batch * tokens / each for way, each in times.items()})
    plain = {way: model for way, model in models.items() if way != "compile"}
    steps = {way: partial(step_seconds, model, copy.deepcopy(given), tokens) for way, model in plain.items()}
    found = medians(steps, f"{name}: steps alone")
    yield Row(label, f"a step alone, batch {batch}", "µs", {way: 1e6 * each for way, each in found.items()})
    if taken:
        yield Row(label, f"memory beside the weights, batch {batch}", "MiB", {way: each[0] for way, each in taken.items()})
        yield Row(label, f"of it for good, batch {batch}", "MiB", {way: each[1] for way, each in taken.items()})


def measured(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """All figures of a model."""
    config = copy.deepcopy(SMALL if options.small else MODELS[name])
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.eos_token_id = None  # all models must generate the same number of tokens
    torch.manual_seed(0)
    with DEVICE:
        plain: Any = LlamaForCausalLM(config)
    models, report = models_of(plain.to(DTYPE).eval())
    if IS_GPU:  # before the native module is built, Python would check the graphs' state
        wait()
    for batch in options.batches:
        yield from rows(f"{name}, {config.num_hidden_layers} layers of {config.hidden_size}", models, batch, options.tokens)
    print(str(report).partition("CUDA graphs of layers")[0])


def table_of(found: Iterable[Row], title: str) -> Table:
    """The figures, with a column for each of `WAYS`."""
    table = Table("model", "", *WAYS, title=title)
    for row in found:
        table.add_row(row.model, row.what, *(number(row.figures.get(way), row.unit) for way in WAYS))
    return table


def number(value: float | None, unit: str) -> str:
    """A figure with at least three digits."""
    return "" if value is None else f"{value:.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def plot(found: Iterable[Row], title: str, path: Path) -> str:
    """Draws the rates, one plot per model and batch size. Returns a line with the file's path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: pip install matplotlib"
    rates = [row for row in found if row.what.startswith(RATE)]
    figure = Figure(figsize=(4 * len(rates), 4), layout="constrained")
    figure.suptitle(title)
    for row, axes in zip(rates, figure.subplots(1, len(rates), squeeze=False)[0], strict=True):
        bars = axes.bar(list(row.figures), list(row.figures.values()), color=[f"C{WAYS.index(way)}" for way in row.figures])
        axes.bar_label(bars, fmt="{:.0f}")
        axes.set(title=f"{row.model}\n{row.what}")
        axes.margins(y=0.1)
        axes.tick_params(axis="x", rotation=30)
    figure.savefig(path, metadata={"Date": None})
    return f"rates: {path}"


def machine(options: argparse.Namespace) -> dict[str, str]:
    """The device, the versions and the method of a run."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fusegen": fg.__version__,
        "tokens": f"{options.tokens} after {PROMPT}",
        "timer": f"wall clock around generate, prefill included, median of {ROUNDS} rounds",
    }


def store(found: Iterable[Row], where: Mapping[str, str], folder: Path) -> None:
    """Stores the run and a plot in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "generate.json"
    run = {"machine": dict(where), "rows": [row.stored() for row in found]}
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    print(f"stored: {path}")
    print(plot(found, f"generate, {where['device']}, {where['dtype']}", folder / "generate.svg"))


def main() -> None:
    """Measures the models and prints a table; stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS)[: 2 if IS_GPU else 1])
    parser.add_argument("--layers", type=int, help="layers of each model (default: as in the list of models)")
    parser.add_argument("--tokens", type=int, default=128 if IS_GPU else 4, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--small", action="store_true", default=not IS_GPU, help="use a model of 64 channels (default on a CPU)")
    parser.add_argument("--out", type=Path, help="folder to store the run and a plot in")
    options = parser.parse_args()
    where = machine(options)
    found = [row for name in options.models for row in measured(name, options)]
    Console(width=140).print(table_of(found, f"{where['device']}, {where['dtype']}, {where['tokens']} tokens"))
    if not IS_GPU:
        print("CPU times of small models do not predict GPU times")
    if options.out is not None:
        store(found, where, options.out)


if __name__ == "__main__":
    main()
