"""Checks that run in two processes, the ranks of a group of gloo, or of NCCL on two GPUs. Each rank reports what failed."""

from __future__ import annotations

import copy
import io
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn

import fusegen as fg
import fusegen.nn as fnn
from fusegen.errors import ArgumentError, TraceError
from fusegen.parallel import ColumnParallelLinear, ParallelAttention, ParallelGatedMLP, RowParallelLinear
from tests.unit.eager import randn, same

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds a check that both ranks run, from the same seed."""
    CHECKS[function.__name__] = function
    return function


def failures(folder: Path, names: Sequence[str], kind: str = "cpu") -> dict[str, str]:
    """Runs checks in two processes, on a kind of device: the tracebacks of those that failed, of both ranks."""
    spawn(_rank, (folder, names, kind), nprocs=2)
    reports = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    found = {name: "".join(report[name] for report in reports) for name in names}
    return {name: text for name, text in found.items() if text}


def _rank(rank: int, folder: Path, names: Sequence[str], kind: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_device(torch.device(kind, rank if kind == "cuda" else 0))
    settings = {"init_method": f"file://{folder / 'group'}", "rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **settings)
    report = dict.fromkeys(names, "")
    for name in names:
        torch.manual_seed(0)
        try:
            CHECKS[name]()
        except Exception:
            report[name] = f"rank {rank}:\n{traceback.format_exc()}"
    torch.save(report, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor, along the dim in which it is longer."""
    dims = [dim for dim, (a, b) in enumerate(zip(full.shape, like.shape, strict=True)) if a != b]
    return full.chunk(2, dims[0])[dist.get_rank()] if dims else full


def agree(part: nn.Module, whole: nn.Module, *arguments: Tensor | None) -> None:
    """Results and gradients of a split module are those of the whole one: by the arguments on all ranks, by parameters in parts."""
    found, wanted = part(*arguments), whole(*arguments)
    same(found, wanted)
    weights = torch.linspace(0.5, 2, wanted.numel()).view(wanted.shape)
    inputs = [a for a in arguments if a is not None and a.requires_grad]
    names = [name for name, _ in part.named_parameters()]
    ours = torch.autograd.grad((found * weights).sum(), [*inputs, *part.parameters()])
    theirs = torch.autograd.grad((wanted * weights).sum(), [*inputs, *map(whole.get_parameter, names)])
    for name, one, other in zip((*["argument"] * len(inputs), *names), ours, theirs, strict=True):
        same(one, part_of(other, one), name)


def block() -> tuple[fnn.GatedMLP, Tensor]:
    return fnn.GatedMLP(16, 24, bias=True), randn(2, 5, 16).requires_grad_()


