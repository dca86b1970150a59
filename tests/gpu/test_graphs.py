"""CUDA graphs on a GPU: calls that are replayed give the bits of calls that are launched kernel by kernel."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusegen as fg
from fusegen.compiler.passes import forget_programs

transformers = pytest.importorskip("transformers")

_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 997}
_MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16},
    "GPTNeoX": {},
    "GPT2": {},
    "T5": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_decoder_layers": 2, "decoder_start_token_id": 0},
}


def _model(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **_MODELS.get(name, {}), bos_token_id=0, eos_token_id=0, **settings)
    kinds = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}
    return getattr(transformers, kinds.get(name, f"{name}ForCausalLM"))(config).to("cuda", torch.bfloat16)


def _generated(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    given = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    found: Tensor = model.generate(ids, **{**given, **settings})
    return found


@pytest.mark.parametrize("name", list(_MODELS))
def test_tokens_are_those_without_graphs(name: str) -> None:
    model = _model(name).eval()
    report = fg.patch(model)
    padding = torch.ones(2, 8, dtype=torch.long, device="cuda")
    padding[0, :3] = 0
    kinds: list[dict[str, Any]] = [{}, {"attention_mask": padding}, {"do_sample": True}, {"num_beams": 3}]
    ids = [torch.randint(1, 997, (2, 8), device="cuda") for _ in range(3)]

    def tokens(**settings: Any) -> list[Tensor]:
        torch.manual_seed(1)
        return [_generated(model, each, **kind, **settings) for kind in kinds for each in ids]

    expected = tokens(disable_compile=True)
    report.cuda_graphs = True
    for _ in range(2):
        assert all(map(torch.equal, tokens(), expected))
    line = str(report).splitlines()[-2]
    assert " 0 recorded" not in line and "Error" not in line, line


def _steps(model: Any, ids: list[Tensor], count: int) -> list[Tensor]:
    """The losses of some steps, and the gradients after two of them each."""
    found = []
    for number in range(count):
        loss = model(input_ids=ids[number % len(ids)], labels=ids[0]).loss
        loss.backward()
        found.append(loss.detach())
        if number % 2:
            found += [each.grad for each in model.parameters() if each.grad is not None]
            model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_a_forward_pass_without_a_mask_has_the_same_bits(name: str) -> None:
    model = _model(name).eval()
    report = fg.patch(model)
    ids = [torch.randint(1, 997, (4, 64), device="cuda") for _ in range(3)]
    with torch.no_grad():
        expected = [model(input_ids=each).logits.clone() for each in ids]
        report.cuda_graphs = True
        for _ in range(3):
            assert all(map(torch.equal, [model(input_ids=each).logits.clone() for each in ids], expected))
    assert " 0 recorded" not in str(report).splitlines()[-2]


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_training_step_has_the_same_bits(checkpointing: bool | None) -> None:
    plain = _model("Bert").train()
    if checkpointing is not None:
        plain.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    graphed = copy.deepcopy(plain)
    ids = [torch.randint(1, 997, (4, 64), device="cuda") for _ in range(3)]
    fg.patch(plain)
    report = fg.patch(graphed, cuda_graphs=True)
    for each in (plain, graphed):
        torch.manual_seed(2)
        _steps(each, ids, 2)
    torch.manual_seed(3)
    expected = _steps(plain, ids, 6)
    torch.manual_seed(3)
    found = _steps(graphed, ids, 6)
    assert all(map(torch.equal, found, expected))
    assert checkpointing is not None or " 0 recorded" not in str(report).splitlines()[-1]


def test_layers_whose_backward_passes_come_later() -> None:
    plain = _model("Llama").train()
    graphed = copy.deepcopy(plain)
    fg.patch(plain)
    report = fg.patch(graphed, cuda_graphs=True)

    def gradients(model: Any) -> list[Tensor]:
        torch.manual_seed(4)
        x = torch.randn(4, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        angles = model.model.rotary_emb(x, torch.arange(64, device="cuda")[None])
        first, second = (lambda x, layer=layer: layer(x, position_embeddings=angles).square().sum() for layer in model.model.layers)
        one, waiting = first(x), second(x)
        one.backward()
        another = first(x * 2)  # must not overwrite what the second layer has saved
        waiting.backward()
        another.backward()
        found = [each.grad for each in (x, *model.parameters()) if each.grad is not None]
        model.zero_grad()
        return found

    for _ in range(4):
        assert all(map(torch.equal, gradients(graphed), gradients(plain)))
    assert " 0 recorded" not in str(report).splitlines()[-1]


def test_scaled_losses_of_autocast() -> None:
    models = [_model("Bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).float().train() for _ in range(2)]
    fg.patch(models[0])
    report = fg.patch(models[1], cuda_graphs=True)
    ids = torch.randint(1, 997, (4, 64), device="cuda")
    losses = []
    for model in models:
        scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(4):
            with torch.autocast("cuda", torch.float16):
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[0] == losses[1]
    assert " 0 recorded" not in str(report).splitlines()[-1]


_OPTIMIZERS: dict[str, tuple[bool, Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": (True, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, capturable=True)),
    "SGD": (True, lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)),
    "Adam with its steps on the host": (False, lambda parameters: torch.optim.Adam(parameters, lr=1e-2)),
    "Adagrad with its steps on the host": (False, lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, lr_decay=0.1)),
}


@pytest.mark.parametrize("name", list(_OPTIMIZERS))
def test_a_whole_step_is_one_graph(name: str) -> None:
    can_be, optimizer_of = _OPTIMIZERS[name]
    results = []
    for wrap in (lambda step: step, fg.graph_step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1)).cuda()
        optimizer = optimizer_of(model.parameters())

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = wrap(step)
        inputs = torch.randn(8, 32, 64, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        torch.manual_seed(2)
        results.append([run(x).item() for x in inputs])
    assert results[0] == results[1], run
    assert run.replayed == (7 if can_be else 0), run


class _Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.asks = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * 2 if self.asks and bool((y > 0).any()) else y


def test_what_cannot_be_recorded_runs_as_it_is() -> None:
    module = _Reads().cuda()
    graphed = fg.cuda_graph(module)
    x = torch.randn(4, 16, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graphed(x), module(x))
        module.asks = True
        for _ in range(4):
            assert torch.equal(graphed(x), module(x))
        x = torch.randn(4, 16, device="cuda")  # torch can draw again behind a recording that has failed
        module.asks = False
        assert torch.equal(graphed(x), module(x))
    assert "test_graphs.py:" in str(graphed)


class _OldGraph:
    """Dies with a graph of torch's, in a cycle."""

    def __init__(self) -> None:
        self.itself = self
        self.graph = torch.cuda.CUDAGraph()
        x = torch.zeros(16, device="cuda")
        with torch.cuda.graph(self.graph):
            x += 1


