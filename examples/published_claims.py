"""Repeats published measurements of kernel fusion, from tutorials, articles and papers, with torch eager and fusegen.

python examples/published_claims.py                  # needs transformers
python examples/published_claims.py --out run.json   # also stores the run

Sources: [K] a tutorial on kernel fusion; [D] DeepSpeed's fused transformer layer; [S] Deep Kernel Fusion for Transformers, arXiv
2602.11808; [G] an article that replaces GPT-2's GELU. If a source gives no sizes, this example chooses them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fusegen as fg
from fusegen import ops
from fusegen.eager_cost import EagerCost, eager_cost
from fusegen.nn import FusedTransformerLayer
from fusegen.timing import interleaved, timer_name

try:
    from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
TARGET = None if IS_GPU else "sm_90a"  # without a GPU, launches and bytes are counted for this target

Call = Callable[[], Any]
Results = Tensor | tuple[Tensor, ...]
Gain = Literal["factor", "share", "difference", "eager"]


@dataclass(frozen=True)
class Measured:
    """The figures of eager and of fusegen, or the reason why they are missing."""

    eager: float = math.nan
    fused: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class Claim:
    """A published figure.

    Attributes:
        text: the claim in the source's terms.
        source: the letter of the source.
        least: the published figure, or the lower end of its range.
        gain: the kind of figure: eager/fused, 1 − fused/eager, eager − fused, or eager alone.
        work: the sizes.
        unit: the unit of the measured figures.
        measure: measures or counts the figures of eager and fusegen.
    """

    text: str
    source: str
    least: float
    gain: Gain
    work: str
    unit: str
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Row:
    """A measured claim; `holds` is None if CPU times cannot be compared with the published GPU times."""

    claim: str
    source: str
    work: str
    unit: str
    eager: float
    fused: float
    claimed: float
    gain: Gain
    measured: float
    holds: bool | None
    reason: str


def row_of(claim: Claim) -> Row:
    """Measures a claim."""
    torch.manual_seed(0)
    found = claim.measure()
    gain = {
        "factor": found.eager / found.fused,
        "share": 1 - found.fused / found.eager,
        "difference": found.eager - found.fused,
        "eager": found.eager,
    }[claim.gain]
    is_comparable = not found.reason and (IS_GPU or claim.unit not in ("µs", "µs each"))
    holds = gain >= claim.least if is_comparable else None
    words = (claim.text, claim.source, claim.work, claim.unit)
    return Row(*words, found.eager, found.fused, claim.least, claim.gain, gain, holds, found.reason)


def timed(eager: Call, fused: Call, *, with_host: bool = False, is_random: bool = False) -> Measured:
    """The times of two equivalent calls in µs.

    Args:
        with_host: on a GPU, times eager calls, including host gaps, instead of CUDA graphs.
        is_random: the results are random, and are not compared.

    Raises:
        SystemExit: the results differ.
    """
    if not is_random and (apart := difference(fused(), eager())) > (2e-2 if IS_GPU else 1e-5):
        raise SystemExit(f"the results differ by {apart:.1e}, more than the tolerance")
    found = interleaved({"eager": eager, "fused": fused}, DEVICE, quick=not IS_GPU, with_host=with_host)
    failed = [f"{name}: {each}" for name, each in found.items() if isinstance(each, Exception)]
    times = {name: each.median for name, each in found.items() if not isinstance(each, Exception)}
    return Measured(reason="; ".join(failed)) if failed else Measured(times["eager"], times["fused"])


def difference(found: Results, expected: Results) -> float:
    """RMS of the difference over RMS of the expected values; the largest over all results."""
    pairs = [(found, expected)] if isinstance(found, Tensor) and isinstance(expected, Tensor) else zip(found, expected, strict=True)
    return max(float((ours.float() - wanted.float()).norm() / wanted.float().norm()) for ours, wanted in pairs)


def counted(function: Callable[..., Any], arguments: Mapping[str, Tensor]) -> EagerCost:
    """The launches and bytes of torch eager, counted from shapes."""
    found = eager_cost(function, arguments)
    assert found is not None  # these functions run on tensors without values
    return found


def normal(*shape: int) -> Tensor:
    """A random operand, scaled so that the results of matmuls are near 1."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) / math.sqrt(shape[-1])


def on_meta(*shape: int) -> Tensor:
    """A tensor without values."""
    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


# Pointwise and rows.


def gelu_launches() -> Measured:
    """Launches of GPT-2's GELU in the model's operations, and as one kernel."""
    x = on_meta(8, 1024, 3072)
    return Measured(counted(ops.gelu_new.function, {"x": x}).launches, ops.gelu_new.lower(x, target=TARGET).step_count)


