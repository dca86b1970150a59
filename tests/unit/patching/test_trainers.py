"""Patched models in PEFT, accelerate and the ``Trainer`` of ``transformers`` give the results of unpatched ones."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusegen as fg
from fusegen.integrations.patch.report import Report
from tests.unit.patching.models import IDS, small_model, transformers

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

_EXAMPLE = Path(__file__).parents[3] / "examples" / "fine_tune.py"
_TARGETS = ["q_proj", "v_proj", "down_proj"]
_ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, init_lora_weights=False, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def with_adapters(model: Any, kind: str = "LoRA") -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, _ADAPTERS[kind]())


def patched(is_patched_first: bool, kind: str = "LoRA") -> Any:
    """A model with adapters, patched before or after they are added."""
    model = small_model("Llama")
    if is_patched_first:
        fg.patch(model)
    model = with_adapters(model, kind)
    if not is_patched_first:
        fg.patch(model)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def steps(model: Any) -> list[tuple[float, list[Tensor]]]:
    """The losses and gradients of three steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in parameters]))
        optimizer.step()
    return found


ORDERS = pytest.mark.parametrize("is_patched_first", [True, False])


@ORDERS
@pytest.mark.parametrize("kind", ["LoRA", *(pytest.param(name, marks=pytest.mark.deep) for name in ("DoRA", "IA3"))])
def test_adapters_train_alike(is_patched_first: bool, kind: str) -> None:
    same(steps(patched(is_patched_first, kind)), steps(with_adapters(small_model("Llama"), kind)))


@ORDERS
def test_adapters_are_merged_and_turned_off(is_patched_first: bool) -> None:
    model, base = patched(is_patched_first), logits(small_model("Llama"))
    expected = logits(with_adapters(small_model("Llama")))
    same(logits(model), expected)
    model.merge_adapter()
    same(logits(model), expected)
    model.unmerge_adapter()
    same(logits(model), expected)
    with model.disable_adapter():
        same(logits(model), base)
    same(logits(model.merge_and_unload()), expected)


@ORDERS
def test_the_active_adapter_counts(is_patched_first: bool) -> None:
    plain, model = with_adapters(small_model("Llama")), patched(is_patched_first)
    for each in (plain, model):
        torch.manual_seed(2)
        each.add_adapter("second", _ADAPTERS["LoRA"]())
    for name in ("second", "default"):
        plain.set_adapter(name)
        model.set_adapter(name)
        same(logits(model), logits(plain))


def test_files_of_adapters_fit_patched_and_unpatched_models(tmp_path: Path) -> None:
    model = patched(is_patched_first=True)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    for is_patched in (True, False):
        base = small_model("Llama")
        if is_patched:
            fg.patch(base)
        same(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapter")), expected)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    same(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")), expected)


