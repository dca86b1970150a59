"""The connection of a kernel's two passes, as data: where the values of each come from, and where its results go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wiring:
    """Connects a forward pass, a backward pass and autograd.

    Attributes:
        name: of the backward pass, for messages.
        inputs: names of the values that the forward pass takes.
        results: the number of the kernel's own results, which are the first of the forward pass.
        floats: those of them by which the backward pass takes a gradient.
        tensors: names of the tensors that the backward pass takes: the saved ones, then a gradient for each of ``floats``.
        saved: the source of each saved tensor: an input of the forward pass by name, or a result of it by number.
        sizes: names of the sizes that the backward pass takes behind its tensors.
        numbers: names of the run-time numbers that it takes last, which are inputs of the forward pass.
        gradients: inputs of the forward pass that have gradients, each with the source: a result of the backward pass by number,
            or the name of one of its tensors, where a gradient passes through unchanged.
        key: the input of the forward pass that is the key of its random bits; None where none is drawn.
    """

    name: str
    inputs: tuple[str, ...]
    results: int
    floats: tuple[int, ...]
    tensors: tuple[str, ...]
    saved: tuple[str | int, ...]
    sizes: tuple[str, ...]
    numbers: tuple[str, ...]
    gradients: tuple[tuple[str, str | int], ...]
    key: str | None

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of all values that the backward pass takes."""
        return (*self.tensors, *self.sizes, *self.numbers)