class Activation(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Calls the function."""
        return self.function(x)


GPT2: dict[str, Any] = (
    {} if IS_GPU else {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
)
GPT2_TOKENS = (8, 1024) if IS_GPU else (2, 32)


@torch.no_grad()
def gelu_share() -> Measured:
    """Time of GPT-2 with the GELU in the model's operations, and as one kernel."""
    model: Any = GPT2LMHeadModel(GPT2Config(**GPT2))
    model.to(DEVICE, DTYPE).eval()
    ids = torch.randint(model.config.vocab_size, GPT2_TOKENS, device=DEVICE)

    def forward(function: Callable[[Tensor], Tensor]) -> Tensor:
        for block in model.transformer.h:
            block.mlp.act = Activation(function)
        found: Tensor = model(ids, use_cache=False).logits
        return found

    return timed(partial(forward, ops.gelu_new.function), partial(forward, ops.gelu_new), with_host=True)


def norm_gelu_dropout_add(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """The tutorial's chain in four torch operations."""
    hidden = F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias))
    return torch.native_dropout(hidden, 0.1, True)[0] + residual


def chain_traffic() -> Measured:
    """Memory traffic of the chain in MiB."""
    x, weight = on_meta(8192, 4096), on_meta(4096)
    eager = counted(norm_gelu_dropout_add, {"x": x, "weight": weight, "bias": weight, "residual": x})
    low = ops.layer_norm_gelu_dropout_add.lower(x, weight, weight, x, target=TARGET)
    return Measured(eager.moved / 2**20, sum(step.traffic.moved(low.sizes) for step in low.program.steps) / 2**20)


EMBEDDED = (8, 2048, 32000, 4096) if IS_GPU else (2, 32, 100, 64)  # batch, positions, vocabulary, features


def embedding_rotary() -> Measured:
    """An embedding, rotated by position."""
    batch, positions, vocabulary, features = EMBEDDED
    ids = torch.randint(vocabulary, (batch, positions), device=DEVICE)
    table, (cos, sin) = normal(vocabulary, features), (normal(positions, 64) for _ in range(2))

    def eager() -> Tensor:
        rows = F.embedding(ids, table).view(batch, positions, -1, 64)
        first, second = rows.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        result: Tensor = (rows * cos[:, None] + turned * sin[:, None]).flatten(2)
        return result

    return timed(eager, partial(ops.embedding_rotary, ids, table, cos, sin))


# Matmuls.

LINEAR = (8192, 1024, 3072) if IS_GPU else (64, 64, 192)  # tokens, inputs, outputs


def norm_linear() -> Measured:
    """A norm and the projection of its result."""
    tokens, inputs, outputs = LINEAR
    x, gamma, beta, weight, bias = normal(tokens, inputs), normal(inputs), normal(inputs), normal(outputs, inputs), normal(outputs)

    def eager() -> Tensor:
        return F.linear(F.layer_norm(x, (inputs,), gamma, beta), weight, bias)

    return timed(eager, partial(ops.layer_norm_linear, x, gamma, beta, weight, bias))


QKV = (4, 2048, 2048, 16) if IS_GPU else (2, 32, 64, 4)  # batch, positions, channels, heads


def qkv() -> Measured:
    """Three projections, split into heads; eager torch splits by views."""
    batch, positions, channels, heads = QKV
    x, weight, bias = normal(batch, positions, channels), normal(3 * channels, channels), normal(3 * channels)
    parts = [(w.clone(), b.clone()) for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True)]

    def eager() -> tuple[Tensor, ...]:
        return tuple(F.linear(x, *part).view(batch, positions, heads, -1).transpose(1, 2) for part in parts)

    return timed(eager, partial(ops.qkv_linear, x, weight, bias, heads=heads))


ATTENTION = (4, 16, 2048, 128) if IS_GPU else (1, 4, 64, 16)  # batch, heads, positions, channels of a head


def attention() -> Measured:
    """Causal attention with and without materialized scores."""
    q, k, v = (normal(*ATTENTION) for _ in range(3))
    positions, channels = ATTENTION[2:]
    later = torch.ones(positions, positions, dtype=torch.bool, device=DEVICE).triu(1)

    def eager() -> Tensor:
        scores = (q @ k.mT * channels**-0.5).masked_fill(later, -math.inf)
        return torch.softmax(scores, -1) @ v

    return timed(eager, partial(ops.flash_attention, q, k, v, is_causal=True))


MLP = (4096, 11008) if IS_GPU else (64, 128)  # inputs, hidden
MLP_TOKENS = 4096 if IS_GPU else 64


