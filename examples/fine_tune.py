"""Fine-tunes a language model of transformers in eager, under torch.compile, and patched: step times, memory, losses.

python examples/fine_tune.py                                # Llama-3.2-1B's layers, random weights; a small Llama on a CPU
python examples/fine_tune.py --lora                         # trains adapters of PEFT alone
python examples/fine_tune.py --model FOLDER --text FILE     # your model (a folder or a name) and text; needs transformers
python examples/fine_tune.py --out run.json                 # also stores the run

All variants start from the same weights and read the same batches. If the model has dropout, they draw different masks, and their
losses differ.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import fusegen as fg
from fusegen.extension.native import wait

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    import transformers
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
VARIANTS = ("eager", "compile", "patched")
WARM_STEPS, ROUNDS = 3, 5
RANK = 16
LARGEST_NORM = 1.0  # gradients are clipped to it
TOLERANCE = 1e-3  # losses on a CPU, in float32, may differ by this
DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
LLAMA: dict[str, Any] = (
    {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
    if IS_GPU
    else {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
)


@dataclass(frozen=True)
class Row:
    """A figure by variant, and the best variants; several if their rounds overlap."""

    what: str
    unit: str
    figures: Mapping[str, float]
    best: str = ""

    def stored(self) -> dict[str, object]:
        """The row for the file; a figure that was not measured is None."""
        figures = {variant: self.figures.get(variant) for variant in VARIANTS}
        return {"what": self.what, "unit": self.unit, **figures, "best": self.best}


@dataclass(frozen=True)
class Measured:
    """The losses of all steps, the seconds of the first step, the seconds per step of each round, the peak (0 on a CPU)."""

    losses: list[float]
    first_step: float
    times: list[float]
    peak_bytes: int


class Learner:
    """A copy of a model in training.

    Args:
        variant: one of `VARIANTS`.
        plain: the model to copy.
        rate: the learning rate.
    """

    def __init__(self, variant: str, plain: Any, rate: float) -> None:
        before = allocated()
        self.model = copy.deepcopy(plain).train()
        self.report = fg.patch(self.model) if variant == "patched" else None
        if variant == "compile":
            self.model.compile()
        self.parameters = trained_parameters(self.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, fused=True)
        self.losses: list[Tensor] = []
        self.times: list[float] = []
        self.first_step, self.peak_bytes = 0.0, 0
        self.weight_bytes = allocated() - before

    def warm_up(self, steps: Sequence[Tensor]) -> None:
        """Runs the first steps; measures the first, which compiles, and the peak of this learner's memory in all of them."""
        others = allocated() - self.weight_bytes
        if IS_GPU:
            torch.cuda.reset_peak_memory_stats()
        self.first_step = self.seconds(steps[:1])
        self.seconds(steps[1:])
        if IS_GPU:
            self.peak_bytes = torch.cuda.max_memory_allocated() - others
            wait()  # until the native module is built, Python would launch the kernels

    def measure(self, steps: Sequence[Tensor]) -> None:
        """Runs a round of steps and adds its time per step."""
        self.times.append(self.seconds(steps) / len(steps))

    def seconds(self, steps: Sequence[Tensor]) -> float:
        """Runs steps; returns the wall time of all of them. The host does not wait for the GPU between steps."""
        synchronize()
        start = time.perf_counter()
        for batches in steps:
            self.step(batches)
        synchronize()
        return time.perf_counter() - start

    def step(self, batches: Tensor) -> None:
        """One optimizer step. Takes token ids of shape (accumulated batches, batch, tokens)."""
        total = torch.zeros((), device=DEVICE)
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)

    def measured(self) -> Measured:
        """The measurements so far."""
        return Measured(torch.stack(self.losses).tolist(), self.first_step, self.times, self.peak_bytes)


def trained_parameters(model: Any) -> list[torch.nn.Parameter]:
    """The parameters that get gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def allocated() -> int:
    """The bytes of all tensors on the GPU; 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if IS_GPU else 0


def synchronize() -> None:
    """Waits for the GPU."""
    if IS_GPU:
        torch.cuda.synchronize()