class Pair(nn.Module):
    """Columns, then rows."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@check
def linear_layers() -> None:
    whole = Pair(nn.Linear(16, 24), nn.Linear(24, 8))
    part = Pair(ColumnParallelLinear.from_module(whole.first), RowParallelLinear.from_module(whole.second))
    assert part.first.weight.shape == (12, 16) and part.second.weight.shape == (8, 12)
    agree(part, whole, randn(5, 16).requires_grad_())


@check
def gated_mlp() -> None:
    whole, x = block()
    agree(ParallelGatedMLP.from_module(whole), whole, x)


@check
def attention() -> None:
    whole = fnn.Attention(16, 4, 2, bias=True, out_bias=True, qk_norm=True, is_causal=False)
    nn.init.normal_(whole.q_norm.weight)
    by_heads = randn(4, 5, 5).requires_grad_()
    agree(ParallelAttention.from_module(whole), whole, randn(2, 5, 16).requires_grad_(), None, None, by_heads)


@check
def dtensors() -> None:
    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (2,))
    whole, x = block()
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    split = parallelize_module(copy.deepcopy(whole), mesh, plan)
    part = ParallelGatedMLP.from_module(split, mesh)
    agree(part, whole, x)
    stored = split.gate_proj.weight
    assert isinstance(stored, DTensor) and part.gate_proj.weight.data_ptr() == stored.to_local().data_ptr()
    with pytest.raises(ArgumentError, match="placed as"):
        RowParallelLinear.from_module(split.gate_proj, mesh)


class Block(nn.Module):
    """A block in torch's modules, for `parallelize_module`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(16), nn.Linear(24, 16)
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_gradients(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(full(one.grad), other.grad, rtol=1e-3, atol=1e-4, msg=name)


def _mesh() -> DeviceMesh:
    return dist.device_mesh.init_device_mesh(torch.get_default_device().type, (2,))


@check
def kernels_of_local_tensors() -> None:
    kernel, x = fg.kernel(lambda x: F.gelu(x) * 2), randn(8, 16).requires_grad_()
    mesh = _mesh()
    sharded = distribute_tensor(x.detach(), mesh, [Shard(0)])
    sharded.requires_grad_()
    with pytest.raises(ArgumentError, match=r"(?s)'x' is a DTensor.*x\.to_local\(\)"):
        kernel(sharded)
    (wanted,) = torch.autograd.grad((F.gelu(x) * 2).sum(), x)
    by_map = local_map(kernel, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)
    by_hand = DTensor.from_local(kernel(sharded.to_local()), mesh, [Shard(0)])
    for found in (by_map(sharded), by_hand):
        same(full(found), F.gelu(x) * 2)
        same(full(torch.autograd.grad(found.sum(), sharded)[0]), wanted)


@check
def patched_blocks_in_parts() -> None:
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for is_patched_first in (True, False):
        whole, x = nn.Sequential(Block(), Block()), randn(4, 16)
        model = copy.deepcopy(whole)
        report = fg.patch(model) if is_patched_first else None
        for each in model:
            parallelize_module(each, _mesh(), plan)
        report = report or fg.patch(model)
        found, wanted = model(x), whole(x)
        same(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
        same_gradients(model, whole)
        assert {row.kind: row.fused for row in report.rows} == {"Block": False, "RMSNorm": True}, str(report)
    with pytest.raises(TraceError, match="computes with a DTensor"):
        fg.kernel(parallelize_module(Block(), _mesh(), plan))(x)


@check
def patched_models_of_transformers() -> None:
    from tests.unit.patching.models import IDS, small_model, transformers  # other checks start without transformers

    rank = str(dist.get_rank())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"})  # transformers reads them
    ids = IDS.to(torch.get_default_device())
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if rank == "0":
        small_model("Llama").save_pretrained(folder[0])
    dist.barrier()
    whole = transformers.LlamaForCausalLM.from_pretrained(folder[0]).to(ids.device)
    model = transformers.LlamaForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    dist.barrier()
    if rank == "0":
        shutil.rmtree(folder[0])
    report = fg.patch(model)
    found, wanted = (each(input_ids=ids, labels=ids) for each in (model, whole))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    found.loss.backward()
    wanted.loss.backward()
    same_gradients(model, whole)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    assert {"LlamaRMSNorm", "LlamaRotaryEmbedding", "ForCausalLMLoss"} <= {row.kind for row in report.rows if row.fused}


@check
def replicas_and_shards_of_patched_models() -> None:
    """A row of the batch on each rank; gradients are the means over the ranks."""
    from tests.unit.patching.models import IDS, small_model

    ids, rank = IDS.to(torch.get_default_device()), dist.get_rank()
    for kind in ("DDP", "FSDP2, patched first", "FSDP2, patched last"):
        model = small_model("Llama").train()
        whole = copy.deepcopy(model)
        report = None if kind.endswith("last") else fg.patch(model)
        called = nn.parallel.DistributedDataParallel(model) if kind == "DDP" else model
        if kind != "DDP":
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        report = report or fg.patch(model)
        mine = ids[rank : rank + 1]
        called(input_ids=mine, labels=mine).loss.backward()
        (sum(whole(input_ids=ids[i : i + 1], labels=ids[i : i + 1]).loss for i in range(2)) / 2).backward()
        same_gradients(model, whole)
        assert all(row.fused for row in report.rows), str(report)


@check
def torch_compile() -> None:
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    whole, x = block()
    part = ParallelGatedMLP.from_module(whole)
    compiled = torch.compile(part, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    found, wanted = compiled(x), whole(x)
    same(found, wanted)
    same(torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x))
    assert counts == [1, 1]  # forward and backward


@check
def autocast() -> None:
    whole, x = block()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found, wanted = ParallelGatedMLP.from_module(whole)(x), whole(x)
    assert found.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)


@check
def copies_and_files() -> None:
    whole, x = block()
    part = ParallelGatedMLP.from_module(whole)
    torch.save(part, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(part), torch.load(file, weights_only=False)):
        same(other(x), whole(x))


@check
def frozen_weights_stay_frozen() -> None:
    whole, _ = block()
    whole.up_proj.requires_grad_(False)
    part = ParallelGatedMLP.from_module(whole)
    assert [name for name, p in part.named_parameters() if not p.requires_grad] == ["up_proj.weight", "up_proj.bias"]


@check
def refused() -> None:
    split = ParallelAttention.from_module(fnn.Attention(16, 4))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    for call, says in (
        (lambda: ColumnParallelLinear.from_module(nn.Linear(4, 5)), "cannot be split over 2 ranks"),
        (lambda: RowParallelLinear.from_module(nn.Linear(5, 4)), "cannot be split over 2 ranks"),
        (lambda: ColumnParallelLinear.from_module(parametrized), "not a plain torch.nn.Linear"),
        (lambda: ParallelAttention.from_module(fnn.Attention(12, 3)), "num_attention_heads=3"),
        (lambda: ParallelAttention.from_module(fnn.Attention(16, 4, 1)), "num_key_value_heads=1"),
        (lambda: ParallelAttention.from_module(fnn.Attention(16, 4, p=0.1)), "dropout of attention weights"),
        (lambda: ParallelAttention.from_module(nn.MultiheadAttention(16, 4)), "not a fusegen.nn.Attention"),
        (lambda: ParallelGatedMLP.from_module(fnn.MLP(16, 4)), "not a fusegen.nn.GatedMLP"),
        (lambda: ColumnParallelLinear.from_module(nn.Linear(4, 4), dist.GroupMember.NON_GROUP_MEMBER), "that contains this rank"),
        # by its part it would broadcast over the heads of a rank
        (lambda: split(torch.ones(1, 3, 16), mask=torch.zeros(1, 2, 3, 3)), "must be the number of heads of all ranks"),
    ):
        with pytest.raises(ArgumentError, match=says):
            call()