def swiglu_mlp(tokens: int) -> Measured:
    """Llama's MLP: three matmuls and two pointwise operations."""
    inputs, hidden = MLP
    x, gate, up, down = normal(tokens, inputs), normal(hidden, inputs), normal(hidden, inputs), normal(inputs, hidden)

    def eager() -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    return timed(eager, partial(ops.swiglu_mlp, x, gate, up, down))


def swiglu_decode(tokens: int) -> Measured:
    """Compares the MLP of SGLang and vLLM (cuBLAS and one kernel for SwiGLU) with fusegen's MLP."""
    inputs, hidden = MLP
    x, packed, down = normal(tokens, inputs), normal(2 * hidden, inputs), normal(inputs, hidden)

    def two_kernels() -> Tensor:
        return F.linear(ops.swiglu(F.linear(x, packed)), down)

    return timed(two_kernels, partial(ops.swiglu_mlp, x, packed, None, down))


SAMPLED = (64, 32000) if IS_GPU else (4, 256)  # requests, vocabulary


def sampling() -> Measured:
    """Samples a token by temperature, top k and top p; returns it with its log-probability."""
    requests, vocabulary = SAMPLED
    logits = 8 * torch.randn(requests, vocabulary, device=DEVICE)
    temperature, top_k, top_p = (torch.full((requests, 1), value, device=DEVICE) for value in (0.8, 20, 0.9))

    def eager() -> tuple[Tensor, Tensor]:
        wide, order = (logits / temperature).sort(-1, descending=True)
        wide = wide.masked_fill(torch.arange(vocabulary, device=DEVICE) >= top_k, -math.inf)
        shares = wide.softmax(-1)
        wide = wide.masked_fill(shares.cumsum(-1) - shares > top_p, -math.inf)
        drawn = wide.softmax(-1).multinomial(1)
        return order.gather(-1, drawn), wide.log_softmax(-1).gather(-1, drawn)

    fused = partial(ops.sample, logits, temperature, top_k=top_k, top_p=top_p)
    return timed(eager, fused, with_host=True, is_random=True)


# Layers.


LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "attn_implementation": "sdpa",
}


def layer_launches() -> Measured:
    """Launches of a Llama decoder layer, in transformers and as one kernel."""
    decoder_layer: Any = LlamaDecoderLayer
    with torch.device("meta"):
        layer = decoder_layer(LlamaConfig(**LLAMA), 0).to(torch.bfloat16).eval()
    x, cos, sin = on_meta(4, 1024, 2048), on_meta(1, 1024, 128), on_meta(1, 1024, 128)
    eager = counted(lambda x, cos, sin: layer(x, position_embeddings=(cos, sin)), {"x": x, "cos": cos, "sin": sin})
    low = fg.kernel(layer).lower(x, position_embeddings=(cos, sin), target=TARGET)
    return Measured(eager.launches, low.step_count)


BERT: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "attn_implementation": "eager"}


def encoder_layers(device: torch.device | str, dtype: torch.dtype) -> tuple[Any, FusedTransformerLayer]:
    """BERT-large's layer in transformers, with attention in torch operations, and the fused layer with the same weights."""
    bert_layer: Any = BertLayer
    config: Any = BertConfig(**BERT)
    with torch.device(device):
        plain = bert_layer(config).to(dtype).eval()
    eps = config.layer_norm_eps
    fused = FusedTransformerLayer(1024, 16, pre_layer_norm=False, layer_norm_eps=eps, device=device, dtype=dtype)
    fused.load_bert(plain.state_dict())
    return plain, fused.eval()


def encoder_launches() -> Measured:
    """Launches of BERT-large's layer."""
    plain, fused = encoder_layers("meta", torch.bfloat16)
    low = fused.passes(1, 16, target=TARGET).forward.lower()
    return Measured(counted(plain, {"hidden_states": on_meta(1, 16, 1024)}).launches, low.step_count)


@torch.no_grad()
def encoder_time() -> Measured:
    """Time of BERT-large's layer for 16 tokens. On a GPU, the host's launches determine it."""
    plain, fused = encoder_layers(DEVICE, DTYPE)
    x = torch.randn(1, 16, 1024, device=DEVICE, dtype=DTYPE)

    def first(layer: Any) -> Tensor:
        found = layer(x)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result

    return timed(partial(first, plain), partial(first, fused), with_host=True)


def launch_time() -> Measured:
    """`encoder_time` per launch."""
    launches, time = encoder_launches(), encoder_time()
    return Measured(time.eager / launches.eager, time.fused / launches.fused, time.reason)


