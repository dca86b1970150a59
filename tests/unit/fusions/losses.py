"""Cross entropy from logits, and other losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.fusions.table import add, fusion, shaped

TOKENS, VOCABULARY = 7, 37


def labelled(*more: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Logits, labels of which two are ignored, and further inputs."""
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[2] = labels[5] = -100
    return torch.randn(TOKENS, VOCABULARY) * 3, labels, *(torch.randn(shape) for shape in more)


@fusion(labelled)
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


@fusion(labelled)
def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


@fusion(lambda: (torch.randn(TOKENS, VOCABULARY), torch.randint(0, VOCABULARY, (TOKENS,))))
def cross_entropy_ignore_index(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=3, reduction="none")


@fusion(labelled)
def cross_entropy_smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


@fusion(lambda: (*labelled(), torch.rand(VOCABULARY) + 0.5), trained=(0,))
def cross_entropy_weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weights, label_smoothing=0.2)


@fusion(lambda: (torch.randn(TOKENS, VOCABULARY), torch.softmax(torch.randn(TOKENS, VOCABULARY), -1)))
def cross_entropy_of_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


@fusion(labelled)
def cross_entropy_softcap(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(30.0 * torch.tanh(logits / 30.0), labels)


@fusion(labelled)
def cross_entropy_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -100).to(logits.dtype)
    z = torch.logsumexp(logits, -1).square() * kept
    return F.cross_entropy(logits, labels) + 1e-4 * z.sum() / kept.sum()


@fusion(lambda: (torch.randn(TOKENS, VOCABULARY).to(torch.bfloat16), labelled()[1]))
def cross_entropy_bf16(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


@fusion(lambda: (torch.randn(2, 4, VOCABULARY), torch.randint(0, VOCABULARY, (2, 4))))
def shifted_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """The next token's."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@fusion(labelled)
def cross_entropy_by_gather(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels >= 0
    chosen = logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(kept, torch.logsumexp(logits, -1) - chosen, 0.0).sum() / kept.sum()


@fusion(labelled, trained=())
def cross_entropy_and_its_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = labels >= 0
    log_probabilities = torch.log_softmax(logits, -1)
    classes = torch.arange(logits.shape[-1])
    gradient = (log_probabilities.exp() - (classes == labels[:, None]).to(logits.dtype)) * kept[:, None] / kept.sum()
    return F.nll_loss(log_probabilities, labels), gradient


@fusion(lambda: (torch.log_softmax(torch.randn(TOKENS, VOCABULARY), -1), labelled()[1]))
def nll_loss(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(log_probabilities, labels)


PAIR = shaped((TOKENS, 12), (TOKENS, 12))
add("mse_loss", lambda x, y: F.mse_loss(x, y), PAIR)
add("l1_loss", lambda x, y: F.l1_loss(x, y), PAIR)
add("huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.8), PAIR)
add("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), PAIR)


@fusion(lambda: (torch.randn(TOKENS, 12), torch.rand(TOKENS, 12)))
def bce_with_logits(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y)


@fusion(lambda: (torch.randn(TOKENS, 12), torch.rand(TOKENS, 12).round()), trained=(0,))
def focal_loss(x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    p_t = p * y + (1 - p) * (1 - y)
    return (F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - p_t) ** 2).mean()


@fusion(shaped((TOKENS, VOCABULARY), (TOKENS, VOCABULARY)))
def distillation_kl(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = F.log_softmax(student / 2.0, -1), F.log_softmax(teacher / 2.0, -1)
    return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean") * 4.0


@fusion(shaped((TOKENS, VOCABULARY), (TOKENS, VOCABULARY)))
def distillation_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    log_m = torch.log(0.5 * log_p.exp() + 0.5 * log_q.exp())
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1).mean()


@fusion(shaped((6,), (6,), (6,), (6,)))
def dpo_loss(chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor) -> Tensor:
    return -F.logsigmoid(0.1 * ((chosen - rejected) - (reference_chosen - reference_rejected))).mean()


@fusion(lambda: (*shaped((2, 9), (2, 9), (2, 1))(), torch.arange(9) < torch.tensor([[9], [5]])))
def grpo_loss(log_probabilities: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(log_probabilities - old)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


@fusion(PAIR)
def cosine_loss(x: Tensor, y: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(x, y, dim=-1)).mean()