def model_of(options: argparse.Namespace) -> Any:
    """The model that every variant copies, with adapters if these are trained."""
    torch.manual_seed(0)
    llama: Any = transformers.LlamaForCausalLM
    if options.model:
        model = loaded(transformers.AutoModelForCausalLM, options.model, dtype=DTYPE).to(DEVICE)
    else:
        config = llama.config_class(**LLAMA | ({"num_hidden_layers": options.layers} if options.layers else {}))
        with DEVICE:
            model = llama._from_config(config, dtype=DTYPE)  # rotary frequencies stay in float32
    if not options.lora:
        return model
    try:
        import peft
    except ImportError:
        raise SystemExit("--lora needs PEFT: pip install peft") from None
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def loaded(kind: Any, name: str, **settings: Any) -> Any:
    """A pretrained model or tokenizer."""
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {name} cannot be loaded: {error}") from None


def batches_of(options: argparse.Namespace, steps: int) -> Tensor:
    """Pieces of the text, as token ids of shape (steps, accumulated batches, batch, tokens)."""
    files = [options.text] if options.text else sorted(DOCUMENTS.glob("*.md"))
    try:
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    except (OSError, UnicodeError) as error:
        raise SystemExit(f"--text {options.text} cannot be read as UTF-8: {error}") from None
    found = loaded(transformers.AutoTokenizer, options.model)(text)["input_ids"] if options.model else list(text.encode())
    last = len(found) - options.tokens
    if last < 0:
        raise SystemExit(f"the text has {len(found)} tokens: pass a longer --text, or at most --tokens {len(found)}")
    shape = (steps, options.accumulate, options.batch, 1)
    starts = torch.randint(last + 1, shape, generator=torch.Generator().manual_seed(0))
    return torch.tensor(found)[starts + torch.arange(options.tokens)].to(DEVICE)


def fits(plain: Any, variants: Sequence[str]) -> bool:
    """True if all variants fit into half of the free memory: weights, gradients, two moments. Activations need the rest."""
    weights, trained = (sum(p.nbytes for p in each) for each in (plain.parameters(), trained_parameters(plain)))
    return not IS_GPU or len(variants) * (weights + 3 * trained) < torch.cuda.mem_get_info()[0] / 2


def trained_together(variants: Sequence[str], plain: Any, steps: Tensor, options: argparse.Namespace) -> dict[str, Measured]:
    """The measurements of variants that are in memory together; in each round, every variant runs the same steps once."""
    learners = {variant: Learner(variant, plain, options.rate) for variant in variants}
    for learner in learners.values():  # after the patch, which wraps attention functions: compiled models would be compiled again
        learner.warm_up(list(steps[:WARM_STEPS]))
    rounds = [steps[start : start + options.steps] for start in range(WARM_STEPS, len(steps), options.steps)]
    for batches in track(rounds, f"{', '.join(variants):24}", console=Console(stderr=True)):
        for learner in learners.values():
            learner.measure(list(batches))
    if "patched" in learners:
        print(learners["patched"].report)
    return {variant: learner.measured() for variant, learner in learners.items()}


def rows(found: Mapping[str, Measured], tokens: int) -> list[Row]:
    """All figures; `tokens` are those of one step."""
    eager = found["eager"]
    medians = {variant: statistics.median(each.times) for variant, each in found.items()}
    fastest = min(found, key=medians.__getitem__)
    level = ", ".join(variant for variant, each in found.items() if min(each.times) <= max(found[fastest].times))
    peaks = {variant: each.peak_bytes / 2**30 for variant, each in found.items() if each.peak_bytes}
    first = {variant: each.first_step for variant, each in found.items()}
    faster = [variant for variant, each in found.items() if max(each.times) < min(eager.times)]
    ahead = {each: math.ceil((first[each] - first["eager"]) / (medians["eager"] - medians[each])) for each in faster}
    losses = {variant: torch.tensor(each.losses, dtype=torch.float64) for variant, each in found.items()}
    apart = {variant: (each - losses["eager"]).abs().max().item() for variant, each in losses.items() if variant != "eager"}
    return [
        Row("tokens a second", "", {variant: tokens / median for variant, median in medians.items()}, level),
        Row("a step, median round", "ms", {variant: 1e3 * median for variant, median in medians.items()}, level),
        Row("a step, fastest round", "ms", {variant: 1e3 * min(each.times) for variant, each in found.items()}),
        Row("a step, slowest round", "ms", {variant: 1e3 * max(each.times) for variant, each in found.items()}),
        Row("peak memory", "GiB", peaks, min(peaks, key=peaks.__getitem__) if peaks else ""),
        Row("the first step", "s", first, min(first, key=first.__getitem__)),
        Row("steps until it is ahead of eager", "", ahead, min(ahead, key=ahead.__getitem__) if ahead else ""),
        Row("loss of the last step", "", {variant: each[-1].item() for variant, each in losses.items()}),
        Row("losses, largest difference from eager's", "", apart),
    ]