def claims() -> Iterator[Claim]:
    """Yields all claims."""
    by = "×"
    yield Claim("GELU: 8 launches → 1", "G", 8, "factor", "8×1024×3072", "launches", gelu_launches)
    text = "GELU fused: 12.2% of GPT-2's CUDA time gone"
    yield Claim(text, "G", 0.122, "share", by.join(map(str, GPT2_TOKENS)), "µs", gelu_share)
    yield Claim("LN→GELU→dropout→add: 4× less traffic", "K", 4, "factor", "8192×4096", "MiB", chain_traffic)
    yield Claim("QKV 1.5×", "K", 1.5, "factor", by.join(map(str, QKV)), "µs", qkv)
    yield Claim("attention 3–8×", "K", 3, "factor", by.join(map(str, ATTENTION)), "µs", attention)
    for tokens in (16, MLP_TOKENS):
        work = by.join(map(str, (tokens, *MLP)))
        yield Claim("SwiGLU MLP 2×", "K", 2, "factor", work, "µs", partial(swiglu_mlp, tokens))
    yield Claim("LN+Linear 1.4×", "K", 1.4, "factor", by.join(map(str, LINEAR)), "µs", norm_linear)
    yield Claim("sampling 2×", "K", 2, "factor", by.join(map(str, SAMPLED)), "µs", sampling)
    yield Claim("embedding+rotary 1.3×", "K", 1.3, "factor", by.join(map(str, EMBEDDED)), "µs", embedding_rotary)
    yield Claim("60–80% fewer launches than eager", "K", 0.6, "share", "a Llama layer", "launches", layer_launches)
    is_a100 = IS_GPU and "A100" in torch.cuda.get_device_name()
    most = 1.097 if is_a100 else 1.132
    for tokens in (1, 16, 64):
        text = "SwiGLU at decode: up to 9.7% (A100)" if is_a100 else "SwiGLU at decode: up to 13.2% (H100)"
        work = by.join(map(str, (tokens, *MLP)))
        yield Claim(text, "S", most, "factor", work, "µs", partial(swiglu_decode, tokens))
    layer = "a BERT-large layer, 1×16"
    yield Claim("20–30 kernels a layer in eager", "D", 20, "eager", layer, "launches", encoder_launches)
    yield Claim("5–10 µs of overhead a kernel in eager", "D", 5, "eager", layer, "µs each", launch_time)
    yield Claim("100+ µs saved a layer", "D", 100, "difference", layer, "µs", encoder_time)


# The table.


def in_unit(value: float, gain: Gain, unit: str) -> str:
    """The gain as text with its unit."""
    if math.isnan(value):
        return "–"
    return {"factor": f"{value:.2f}×", "share": f"{value:.1%}"}.get(gain, f"{number(value)} {unit}")


def number(value: float) -> str:
    """A number with at least three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown(row: Row) -> list[str]:
    """The cells of a row."""
    verdict = {True: "yes", False: "no", None: row.reason or "not comparable"}[row.holds]
    sides = (number(row.eager), f"{number(row.fused)} {row.unit}")
    return [f"{row.claim} \\[{row.source}]", row.work, *sides, in_unit(row.measured, row.gain, row.unit), verdict]


def machine() -> dict[str, str]:
    """The device, the versions and the methods of a run."""
    return {
        "device": torch.cuda.get_device_name() if IS_GPU else "CPU",
        "dtype": str(DTYPE).removeprefix("torch."),
        "torch": torch.__version__,
        "fusegen": fg.__version__,
        "timer": timer_name(DEVICE, quick=not IS_GPU),
        "timer of models, layers and sampling": timer_name(DEVICE, quick=not IS_GPU, with_host=True),
    }


def main() -> None:
    """Measures all claims and prints a table; stores the run on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to store the run in")
    options = parser.parse_args()
    rows = [row_of(claim) for claim in claims()]
    where = machine()
    table = Table("claim", "work", "eager", "fusegen", "gain", "holds", title=f"{where['device']}, {where['dtype']}")
    for row in rows:
        table.add_row(*shown(row))
    Console(width=120).print(table)
    if not IS_GPU:
        print("Times are of a CPU at small sizes, and are not comparable with the published figures.")
        print(f"Launches and bytes are counted for {TARGET}.")
    if options.out is not None:
        values = [{name: None if value != value else value for name, value in asdict(row).items()} for row in rows]
        options.out.write_text(json.dumps({"machine": where, "rows": values}, indent=1, ensure_ascii=False) + "\n")
        print(f"stored: {options.out}")


if __name__ == "__main__":
    main()
