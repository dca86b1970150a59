"""torch.autocast around a call, and inside of a kernel's function: operations have the dtypes that they have in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusegen as fg
from fusegen.errors import TraceError
from tests.unit.eager import randn, same

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
TARGETS = {"cpu": "cpu", "cuda": "sm_90a"}


@contextmanager
def autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """As torch.autocast, which does nothing where there is no such device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


Operation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]

UNARY = """
    abs acos acosh amax arccos arcsin asin asinh atan ceil cos cosh deg2rad erf exp exp2 expm1 frac isnan log log10 log1p log2 logit
    mean neg norm prod rad2deg reciprocal relu round rsqrt sigmoid sign sin sinc sinh sqrt square std sum t tan tanh trace tril var
"""
BINARY = """
    add atan2 cdist copysign dist div eq fmax hypot kron logaddexp matmul maximum mm mul remainder sub true_divide xlogy
"""
_OPERATIONS: dict[str, Operation] = {
    # The operands: matrices x and y, a vector v, a batch of matrices c and a matrix of integers i.
    "linear": lambda x, y, v, c, i: F.linear(x, y, v),
    "linear of three dtypes": lambda x, y, v, c, i: F.linear(x.half(), y.bfloat16(), v.float()),
    "addmm": lambda x, y, v, c, i: torch.addmm(v.float(), x, y),
    "bmm": lambda x, y, v, c, i: torch.bmm(c, c.float()),
    "baddbmm": lambda x, y, v, c, i: torch.baddbmm(c.float(), c, c),
    "of a matrix and a vector": lambda x, y, v, c, i: (torch.mv(x, v), x @ v),
    "dot, inner": lambda x, y, v, c, i: (torch.dot(v, v), torch.inner(v, v)),
    "vecdot": lambda x, y, v, c, i: torch.linalg.vecdot(x, y),
    "outer": lambda x, y, v, c, i: torch.outer(v, v),
    "addr": lambda x, y, v, c, i: torch.addr(x, v, v),
    "multi_dot": lambda x, y, v, c, i: (torch.linalg.multi_dot([x, x, x]), torch.chain_matmul(x, x)),
    "tensordot": lambda x, y, v, c, i: [torch.tensordot(x, x, dims) for dims in (0, 1, 2, ([0], [1]))],
    "einsum of matrices": lambda x, y, v, c, i: (torch.einsum("ij,jk->ik", x, y), torch.einsum("ij,jk,kl->il", x, y, x)),
    "einsum that sums": lambda x, y, v, c, i: [torch.einsum(e, x, y) for e in ("ij,ij->", "ij,ij->i", "ij,ij->ij")],
    "einsum of one": lambda x, y, v, c, i: (torch.einsum("ij->i", x), torch.einsum("ii->i", x), torch.einsum("i,j->ij", v, v)),
    "einsum by batches": lambda x, y, v, c, i: torch.einsum("bij,bij->b", c, c),
    "layer_norm": lambda x, y, v, c, i: F.layer_norm(x, (8,), v, v),
    "layer_norm of float32 weights": lambda x, y, v, c, i: F.layer_norm(x, (8,), v.float(), v.float()),
    "rms_norm": lambda x, y, v, c, i: F.rms_norm(x, (8,), v.float()),
    "group_norm": lambda x, y, v, c, i: F.group_norm(c, 2, v, v),
    "batch_norm": lambda x, y, v, c, i: F.batch_norm(c, None, None, v, v, True),
    "instance_norm": lambda x, y, v, c, i: F.instance_norm(c),
    "normalize": lambda x, y, v, c, i: (F.normalize(x), F.cosine_similarity(x, y), F.pairwise_distance(x, y)),
    "norms": lambda x, y, v, c, i: (x.norm(dim=1), torch.linalg.norm(x, dim=1), torch.linalg.vector_norm(x), x.norm("fro")),
    "softmax": lambda x, y, v, c, i: (F.softmax(x, -1), x.softmax(0), torch.special.softmax(x, -1), F.softmin(x, -1)),
    "log_softmax": lambda x, y, v, c, i: (F.log_softmax(x, -1), torch.special.log_softmax(x, -1)),
    "dtypes that are named": lambda x, y, v, c, i: (
        F.softmax(x, -1, dtype=BRAIN), x.sum(-1, dtype=BRAIN), torch.sum(x, dtype=torch.float64), x.cumsum(0, dtype=HALF),
        x.prod(0, dtype=torch.float64), torch.linalg.vector_norm(x, dtype=FULL),
    ),
    "scans": lambda x, y, v, c, i: (x.cumsum(0), x.cumprod(0)),
    "logsumexp": lambda x, y, v, c, i: (torch.logsumexp(x, -1), torch.special.logsumexp(x, -1)),
    "var_mean": lambda x, y, v, c, i: torch.var_mean(x, 0),
    "division by a tensor": lambda x, y, v, c, i: (2.0 / x, 1 / x, 2 / i),
    "powers": lambda x, y, v, c, i: (x**2, 2**x, x**0.5, x**y, torch.float_power(x, 2)),
    "operators": lambda x, y, v, c, i: (x / 2, 1 - x, x // 2, 2 // x, x % 2, -x, x * y, x / y, x @ y),
    "of integers": lambda x, y, v, c, i: (i.sum(), i**2, i.exp(), torch.cat([i, i]), i @ i, i.reciprocal(), torch.cat([x, i])),
    "of float64": lambda x, y, v, c, i: (x.double().exp(), x.double() @ x.double(), F.softmax(x.double(), -1), x.double().sum()),
    "float64 among others": lambda x, y, v, c, i: torch.addcmul(x.double(), x, y),
    "addcmul, addcdiv": lambda x, y, v, c, i: (torch.addcmul(x, y, v), torch.addcdiv(x, y, v)),
    "cat": lambda x, y, v, c, i: (torch.cat([x, y]), torch.stack([x, y, x]), torch.vstack([x, y]), torch.column_stack([x, y])),
    "activations": lambda x, y, v, c, i: (F.gelu(x), F.silu(x), F.glu(x), F.mish(x), F.elu(x), F.softplus(x), F.logsigmoid(x)),
    "prelu": lambda x, y, v, c, i: F.prelu(x, v.float()),
    "where": lambda x, y, v, c, i: (torch.where(x > 0, x, y), x.masked_fill(x > 0, 0.0), x.clamp(max=y), torch.lerp(x, x, 0.5)),
    "in place": lambda x, y, v, c, i: ((x * 1).exp_(), (x * 1).mul_(x), (x * 1).pow_(2)),
    "embedding": lambda x, y, v, c, i: (F.embedding(i, x), torch.take_along_dim(x, i, 1)),
    "dropout": lambda x, y, v, c, i: F.dropout(x, 0.5),
    "pad": lambda x, y, v, c, i: [F.pad(c, (1, 1, 1, 1), mode) for mode in ("constant", "reflect", "replicate", "circular")],
    "pools": lambda x, y, v, c, i: (F.avg_pool2d(c, 2), F.max_pool2d(c, 2)),
    "pools in three dims": lambda x, y, v, c, i: (F.avg_pool3d(c.unsqueeze(0), 2), F.max_pool3d(c.unsqueeze(0), 2)),
    "interpolate": lambda x, y, v, c, i: F.interpolate(c, scale_factor=2),
    "losses of distances": lambda x, y, v, c, i: (F.mse_loss(x, y), F.l1_loss(x, y, reduction="none")),
    "smooth losses": lambda x, y, v, c, i: (F.smooth_l1_loss(x, y), F.huber_loss(x, y)),
    "losses of logarithms": lambda x, y, v, c, i: (F.kl_div(x, y), F.poisson_nll_loss(x, y), F.multilabel_soft_margin_loss(x, y)),
    "binary_cross_entropy_with_logits": lambda x, y, v, c, i: F.binary_cross_entropy_with_logits(x, y),
    "losses of margins": lambda x, y, v, c, i: (
        F.triplet_margin_loss(x, y, x), F.margin_ranking_loss(v, v, v), F.hinge_embedding_loss(x, y), F.soft_margin_loss(x, y),
    ),
    "cross_entropy of probabilities": lambda x, y, v, c, i: F.cross_entropy(x, y),
}  # fmt: skip


def of_one(name: str) -> Operation:
    return lambda x, y, v, c, i: getattr(torch.Tensor, name)(x)


def of_two(name: str) -> Operation:
    return lambda x, y, v, c, i: getattr(torch, name)(x, y)


OPERATIONS = {n: of_one(n) for n in UNARY.split()} | {n: of_two(n) for n in BINARY.split()} | _OPERATIONS


def attention(need_weights: bool) -> Operation:
    """torch's layer, of one weight for all projections, with a mask of floats."""

    def attend(x: Tensor, _y: Tensor, v: Tensor, c: Tensor, _i: Tensor) -> Any:
        weights, bias = x.repeat(3, 1), v.repeat(3)
        layer = F.multi_head_attention_forward
        return layer(
            c, c, c, 8, 2, weights, bias, None, None, False, 0.0, x, v, need_weights=need_weights, attn_mask=x[:4, :4]
        )[: 1 + need_weights]  # fmt: skip

    return attend


WITHOUT_FAKES: dict[str, tuple[Operation, tuple[torch.dtype, ...]]] = {
    # Operations that fake tensors of a GPU refuse, and the dtypes of torch's table for bfloat16.
    "cross": (lambda x, y, v, c, i: torch.cross(x[:3], x[:3], dim=0), (BRAIN,)),
    "linalg.cross": (lambda x, y, v, c, i: torch.linalg.cross(x[:, :3], x[:, :3]), (BRAIN,)),
    "classes": (lambda x, y, v, c, i: (F.nll_loss(x, i[0]), F.cross_entropy(x, i[0], v), F.nll_loss(x, i[0], v)), (FULL,) * 3),
    "cosine_embedding_loss": (lambda x, y, v, c, i: F.cosine_embedding_loss(x, y, v.sign()), (FULL,)),
    "gaussian_nll_loss": (lambda x, y, v, c, i: F.gaussian_nll_loss(x, y, x.exp()), (FULL,)),
    "attention": (lambda x, y, v, c, i: F.scaled_dot_product_attention(c, c.float(), c, x.float()), (BRAIN,)),
    "attention of heads": (attention(need_weights=False), (BRAIN,)),
    "attention and its weights": (attention(need_weights=True), (BRAIN, FULL)),
}


def operands(kind: str, first: torch.dtype, second: torch.dtype) -> list[Tensor]:
    matrices = [torch.ones(8, 8, dtype=first, device=kind), torch.ones(8, 8, dtype=second, device=kind)]
    others = [torch.ones(8, dtype=first, device=kind), torch.ones(4, 8, 8, dtype=first, device=kind)]
    return [*matrices, *others, torch.ones(8, 8, dtype=torch.int64, device=kind)]


def dtypes(result: Any) -> tuple[torch.dtype, ...]:
    return tuple(r.dtype for r in result) if isinstance(result, (tuple, list)) else (result.dtype,)


@contextmanager
def named(operation: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"operation: {operation}")
        raise


Dtypes = dict[str, tuple[torch.dtype, ...]]


def eager(kind: str, operations: dict[str, Operation], first: torch.dtype, second: torch.dtype, lower: torch.dtype) -> Dtypes:
    """The dtypes that torch gives; on a GPU those of tensors without elements."""
    with FakeTensorMode() if kind == "cuda" else nullcontext():
        given = operands(kind, first, second)
        with autocast(kind, lower):
            return {name: dtypes(operation(*given)) for name, operation in operations.items()}


def traced(kind: str, operations: dict[str, Operation], first: torch.dtype, second: torch.dtype, lower: torch.dtype) -> Dtypes:
    """The dtypes that a kernel's function sees; one trace is for all operations."""
    found = {}

    def kernel(x: Tensor, y: Tensor, v: Tensor, c: Tensor, i: Tensor) -> Tensor:
        for name, operation in operations.items():
            with named(name):
                found[name] = dtypes(operation(x, y, v, c, i))
        return x * 1

    with autocast(kind, lower):
        fg.kernel(kernel).lower(*operands("meta", first, second), target=TARGETS[kind])
    return found


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("first", "second", "lower"), [(FULL, FULL, BRAIN), (BRAIN, FULL, BRAIN), (HALF, HALF, HALF)])
@pytest.mark.filterwarnings("ignore")  # losses warn of operands of several shapes, and divergences warn too
def test_operations_have_eager_s_dtypes(kind: str, first: torch.dtype, second: torch.dtype, lower: torch.dtype) -> None:
    found, wanted = (by(kind, OPERATIONS, first, second, lower) for by in (traced, eager))
    for name in OPERATIONS:
        assert found[name] == wanted[name], name


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.filterwarnings("ignore")
def test_operations_that_no_fake_tensor_takes(kind: str) -> None:
    operations = {name: operation for name, (operation, _) in WITHOUT_FAKES.items()}
    found = traced(kind, operations, BRAIN, BRAIN, BRAIN)
    for name, of_torch_s_table in {n: dtypes for n, (_, dtypes) in WITHOUT_FAKES.items()}.items():
        wanted = of_torch_s_table if kind == "cuda" else eager(kind, {name: operations[name]}, BRAIN, BRAIN, BRAIN)[name]
        assert found[name] == wanted, name


