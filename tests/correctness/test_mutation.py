"""Mutation and aliasing: what the forward overwrites, what shares memory, and what the backward reads of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

from compile_remat.backend import remat
from tests.correctness.harness import (
    Case,
    Observed,
    Wrap,
    check,
    reference_wrap,
    tensors_of,
    train,
    weighted_sum,
    without_caches,
)

Behaviour = Callable[[Tensor, Tensor, Tensor], Any]
"""Takes an activation that may be mutated (not a leaf), a trained weight and a buffer, all [8, 8]; returns outputs."""


def observe(behaviours: Mapping[str, Behaviour], wrap: Wrap) -> Observed:
    """Two steps of all behaviours as one compiled function; every tensor that went in or came out, and who aliases whom."""

    def together(inputs: dict[str, tuple[Tensor, ...]]) -> dict[str, Any]:
        return {name: behaviour(*inputs[name]) for name, behaviour in behaviours.items()}

    function = wrap(together)
    leaves = {name: torch.randn(3, 8, 8, dtype=torch.float64) for name in behaviours}
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


def indexed(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    h = (x @ w).sin()
    h[torch.tensor([0, 2, 2])] = x[:3].cos()
    h.index_put_((torch.tensor([1, 1]), torch.tensor([0, 3])), x[0, :2].exp(), accumulate=True)
    h.scatter_add_(1, torch.tensor([[0, 1], [2, 2]]), torch.sin(x[:2, :2]))
    return torch.sin(h * h) @ w


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


def written_in_parts(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    """A cache that is read after each of several writes: none of its states outlives the next."""
    y = torch.sin(x @ w)
    buffer[2:4] = y.detach()[:2]
    y = torch.sin(y * torch.tanh(buffer))
    buffer[torch.tensor([0, 5])] = y.detach()[2:4]
    y = torch.sin(y * torch.exp(buffer))
    buffer.diagonal().mul_(0.5)
    y = torch.sin(y * torch.cos(buffer))
    buffer[:, 1].zero_()
    return y * torch.sigmoid(buffer)


def state_copied_between_writes(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    """Reads copies of `buffer`, which are changed or copied again themselves, after `buffer` has changed."""
    buffer[2:4] = x.detach()[:2]
    copied = buffer.clone()
    buffer[:, 1:3] = x.detach()[:, :2] * 0.5
    again = buffer.clone()
    again[0] = copied[1]
    buffer[4:] = again[:4] * 0.1
    y = torch.sin((x @ w) * copied * again) * (copied + 0).clone()
    buffer.diagonal().mul_(0.5)
    return torch.sin(y * buffer.exp())


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


def weight_updated(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(0.9)
        buffer.lerp_(w, 0.5)
    return torch.sin(torch.sin(x @ w) @ w) * buffer.exp()


# -- modules that keep state ----------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Norms with every kind of running statistics; averaging over all batches reads its counter and splits the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(k, n, 3, bias=False) for k, n in ((3, 4), (4, 4), (4, 2))])
        self.moving = nn.BatchNorm2d(4)
        self.averaging = nn.BatchNorm2d(4, momentum=None)
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True)
        self.stateless = nn.BatchNorm2d(2, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.moving(self.convolutions[0](x)))
        x = F.silu(self.averaging(self.convolutions[1](x)), inplace=True)
        y: Tensor = self.stateless(self.convolutions[2](self.instance(x)))
        return y


def batch_norm(wrap: Wrap) -> Observed:
    """Training, then training with the statistics that it left, as fine-tuning with frozen statistics does."""
    model, x = Normalised().double(), torch.randn(4, 3, 10, 10, dtype=torch.float64)
    trained = train(model, [x], wrap)
    model.eval()
    return {**trained, **{f"eval: {name}": tensor for name, tensor in train(model, [x], wrap, steps=1).items()}}


class Stateful(nn.Module):
    """Reparametrised weights, a moving average of a parameter, a counter that is read, and a key cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("keys", torch.randn(6, 8))
        self.average: Tensor
        self.count: Tensor
        self.keys: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(self.spectral(x)) / (self.count + 1)
        self.count.add_(1)
        x = torch.sin(self.weight(x)) * torch.exp(self.average).mean(0)
        with torch.no_grad():
            self.average.lerp_(self.last.weight, 1.0 / self.count)
        keys = self.keys.clone()  # the cache before it is shifted
        x = torch.sin(self.last(x)) * torch.exp(self.average).mean(0) + torch.softmax(x @ keys.t(), -1) @ keys
        self.keys[:-1] = self.keys[1:].clone()
        self.keys[-1:].copy_(x.detach().mean(0, keepdim=True))
        return torch.sin(x @ torch.tanh(self.keys.t()))


def stateful(wrap: Wrap) -> Observed:
    return train(Stateful(), [torch.randn(5, 8)], wrap, steps=3)