@ORDERS
def test_accelerate_prepares_and_restores_a_patched_model(is_patched_first: bool, tmp_path: Path) -> None:
    accelerator, model = accelerate.Accelerator(cpu=True), small_model("Llama")
    if is_patched_first:
        fg.patch(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if not is_patched_first:
        fg.patch(model)

    def losses(count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = model(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            found.append(loss.item())
        return found

    expected = [loss for loss, _ in steps(small_model("Llama"))]
    first = losses(1)
    accelerator.save_state(tmp_path)
    same(first + losses(2), expected)
    accelerator.load_state(tmp_path)
    same(losses(2), expected[1:])


def trainer(model: Any, folder: Path, make: Callable[[], Any] | None = None, **settings: Any) -> Any:
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS.repeat(2, 1)]
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "max_steps": 4, "learning_rate": 1e-2}
    arguments = transformers.TrainingArguments(folder, per_device_train_batch_size=2, **fixed, **settings)
    return transformers.Trainer(model, arguments, model_init=make, train_dataset=rows, eval_dataset=rows)


def trained(model: Any, folder: Path, make: Callable[[], Any] | None = None, **settings: Any) -> list[float]:
    """The losses of four steps of a ``Trainer``, and that of the evaluation after them."""
    found = trainer(model, folder, make, save_strategy="no", **settings)
    found.train()
    losses = [entry["loss"] for entry in found.state.log_history if "loss" in entry]
    return [*losses, found.evaluate()["eval_loss"]]


def test_a_trainer_trains_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    expected, model, again = small_model("Llama"), small_model("Llama"), small_model("Llama")
    losses = trained(expected, tmp_path)
    for each in (model, again):
        fg.patch(each)
    whole = trainer(model, tmp_path, save_steps=2)
    whole.train()
    same([entry["loss"] for entry in whole.state.log_history if "loss" in entry], losses[:-1])
    trainer(again, tmp_path, save_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for each in (model, again, loaded):
        same(list(each.parameters()), list(expected.parameters()))


def resumed(model: Any, folder: Path) -> list[float]:
    """The losses of a run of four steps that continues from its second checkpoint."""
    found = trainer(model, folder, save_steps=2)
    found.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.mark.parametrize("is_patched_first", [True, False])
def test_a_run_resumes_with_the_patch_added_or_left_out(is_patched_first: bool, tmp_path: Path) -> None:
    first, second, expected = (small_model("Llama") for _ in range(3))
    report = fg.patch(first if is_patched_first else second)
    trainer(first, tmp_path, save_steps=2).train()
    same(resumed(second, tmp_path), trained(expected, tmp_path)[:-1])
    same(list(second.parameters()), list(expected.parameters()))
    assert all(row.fused for row in report.rows)


@ORDERS
def test_a_run_of_adapters_resumes(is_patched_first: bool, tmp_path: Path) -> None:
    trainer(patched(is_patched_first), tmp_path, save_steps=2).train()
    same(resumed(patched(is_patched_first), tmp_path), trained(with_adapters(small_model("Llama")), tmp_path)[:-1])


class Reports(transformers.TrainerCallback):
    """Keeps the state of a patch's report after each step."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.found: list[bool] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append(all(row.fused for row in self.report.rows))


def test_the_report_is_that_of_the_run_so_far(tmp_path: Path) -> None:
    report = fg.patch(model := small_model("Llama"))
    run = trainer(model, tmp_path, save_strategy="no")
    run.add_callback(steps := Reports(report))
    assert {row.reason for row in report.rows} == {"not called yet"}
    run.train()
    assert steps.found == [True] * 4


def test_a_model_that_the_trainer_makes_is_patched_there(tmp_path: Path) -> None:
    reports = []

    def make() -> Any:
        reports.append(fg.patch(model := small_model("Llama")))
        return model

    same(trained(None, tmp_path, make), trained(None, tmp_path, lambda: small_model("Llama")))
    assert all(row.fused for row in reports[-1].rows)


@pytest.mark.deep
def test_steps_of_a_compiled_run_are_reported_as_without_kernels(tmp_path: Path) -> None:
    report = fg.patch(model := small_model("Llama"))
    run = trainer(model, tmp_path, save_strategy="no", torch_compile=True, torch_compile_backend="eager")
    run.train()
    assert {row.reason for row in report.rows} == {"not called yet"}
    run.evaluate()
    assert all(row.fused for row in report.rows)


def test_a_trainer_that_checkpoints_activations(tmp_path: Path) -> None:
    model = small_model("Llama")
    report = fg.patch(model)
    expected = trained(small_model("Llama"), tmp_path, activation_checkpointing=True)
    same(trained(model, tmp_path, activation_checkpointing=True), expected)
    layers = [row for row in report.rows if row.kind == "LlamaDecoderLayer"]
    assert [(row.count, row.fused) for row in layers] == [(2, True)]  # in the evaluation


def test_launches_of_a_fused_layer_and_of_its_parts_are_counted_once() -> None:
    """In training, checkpoints have the parts of a layer run alone; in evaluation, the layer is one kernel."""
    model = small_model("Llama")
    report = fg.patch(model)
    logits(model)
    counted = report.before, report.after
    model.activation_checkpointing_enable()
    model.train()(IDS, use_cache=False).logits.sum().backward()
    assert (report.before, report.after) == counted
    assert {"LlamaDecoderLayer", "LlamaMLP"} <= {row.kind for row in report.rows if row.fused}


def fine_tune(patch: pytest.MonkeyPatch, *options: str) -> None:
    """Runs the example of fine-tuning on a model of one layer."""
    patch.setattr(sys, "argv", ["fine_tune.py", "--layers", "1", "--tokens", "16", "--steps", "1", *options])
    runpy.run_path(str(_EXAMPLE), run_name="__main__")


def test_the_example_of_fine_tuning_stores_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fine_tune(monkeypatch, "--lora", "--accumulate", "2", "--no-compile", "--out", str(tmp_path / "run.json"))
    figures = {row["what"]: row for row in json.loads((tmp_path / "run.json").read_text("utf-8"))["rows"]}
    assert "LlamaDecoderLayer" in capsys.readouterr().out
    assert figures["losses, largest difference from eager's"]["patched"] < 1e-4
    assert all(figures["tokens a second"][variant] > 0 for variant in ("eager", "patched"))


def test_the_example_of_fine_tuning_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="pip install peft"):
        fine_tune(monkeypatch, "--lora")


def test_the_example_of_fine_tuning_refuses_a_short_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short", encoding="utf-8")
    with pytest.raises(SystemExit, match="the text has 5 tokens"):
        fine_tune(monkeypatch, "--text", str(tmp_path / "text.txt"))
