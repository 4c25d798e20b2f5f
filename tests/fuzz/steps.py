"""The training steps of a trial: what they compute, and the peak of each.

A step allocates what the program does and nothing else: gradients of the outputs are made before it, and the outputs live until
its end, as the memory model takes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat.device.measure import peak_bytes
from tests.correctness.harness import Wrap
from tests.fuzz.trial import Trial

STEPS = 2


@dataclass
class Trained:
    """Results of steps of SGD.

    Attributes:
        seen: Outputs and gradients of each step, and the state at the end, by name.
        peak_bytes: Peak of each step beyond the bytes held before it; empty if not measured.
        copied_bytes: Gradients of outputs that torch copies or adds outside of compiled code: gradients of views with gaps, of
            outputs that share memory, and of outputs that are leaves (torch adds what the graph gives, and copies the sum).
    """

    seen: dict[str, Any] = field(default_factory=dict)
    peak_bytes: list[int] = field(default_factory=list)
    copied_bytes: int = 0


def train(trial: Trial, wrap: Wrap, *, is_measured: bool = False) -> Trained:
    """Steps of SGD on the trial's program; with two losses each has a backward of its own, the first keeps the graph."""
    module, inputs = trial.program.module()
    gradients, call, result = _gradients(trial), wrap(module), Trained()
    optimizer = (
        _InHooks(module, inputs, trial.learning_rate)
        if trial.steps_in_hooks
        else _BehindTheStep(module, trial.learning_rate)
    )
    for step in range(STEPS):
        optimizer.begin()
        outputs: list[torch.Tensor] = []

        def run(outputs: list[torch.Tensor] = outputs) -> None:
            outputs += call(*inputs)
            _backward(outputs, gradients, trial.losses)

        if is_measured:
            result.peak_bytes.append(peak_bytes(run, "cpu").peak_bytes)
        else:
            run()
        result.copied_bytes = _copied_bytes(outputs)
        for k, output in enumerate(outputs):
            result.seen[f"step {step} output {k}"] = _kept(output)
        for name, parameter in module.named_parameters():
            gradient = optimizer.gradient_of(parameter)
            if gradient is None and "graph_break" in trial.program.kinds:  # a graph has gradients of all that it reads
                gradient = torch.zeros_like(parameter)
            result.seen[f"step {step} gradient of {name}"] = _kept(gradient)
        for k, tensor in enumerate(inputs):
            if tensor.requires_grad:
                gradient = optimizer.gradient_of(tensor)
                gradient = torch.zeros_like(tensor) if gradient is None else gradient
                result.seen[f"step {step} gradient of input {k}"] = _kept(gradient)
                tensor.grad = None
        optimizer.step()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        result.seen[f"final {name}"] = _kept(tensor)
    return result


class _BehindTheStep:
    """An optimizer as it is used mostly: gradients lie in `.grad` until it takes them."""

    def __init__(self, module: torch.nn.Module, learning_rate: float) -> None:
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.learning_rate = learning_rate

    def begin(self) -> None:
        """Before a step."""
        for parameter in self.trained:
            parameter.grad = None

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The leaf's gradient of this step."""
        return leaf.grad

    def step(self) -> None:
        """After a step."""
        for parameter in self.trained:
            if parameter.grad is not None:
                _descend(parameter, parameter.grad, self.learning_rate)


@torch.no_grad()
def _descend(parameter: torch.Tensor, gradient: torch.Tensor, learning_rate: float) -> None:
    """A step of SGD, no element of which is larger than the rate: where weights run away, rounding decides where to."""
    largest = float(torch.linalg.vector_norm(gradient, math.inf)) if gradient.numel() else 0.0
    if math.isfinite(largest):
        parameter.add_(gradient, alpha=-learning_rate / max(1.0, largest))


class _InHooks:
    """The same in hooks, one for each leaf, that free its gradient; they copy it into tensors which are there already."""

    def __init__(self, module: torch.nn.Module, inputs: Sequence[torch.Tensor], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        trained = [p for p in module.parameters() if p.requires_grad]
        self.copies = {leaf: torch.zeros_like(leaf) for leaf in (*trained, *inputs) if leaf.requires_grad}
        self.calls = Counter[torch.Tensor]()
        self.trained = set(trained)
        for leaf in self.copies:
            leaf.register_post_accumulate_grad_hook(self._take)

    def _take(self, leaf: torch.Tensor) -> None:
        if leaf.grad is None:  # nothing depends on it; compiled code tells autograd so
            return
        self.calls[leaf] += 1
        assert self.calls[leaf] == 1, "the hooks of a leaf run twice in a step"
        with torch.no_grad():
            self.copies[leaf].copy_(leaf.grad)
            if leaf in self.trained:
                _descend(leaf, leaf.grad, self.learning_rate)
        leaf.grad = None

    def begin(self) -> None:
        """Before a step."""
        self.calls.clear()

    def gradient_of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the leaf's hook got in this step; None if the hook did not run."""
        return self.copies[leaf] if self.calls[leaf] else None

    def step(self) -> None:
        """Done already."""


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], losses: int) -> None:
    roots = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
    parts = [roots[:1], roots[1:]] if losses == 2 and len(roots) > 1 else [roots]
    for part in parts:
        torch.autograd.backward(*zip(*part, strict=True), retain_graph=part is not parts[-1])


def _gradients(trial: Trial) -> list[torch.Tensor]:
    """For each output a gradient of its shape and layout, with different elements."""
    program, gradients = trial.program, []
    for output in program.function()(*program.tensors()):
        gradient = torch.empty_like(output, requires_grad=False)
        gradient.copy_(torch.linspace(0.5, 1.5, max(1, output.numel()))[: output.numel()].reshape(output.shape))
        gradients.append(gradient)
    return gradients


def _copied_bytes(outputs: Sequence[torch.Tensor]) -> int:
    addresses = Counter(output.untyped_storage().data_ptr() for output in outputs)
    shared = [output for output in outputs if addresses[output.untyped_storage().data_ptr()] > 1]
    gapped = [output for output in outputs if not output.is_contiguous()]
    leaves = [output for output in outputs if output.is_leaf and output.requires_grad]
    return sum(_extent_bytes(output) for output in [*shared, *gapped, *leaves, *leaves])


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last, gaps included: torch gives the copy of a gradient the output's strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
