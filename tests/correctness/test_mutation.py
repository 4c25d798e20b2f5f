"""Mutation and aliasing: what the forward overwrites, what shares memory, and what the backward reads of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.correctness.harness import Case, Observed, Wrap, check, tensors_of, weighted_sum

Behaviour = Callable[[Tensor, Tensor, Tensor], Any]
"""Takes an activation that may be mutated (not a leaf), a trained weight and a buffer, all [8, 8]; returns outputs."""


def observe(behaviours: Mapping[str, Behaviour], wrap: Wrap) -> Observed:
    """Two steps of all behaviours as one compiled function; every tensor that went in or came out, and who aliases whom."""

    def together(inputs: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
        return {name: behaviour(*inputs[name]) for name, behaviour in behaviours.items()}

    function = wrap(together)
    leaves = {name: torch.randn(3, 8, 8) for name in behaviours}
    state = {name: (leaf[0].requires_grad_(), leaf[1].requires_grad_(), leaf[2]) for name, leaf in leaves.items()}
    state = {name: tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in ts) for name, ts in state.items()}
    seen: dict[str, Any] = {}
    for step in range(2):
        inputs = {name: (x.clone(), w, buffer) for name, (x, w, buffer) in state.items()}
        outputs = function(inputs)
        weighted_sum([outputs, [i[0] for i in inputs.values()]]).backward()
        for name, (x, w, buffer) in state.items():
            record = {"gradient of x": x.grad, "gradient of w": w.grad, "x": inputs[name][0], "buffer": buffer, "w": w}
            record |= {f"output {k}": tensor for k, tensor in enumerate(tensors_of(outputs[name]))}
            seen |= {f"{name}, step {step}: {what}": _copy(tensor) for what, tensor in record.items()}
            seen[f"{name}, step {step}: aliases"] = aliases([*inputs[name], *tensors_of(outputs[name])])
            x.grad = w.grad = None
    return seen


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def aliases(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Pairs that share memory, by position."""
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [(i, j) for j in range(len(places)) for i in range(j) if places[i] == places[j]]


# -- in-place operators on intermediate values ------------------------------------------------------------------------


