"""Tokens a second of `generate` with a static cache: as it is, as it compiles itself, patched, and patched with CUDA graphs.

python examples/generate.py                 # 8 layers of 2048 channels, and 4 of Llama-3-8B, on a GPU; a small one on a CPU
python examples/generate.py --out FOLDER    # and stores the run and a plot; needs transformers
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
FIRST_CALLS = 3  # they trace, compile and record
ROUNDS = 5 if IS_GPU else 1
BATCHES = (1, 16) if IS_GPU else (2,)
SAME_EACH_TIME = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's gives other bits at times
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
"""By name, with a part of the layers."""


@dataclass(frozen=True)
class Row:
    """A figure of one model and one batch, by the way of `WAYS` in which it generates."""

    model: str
    what: str
    unit: str
    figures: dict[str, float]

    def stored(self) -> dict[str, object]:
        """The row as a file has it; None where a figure was not taken."""
        return {"model": self.model, "what": self.what, "unit": self.unit, **{way: self.figures.get(way) for way in WAYS}}


class ByHand:
    """A model's step of one token as a CUDA graph that nothing checks: the least that a graph can cost.

    Args:
        model: a patched one, whose forward pass this becomes, in the place of another one of these.
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
        """The result of a forward pass; that of a replay lies in the graph's memory until the next one."""
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
        """Records a step, which does not run yet."""
        self.cache = cache_of(given)
        self.inputs = {
            name: value if value is self.cache else tree_map_only(Tensor, Tensor.clone, value) for name, value in given.items()
        }
        with torch.cuda.graph(self.graph):
            self.result = self.original(**self.inputs)

    def adopt(self, cache: Any) -> None:
        """Moves what a new cache holds to the memory that the graph reads."""
        for ours, theirs in zip(self.cache.layers, cache.layers, strict=True):
            for name, tensor in vars(ours).items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(getattr(theirs, name))
                    setattr(theirs, name, tensor)
        self.cache = cache


def is_step(given: Mapping[str, Any]) -> bool:
    """True if a call of a model is one of one token a sequence."""
    return bool(given["input_ids"].shape[1] == 1)


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, whose name differs between versions of transformers."""
    return next(value for value in given.values() if hasattr(value, "layers"))


def tensors_of(given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, without those of its cache."""
    cache = cache_of(given)
    values = [value for value in given.values() if value is not cache]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def generated(model: Any, ids: Tensor, tokens: int, *, compiled: bool = False) -> Tensor:
    """The most probable tokens behind a prompt."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    found: Tensor = model.generate(ids, **options, cache_implementation="static", disable_compile=not compiled)
    return found[:, ids.shape[1] :]


def step_inputs(model: Any, generate: Callable[[], object]) -> dict[str, Any]:
    """What `generate` gives to the model for its last token."""
    found: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, args, given: found.append(given), with_kwargs=True)
    generate()
    hook.remove()
    return found[-1]


def seconds(call: Callable[[], object], count: int = 1) -> float:
    """The time of some calls, the host's and the GPU's."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def step_seconds(model: Any, given: Mapping[str, Any], count: int) -> float:
    """The time of a step of one token, from an empty cache on, so that all steps fit."""
    cache_of(given).reset()
    with torch.no_grad():
        return seconds(partial(model, **given), count)


def synchronize() -> None:
    """Waits for the GPU."""
    if IS_GPU:
        torch.cuda.synchronize()


def memory(call: Callable[[], object]) -> tuple[float, float]:
    """The MiB that the first calls take of the GPU: at most, and for good."""
    before = held_bytes()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(FIRST_CALLS):
        call()
    most = torch.cuda.max_memory_reserved()
    return (most - before) / 2**20, (held_bytes() - before) / 2**20