def test_operands_that_torch_refuses_under_autocast_are_refused() -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y])

    with autocast("cpu", BRAIN), pytest.raises(TraceError, match="autocast to bfloat16 does not convert float16"):
        fg.kernel(joined)(randn(4, 4, dtype=HALF), randn(4, 4, dtype=HALF))
    with autocast("cuda", BRAIN), pytest.raises(TraceError, match="binary_cross_entropy is unsafe"):
        fg.kernel(lambda x: F.binary_cross_entropy(x, x)).lower(torch.empty(4, 4, device="meta"), target="sm_90a")


# Calls.


def norm_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:]), weight, bias)


WEIGHTS = (randn(8, 16), randn(8))


def test_the_state_of_each_call_is_looked_at() -> None:
    """Also where calls are known by a check of torch's, from the third of one state on."""
    kernel, arguments = fg.kernel(norm_linear), (randn(4, 16), *WEIGHTS)
    for number in range(4):
        for lower in (None, BRAIN, HALF, BRAIN, None):
            with torch.autocast("cpu", lower or BRAIN, enabled=lower is not None):
                same(kernel(*arguments), norm_linear(*arguments), f"round {number} of {lower}")
                assert kernel(*arguments).dtype is (lower or FULL)


def test_autocast_of_another_kind_of_device_changes_nothing() -> None:
    kernel, arguments = fg.kernel(norm_linear), (randn(4, 16), *WEIGHTS)
    with autocast("cuda", BRAIN):
        assert kernel(*arguments).dtype is FULL