def step_between_two_forwards(wrap: Wrap) -> Observed:
    """Two outputs of one model: the optimizer moves its weights between them, and the second alone is differentiated."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    call, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
    call(x).sum().backward()
    before = call(x)
    optimizer.step()
    optimizer.zero_grad()
    after = call(x * before.detach())
    after.square().sum().backward()
    return {"before": before, "after": after, **{name: p.grad for name, p in model.named_parameters()}}


def accumulated(wrap: Wrap) -> Observed:
    """Two forwards before two backwards, in the order of a pipeline: each has its own saved values."""
    model = Stateful()
    call = wrap(model)
    outputs = [call(torch.randn(5, 8)) for _ in range(2)]
    for output in outputs:
        output.sum().backward()
    return {"0": outputs[0], "1": outputs[1], **{name: p.grad for name, p in model.named_parameters()}}


# -- inputs that share memory ---------------------------------------------------------------------------------------------


def overlapping_inputs(wrap: Wrap) -> Observed:
    """Two buffers and two activations that overlap, one of each overwritten."""

    def function(w: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        y = torch.sin(w @ w) * a.exp()
        a.mul_(0.5)
        y = y * b.sin()
        b.add_(1)
        y = y * a.cos() + torch.sigmoid(c)
        c.mul_(0.5)
        return y * torch.sigmoid(d)

    w, buffer = torch.randn(8, 8, requires_grad=True), torch.randn(12, 8)
    leaf = torch.randn(12, 8, requires_grad=True)
    x = leaf * 1
    output = wrap(function)(w, buffer[:8], buffer[4:], x[:8], x[4:])
    (weighted_sum(output) + weighted_sum(x)).backward()
    return {"output": output, "w": w.grad, "leaf": leaf.grad, "buffer": buffer, "x": x}


def same_tensor_twice(wrap: Wrap) -> Observed:
    """One weight and one buffer passed twice; a second call passes distinct ones."""

    def function(w: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = torch.sin(torch.sin(w @ v) @ w) * a.exp()
        a.mul_(0.5)
        return y * torch.sin(b)

    w, v = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    compiled = wrap(function)
    outputs = [compiled(w, w, a, a), compiled(w, v, a, b)]
    weighted_sum(outputs).backward()
    return {"0": outputs[0], "1": outputs[1], "w": w.grad, "v": v.grad, "a": a, "b": b}


def another_storage(wrap: Wrap) -> Observed:
    """A buffer gets another storage and another size between two steps."""
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    buffer = torch.randn(8, 8)
    compiled = wrap(read_then_mutated)
    outputs = []
    for size in (8, 1):
        outputs.append(compiled(x, w, buffer))
        weighted_sum(outputs[-1]).backward()
        buffer.set_(torch.ones(size, 8))
    buffer.resize_(4, 1)
    outputs.append(compiled(x[:4], w, buffer))
    weighted_sum(outputs[-1]).backward()
    return {"outputs": torch.cat(outputs), "x": x.grad, "w": w.grad, "buffer": buffer}


# -- after the forward ----------------------------------------------------------------------------------------------------


def output_scaled(wrap: Wrap) -> Observed:
    """The caller overwrites outputs that no derivative reads: a loss for accumulation, logits for a temperature."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.sin(torch.sin(x @ w) @ w) @ w
        return logits, logits.square().mean()

    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    logits, loss = wrap(function)(x, w)
    loss /= 4
    loss.backward(retain_graph=False)
    logits.detach().div_(2)
    return {"logits": logits, "loss": loss, "x": x.grad, "w": w.grad}


def outputs_changed(wrap: Wrap) -> Observed:
    """Eager mode saves sums of pairs and not what is summed, so that the code behind a graph break may change that."""
    w, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((64, 64), (32, 64)))
    x, seen = torch.randn(32, 64, dtype=torch.float64), dict[str, Tensor | None]()
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "the output": lambda h: h,
        "a view": lambda h: h.view(-1),
        "a detached view": lambda h: h.detach()[:, :9],
    }

    def function(view: Callable[[Tensor], Tensor]) -> Tensor:
        y = x
        for _ in range(4):
            y = torch.sin(y @ w)
        h = y @ w + x
        y = torch.cos(torch.sin(h.view(32, 32, 2).sum(-1))) @ v
        seen_by_user = view(h)
        torch._dynamo.graph_break()
        seen_by_user.mul_(2)
        return y.sum() + seen_by_user.square().sum()

    for name, view in views.items():
        torch.compiler.reset()
        wrap(function)(view).backward()
        seen |= {f"{name}: w": w.grad, f"{name}: v": v.grad}
        w.grad = v.grad = None
    return seen


IN_PLACE: dict[str, Behaviour] = {f.__name__: f for f in (indexed, sliced)}
BUFFERS: dict[str, Behaviour] = {
    f.__name__: f
    for f in (
        read_then_mutated,
        mutated_between_reads,
        read_through_a_view,
        read_as_a_copy,
        written_in_parts,
        state_copied_between_writes,
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
        weight_updated,
    )
}