def test_old_graphs_do_not_die_in_a_recording() -> None:
    thresholds = gc.get_threshold()

    def run(x: Tensor) -> Tensor:
        gc.set_threshold(1)
        return x + len([[each] for each in range(100)])

    graphed = fg.cuda_graph(run)
    x = torch.randn(16, device="cuda")
    try:
        for _ in range(6):
            gc.set_threshold(0)
            _OldGraph()
            assert torch.equal(graphed(x), x + 100)
    finally:
        gc.set_threshold(*thresholds)
    assert graphed.recorded == 1


def test_a_graph_outlives_the_kernels_that_it_launches() -> None:
    """And kernels that die while it is captured do it no harm."""
    x = torch.randn(64, 512, device="cuda")
    kernel, other = fg.kernel(lambda x: x.tanh() + 1), fg.kernel(lambda x: x.sigmoid() - 2)
    wanted = kernel(x)
    other(x)
    gc.collect()  # graphs of earlier tests, which must not be destroyed during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forget_programs()
        del other
        gc.collect()
        result = kernel(x)
    del kernel
    gc.collect()
    result.zero_()
    graph.replay()
    assert torch.equal(result, wanted)


def test_a_function_that_cannot_be_recorded_spares_the_next() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _Reads(), nn.Linear(16, 16)
            self.first.asks = True

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first(x) if x.shape[0] == 4 else x)
            return y

    module = Both().cuda()
    graphed = fg.cuda_graph(module)
    with torch.no_grad():
        for rows in (4, 4, 4, 8, 8, 8):
            x = torch.randn(rows, 16, device="cuda")
            assert torch.equal(graphed(x), module(x))
    assert graphed.recorded == 1


def test_graphs_are_recorded_again_when_none_is_left() -> None:
    """Workspaces of libraries, which were made in a recording, still lie where the graphs before did."""

    def run(x: Tensor, fails: bool) -> Tensor:
        y = x @ x
        if fails and torch.cuda.is_current_stream_capturing():
            raise ValueError("behind the launch")
        return y

    graphed = fg.cuda_graph(run)
    x = torch.ones(64, 64, device="cuda")
    for _ in range(3):
        for fails in (False, True, False):
            for _ in range(3):
                assert torch.equal(graphed(x, fails), torch.full_like(x, 64))
        assert graphed.recorded == 1, graphed
        graphed.forget()
        torch.randn(4, device="cuda")  # torch can draw


def test_weights_that_move_or_change() -> None:
    model = _model("Llama").eval()
    fg.patch(model, cuda_graphs=True)
    plain = _model("Llama").eval()
    fg.patch(plain)
    ids = torch.randint(1, 997, (2, 8), device="cuda")

    def change(kind: str, each: Any) -> None:
        torch.manual_seed(5)
        linear = each.model.layers[1].mlp.down_proj
        if kind == "in place":
            linear.weight.data.mul_(1.5)
        elif kind == "data":
            linear.weight.data = torch.randn_like(linear.weight)
        elif kind == "parameter":
            linear.weight = nn.Parameter(torch.randn_like(linear.weight))
        elif kind == "module":
            each.model.layers[1].mlp.down_proj = nn.Linear(256, 128, bias=False, device="cuda", dtype=torch.bfloat16)
        elif kind == "dtype":
            each.half()
        elif kind == "moved":
            each.cpu()
            torch.cuda.empty_cache()
            each.cuda()
        elif kind == "hook":
            linear.register_forward_hook(lambda _module, _args, result: result * 0.5)

    for kind in ("none", "in place", "data", "parameter", "module", "dtype", "moved", "hook"):
        change(kind, model)
        change(kind, plain)
        expected = _generated(plain, ids, disable_compile=True)
        for _ in range(2):
            assert torch.equal(_generated(model, ids), expected), kind


def test_threads_and_streams() -> None:
    kernel = fg.kernel(lambda x, y: torch.nn.functional.gelu(x) * y)
    graphed = fg.cuda_graph(kernel)
    wrong: list[int] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            for number in range(30):
                x, y = torch.full((512, 512), float(seed + number), device="cuda"), torch.ones(512, 512, device="cuda")
                if not torch.equal(graphed(x, y), kernel(x, y)):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert graphed.replayed  # how many depends on how the threads meet


def test_graphs_give_their_memory_back() -> None:
    model = _model("Llama").train()
    ids = torch.randint(1, 997, (64, 512), device="cuda")
    report = fg.patch(model)

    def used() -> int:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        return torch.cuda.memory_allocated()

    before = used()
    report.cuda_graphs = True
    most = used()
    report.cuda_graphs = False
    assert used() - before < 0.5 * (most - before)  # cuBLAS keeps its workspaces