def nested(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast("cpu", BRAIN):
        inside = F.linear(x, weight, bias)
        with torch.autocast("cpu", enabled=False):
            apart = F.linear(x, weight)
    return inside, apart, F.linear(x, weight, bias)


def test_contexts_inside_of_a_function() -> None:
    kernel, arguments = fg.kernel(nested), (randn(4, 16), *WEIGHTS)
    for number in range(4):
        for enabled in (False, True):
            with torch.autocast("cpu", HALF, enabled=enabled):
                same(kernel(*arguments), nested(*arguments), f"round {number}, {enabled}")


def test_a_function_that_is_decorated() -> None:
    decorated: Callable[[Tensor], Tensor] = torch.autocast("cpu", BRAIN)(lambda x: x @ x.t())
    kernel, x = fg.kernel(decorated), randn(4, 4)
    same(kernel(x), decorated(x), "decorated")


def test_products_of_the_library_keep_their_dtype() -> None:
    """Torch computes a product in float32 that the function takes out of autocast, though the call is under it."""

    def product(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x

    kernel, x = fg.kernel(product), randn(64, 64)
    with torch.autocast("cpu", BRAIN):
        torch.testing.assert_close(kernel(x), product(x), rtol=1e-5, atol=1e-5)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Softmax(-1))


def trained(model: nn.Module, function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """A loss and its gradients, in a scaled backward pass outside of autocast, as torch's guide has it."""
    torch.manual_seed(1)
    x, wanted = torch.randn(4, 16, requires_grad=True), torch.rand(4, 16)
    model.zero_grad()
    with torch.autocast("cpu", BRAIN):
        loss = F.mse_loss(function(x, wanted), wanted)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss).backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_gradients_are_eager_s() -> None:
    model = network()
    wanted = trained(model, lambda x, _: model(x))
    found = trained(model, fg.kernel(lambda x, _: model(x)))
    assert len(found) == len(wanted) == 8
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype is other.dtype is FULL
        torch.testing.assert_close(one, other, rtol=5e-2, atol=2e-2 * float(other.abs().max()), msg=f"gradient {number}")


def test_passes_of_a_call_under_autocast() -> None:
    x, weight, bias = randn(4, 16), *WEIGHTS
    passes = fg.vjp(fg.kernel(norm_linear), x, weight, bias)
    assert passes.forward(x, weight, bias)[0].dtype is FULL
    with torch.autocast("cpu", BRAIN):
        y, saved = passes.forward(x, weight, bias)
    assert y.dtype is BRAIN
    assert {g.dtype for g in passes.backward(saved, torch.ones_like(y)) if g is not None} == {FULL}