def held_bytes() -> int:
    """What of the GPU's memory is taken, and cannot be given back."""
    gc.collect()
    synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def medians(calls: Mapping[str, Callable[[], float]], label: str) -> dict[str, float]:
    """The medians of what calls give, in turn, round by round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in shown(range(ROUNDS), label):
        for name, call in calls.items():
            found[name].append(call())
    return {name: statistics.median(each) for name, each in found.items()}


def shown(several: Iterable[T], label: str) -> Iterable[T]:
    """Things one by one, with a bar that says how many are done."""
    several = list(several)
    return track(several, f"{label:44}", len(several), console=Console(stderr=True))


def models_of(plain: Any) -> tuple[dict[str, Any], Report]:
    """A model in the ways that it can generate, and the report of the one with graphs."""
    patched, graphs = copy.deepcopy(plain), copy.deepcopy(plain)
    fg.patch(patched)
    report = fg.patch(graphs, cuda_graphs=True)
    models = {"eager": plain, "patched": patched, "with graphs": graphs}
    if IS_GPU:  # on a CPU `generate` compiles nothing, and there are no graphs
        models |= {"compile": copy.deepcopy(plain), "by hand": copy.deepcopy(plain)}
        fg.patch(models["by hand"])
    return {way: models[way] for way in WAYS if way in models}, report


def rows(label: str, models: Mapping[str, Any], batch: int, tokens: int) -> Iterator[Row]:
    """All figures of a model and a batch."""
    torch.compiler.reset()
    ids = torch.randint(models["eager"].config.vocab_size, (batch, PROMPT), device=DEVICE)
    if "by hand" in models:
        ByHand(models["by hand"])
    compiled = ("compile", "with graphs")  # graphs take the place of what `generate` compiles
    calls = {way: partial(generated, model, ids, tokens, compiled=way in compiled) for way, model in models.items()}
    name = f"{label}, batch {batch}"
    given = step_inputs(models["eager"], calls["eager"])
    taken = {way: memory(call) for way, call in shown(calls.items(), f"{name}: first calls")} if IS_GPU else {}
    with sdpa_kernel(SAME_EACH_TIME):
        if not torch.equal(calls["patched"](), calls["with graphs"]()):
            raise SystemExit(f"{name}: other tokens with graphs than without")
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
    config.eos_token_id = None  # so that all generate as many tokens
    torch.manual_seed(0)
    with DEVICE:
        plain: Any = LlamaForCausalLM(config)
    models, report = models_of(plain.to(DTYPE).eval())
    if IS_GPU:  # which has graphs
        wait()
    for batch in options.batches:
        yield from rows(f"{name}, {config.num_hidden_layers} layers of {config.hidden_size}", models, batch, options.tokens)
    print(str(report).partition("CUDA graphs of layers")[0])


def table_of(found: Iterable[Row], title: str) -> Table:
    """Figures with a column for each way."""
    table = Table("model", "", *WAYS, title=title)
    for row in found:
        table.add_row(row.model, row.what, *(number(row.figures.get(way), row.unit) for way in WAYS))
    return table


def number(value: float | None, unit: str) -> str:
    """A figure with three digits."""
    return "" if value is None else f"{value:.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def plot(found: Iterable[Row], title: str, path: Path) -> str:
    """Draws the rates, a part of the figure for each model and batch; says where they are."""
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
    """The circumstances of a run."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fusegen": fg.__version__,
        "tokens": f"{options.tokens} behind {PROMPT}",
        "timer": f"wall clock around generate, prefill included, median of {ROUNDS} rounds",
    }


def store(found: Iterable[Row], where: Mapping[str, str], folder: Path) -> None:
    """Writes the run and a plot to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "generate.json"
    run = {"machine": dict(where), "rows": [row.stored() for row in found]}
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    print(f"stored: {path}")
    print(plot(found, f"generate, {where['device']}, {where['dtype']}", folder / "generate.svg"))


def main() -> None:
    """Measures the models, prints the table, and stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS)[: 2 if IS_GPU else 1])
    parser.add_argument("--layers", type=int, help="of each model")
    parser.add_argument("--tokens", type=int, default=128 if IS_GPU else 4, help="new ones (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--small", action="store_true", default=not IS_GPU, help="a model of 64 channels, as always on a CPU")
    parser.add_argument("--out", type=Path, help="a folder for the run and a plot")
    options = parser.parse_args()
    where = machine(options)
    found = [row for name in options.models for row in measured(name, options)]
    Console(width=140).print(table_of(found, f"{where['device']}, {where['dtype']}, {where['tokens']} tokens"))
    if not IS_GPU:
        print("times of small models on a CPU say nothing about a GPU")
    if options.out is not None:
        store(found, where, options.out)


if __name__ == "__main__":
    main()