def number(value: float | None, unit: str) -> str:
    """A figure with at least three digits."""
    return "" if value is None else f"{value:.0f} {unit}".strip() if abs(value) >= 100 else f"{value:.3g} {unit}".strip()


def machine(options: argparse.Namespace, plain: Any, *, is_together: bool) -> dict[str, str]:
    """The device, the versions, the work and the method of a run."""
    parameters = sum(p.numel() for p in plain.parameters())
    trained = sum(p.numel() for p in trained_parameters(plain))
    size = f"{plain.config.model_type}, {plain.config.num_hidden_layers} layers of {plain.config.hidden_size}"
    rounds = "rounds of the variants in turn" if is_together else "the variants one after another, for lack of memory"
    return {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fusegen": fg.__version__,
        "model": f"{options.model or 'random weights'}, {size}, {parameters / 1e6:.4g} million parameters",
        "trained": f"{trained / 1e6:.4g} million parameters{f', LoRA of rank {RANK}' if options.lora else ''}",
        "step": f"{options.accumulate}×{options.batch}×{options.tokens} tokens, AdamW (fused), gradients clipped",
        "timer": f"wall clock around {ROUNDS} rounds of {options.steps} steps after {WARM_STEPS} steps, {rounds}",
    }


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a causal language model (default: a Llama with random weights)")
    parser.add_argument("--layers", type=positive, help=f"layers of the Llama (default: {LLAMA['num_hidden_layers']})")
    parser.add_argument("--text", type=Path, help="file of the training text (default: the pages in docs)")
    parser.add_argument("--lora", action="store_true", help="train adapters instead of all weights; needs PEFT")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=IS_GPU, help="also measure torch.compile (default: on a GPU)"
    )
    for name, default, text in (
        ("batch", 4 if IS_GPU else 2, "sequences per batch"),
        ("tokens", 2048 if IS_GPU else 64, "tokens per sequence"),
        ("accumulate", 1, "batches per optimizer step"),
        ("steps", 4 if IS_GPU else 2, f"steps per round, of {ROUNDS} rounds"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to store the run in")
    options = parser.parse_args()
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out: the folder {options.out.parent} does not exist")
    return options


def main() -> None:
    """Trains all variants and prints a table; stores the run on request."""
    options = parsed()
    variants = [variant for variant in VARIANTS if variant != "compile" or options.compile]
    steps = batches_of(options, WARM_STEPS + ROUNDS * options.steps)
    plain = model_of(options)
    is_together = fits(plain, variants)
    found: dict[str, Measured] = {}
    for group in [variants] if is_together else [[variant] for variant in variants]:
        found |= trained_together(group, plain, steps, options)
    where, figures = machine(options, plain, is_together=is_together), rows(found, steps[0].numel())
    table = Table("", *VARIANTS, "best", title="\n".join((f"{where['device']}, {where['dtype']}", where["model"], where["step"])))
    for each in figures:
        table.add_row(each.what, *(number(each.figures.get(variant), each.unit) for variant in VARIANTS), each.best)
    Console(width=120).print(table)
    if not IS_GPU:
        print("CPU times of small models do not predict GPU times")
    if options.out is not None:
        options.out.write_text(
            json.dumps({"machine": where, "rows": [each.stored() for each in figures]}, indent=1, ensure_ascii=False) + "\n"
        )
        print(f"stored: {options.out}")
    if not IS_GPU and figures[-1].figures["patched"] > TOLERANCE:
        raise SystemExit(f"the losses differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