SOME: dict[str, Behaviour] = {
    f.__name__: f
    for f in (
        indexed,
        read_then_mutated,
        mutated_after_a_mask,
        input_mutated_and_returned,
        outputs_alias,
        weight_updated,
    )
}
"""One of each kind, for Inductor in `make test`."""


def _alone(behaviour: Behaviour) -> Case:
    name = behaviour.__name__.replace("_", " ")
    return Case(name, lambda wrap: observe({behaviour.__name__: behaviour}, wrap), compilers=("eager",))


CASES = [
    *[_alone(behaviour) for behaviour in (*IN_PLACE.values(), *BUFFERS.values(), *ALIASES.values())],
    Case("batch norm", batch_norm),
    Case("stateful", stateful),
    Case("step between two forwards", step_between_two_forwards, compilers=("eager",)),
    Case("two forwards, then two backwards", accumulated),
    Case("overlapping inputs", overlapping_inputs),
    Case("same tensor twice", same_tensor_twice, compilers=("eager",)),
    Case("another storage", another_storage, compilers=("eager",)),
    Case("output scaled", output_scaled, compilers=("eager",)),
    Case("outputs changed", outputs_changed, compilers=("eager",)),
    Case("mutation", lambda wrap: observe(SOME, wrap), compilers=("inductor",)),
    Case("in-place operators", lambda wrap: observe(IN_PLACE, wrap), compilers=("inductor",)),
    Case("buffers", lambda wrap: observe(BUFFERS, wrap), compilers=("inductor",)),
    Case("aliases", lambda wrap: observe(ALIASES, wrap), compilers=("inductor",)),
]


def test_mutation(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


# -- what plain torch.compile refuses ---------------------------------------------------------------------------------


def compiled(function: Callable[..., Any], budget: object, compiler: str) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend=remat, options={"memory_budget": budget, "compiler": compiler})


def deep(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.sin(torch.tanh(x @ w))
    return x


def backwards(wrap: Wrap, *, retain_first: bool) -> list[str | Tensor]:
    """Errors and gradients of three backwards of one forward, after a step that keeps its graph if `retain_first`."""
    torch.compiler.reset()
    x, w = torch.randn(16, 16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    call, seen = wrap(deep), list[str | Tensor]()
    with without_caches():
        call(x, w).sum().backward(retain_graph=retain_first)
        loss = call(x, w).sum()
        for retain in (True, False, False):
            try:
                loss.backward(retain_graph=retain)
            except RuntimeError as error:
                seen.append(str(error))
            assert w.grad is not None
            seen.append(w.grad.clone())
    return seen


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("retain_first", [True, False])
def test_a_second_backward(retain_first: bool, compiler: str) -> None:
    """As plain torch.compile, it raises if the backward was compiled to overwrite saved tensors."""
    wraps = [reference_wrap("compiled", compiler)]
    wraps += [lambda f, b=budget: compiled(f, b, compiler) for budget in ("max", "min")]
    expected, *others = [(torch.manual_seed(0), backwards(wrap, retain_first=retain_first))[1] for wrap in wraps]
    messages = [e for e in expected if isinstance(e, str)]
    assert "through the graph a second time" in messages[-1]
    assert len(messages) == 1 if retain_first else "donated buffers" in messages[0]
    for actual in others:
        assert [e for e in actual if isinstance(e, str)] == messages
        torch.testing.assert_close(*([t for t in seen if isinstance(t, Tensor)] for seen in (actual, expected)))


def heads(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    shared = deep(x, w)
    return shared.tanh().square().mean(), torch.sin(torch.exp(shared) @ w).mean()


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize("budget", ["max", "min"])
def test_two_backwards_of_one_forward_with_torchs_caches(budget: str) -> None:
    """The backward that is compiled early may overwrite what is saved, the one that runs may not: the cache keeps them apart."""
    gradients = []
    for call in (heads, compiled(heads, budget, "inductor")):
        torch.manual_seed(0)
        x, w = torch.randn(32, 32), torch.randn(32, 32, requires_grad=True)
        first, second = call(x, w)
        first.backward(retain_graph=True)
        second.backward()
        gradients.append(w.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("budget", ["max", "min"])
def test_an_overwritten_input_that_autograd_saved_is_torchs_error(budget: object) -> None:
    def function(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
        y = torch.sin(x @ w) * buffer
        buffer.mul_(2)
        return y

    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    errors = []
    for wrapped in (reference_wrap("compiled", "eager")(function), compiled(function, budget, "eager")):
        torch.compiler.reset()
        with pytest.raises(BackendCompilerFailed, match="modified by an inplace operation") as caught:
            wrapped(x, w, torch.randn(8, 8))
        errors.append(caught.value.inner_exception)
    assert type(errors[0]) is type(errors[1]) is RuntimeError