def pointwise(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = (x @ w).add_(1).relu_()
    h = torch.sin(h * 0.1).mul_(buffer)
    return h.sin_() @ w


def indexed(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = (x @ w).sin()
    h[torch.tensor([0, 2, 2])] = x[:3].cos()
    h.index_put_((torch.tensor([1, 1]), torch.tensor([0, 3])), x[0, :2].exp(), accumulate=True)
    h.scatter_add_(1, torch.tensor([[0, 1], [2, 2]]), torch.sin(x[:2, :2]))
    return torch.sin(h * h) @ w


def masked(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = torch.sin(x @ w)
    h.masked_fill_(buffer > 0, 0.5)
    return torch.sin(h) @ w


def sliced(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, :4].copy_(torch.sin(x @ w)[:, 4:])
    h[:, 1:3] *= buffer[:, 1:3]
    h.diagonal().add_(torch.exp(x[0]))
    h[7].zero_()
    h.t()[2] = x[:, 2] * 2
    return torch.sin(h * x) @ w


# -- buffers ----------------------------------------------------------------------------------------------------------


def read_then_mutated(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sin((x @ w) * buffer.exp())
    buffer.mul_(0.5)
    return y


def mutated_between_reads(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    buffer.add_(0.1)
    first = buffer.sin()
    buffer.mul_(0.5)
    y = torch.sin((x @ w) * first * buffer.cos())
    buffer.sub_(x.detach() * 0.1)
    return torch.sin(y * torch.tanh(buffer))


def read_through_a_view(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    row = buffer.t()[1]
    y = torch.sin((x @ w) * row.exp() * buffer[2:3].expand(8, 8).cos())
    buffer.view(-1)[4:20].mul_(0.5)
    return y


def read_as_a_copy(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sin((x @ w) * buffer.clone()) * (buffer + 0) * (buffer * torch.ones_like(buffer)) * buffer.float().clone()
    buffer.mul_(0.5)
    return y


def rows_exchanged(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    old = buffer[0].clone()
    buffer[0] = buffer[1]
    buffer[1] = old
    return torch.sin((x @ w) * old) * buffer.sum(1).exp()


def running_mean(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sin((x @ w) - buffer.mean(0).tanh())
    buffer.lerp_(y.detach().mean(0).expand(8, 8), 0.1)
    return y * torch.cos(buffer)


def overwritten(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.sin((x @ w) * torch.sigmoid(buffer))
    buffer.copy_(y.detach() * 2)
    return torch.sin(y) @ w


def mutated_after_a_mask(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.where(buffer > 0, torch.sin(x @ w), x) * (buffer < 0.3)
    buffer.neg_()
    return y


# -- inputs and outputs that share memory -----------------------------------------------------------------------------


def input_mutated(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    y = torch.exp(x * 0.1) @ w
    x.mul_(2).add_(y)
    return torch.sin(y)


def input_mutated_and_returned(x: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.sigmoid(x) @ w
    x[1:3].mul_(2)
    x.t().add_(1)
    return x, torch.sin(y), x[2]


def copy_of_an_input_mutated(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    copy = x.clone()
    copy.mul_(2)[0].zero_()
    return torch.sin(copy @ w) * x


def inputs_returned(x: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    return x, torch.sin(x @ w), w, x.view(-1), x[1:3], w.t(), buffer, buffer[0]


def outputs_alias(x: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    h = torch.sin(x @ w)
    g = torch.sin(h * h)
    return h, h.view(-1), h[0], h.detach(), g[0], g[1:]


def base_is_not_returned(x: Tensor, w: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    h = torch.sin(x @ w)
    return h[0], h[1:].t(), torch.sin(h).unbind(0)[3]


def strided(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = torch.sin(x @ w)
    y = torch.sin(h[0].expand(8, 8)) * torch.sin(h).as_strided((8, 8), (1, 2), 3)
    y = y * torch.sin(h.diagonal()) * torch.sin(h.select(1, 2)) + h.unfold(0, 4, 2).sum(-1).sin()[0]
    return torch.sin(y.flip(0).roll(1, 1)) @ w


def detached(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = torch.sin(x @ w)
    with torch.no_grad():
        scale = torch.exp(h).mean()
    return torch.sin(h.detach() * h) * scale * (h - h.detach() + 1)


def used_twice(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = torch.sin(x @ w) @ w
    return torch.sin(h * h + h) @ torch.sin(w) * torch.cat([h[:4], h[:4]])


def weight_updated(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(0.9)
        buffer.lerp_(w, 0.5)
    return torch.sin(torch.sin(x @ w) @ w) * buffer.exp()


IN_PLACE: dict[str, Behaviour] = {f.__name__: f for f in (pointwise, indexed, masked, sliced)}
BUFFERS: dict[str, Behaviour] = {
    f.__name__: f
    for f in (
        read_then_mutated,
        mutated_between_reads,
        read_through_a_view,
        read_as_a_copy,
        rows_exchanged,
        running_mean,
        overwritten,
        mutated_after_a_mask,
    )
}
ALIASES: dict[str, Behaviour] = {
    f.__name__: f
    for f in (
        input_mutated,
        input_mutated_and_returned,
        copy_of_an_input_mutated,
        inputs_returned,
        outputs_alias,
        base_is_not_returned,
        strided,
        detached,
        used_twice,
        weight_updated,
    )
}


def _alone(behaviour: Behaviour) -> Case:
    name = behaviour.__name__.replace("_", " ")
    return Case(name, lambda wrap: observe({behaviour.__name__: behaviour}, wrap), compilers=("eager",))


CASES = [
    *[_alone(behaviour) for behaviour in (*IN_PLACE.values(), *BUFFERS.values(), *ALIASES.values())],
    Case("in-place operators", lambda wrap: observe(IN_PLACE, wrap), compilers=("inductor",)),
    Case("buffers", lambda wrap: observe(BUFFERS, wrap), compilers=("inductor",)),
    Case("aliases", lambda wrap: observe(ALIASES, wrap), compilers=("inductor",)),
]


def test_mutation(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)
