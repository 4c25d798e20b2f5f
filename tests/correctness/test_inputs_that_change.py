"""Inputs that change between a forward and its backward: the same gradients, or the same error, as under plain torch.compile."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import InputChangedError
from tests.correctness.harness import Case, Observed, Wrap, observe, reference_wrap

ROWS, WIDTH = 512, 32
"""Activations of 64 KiB beside weights of 4 KiB: a budget can be kept by recomputation alone."""

BUDGETS = ("min", pytest.param(0.5, marks=pytest.mark.full))

ROUNDING = 1e-4
"""Allowed difference, as a part of a gradient's norm, between kernels that add in different orders."""

Change = Callable[[Tensor], object]
"""Writes other numbers into a tensor."""


def in_place(tensor: Tensor) -> None:
    """Changes a tensor in place, as an optimizer or a moving average does."""
    with torch.no_grad():
        tensor.mul_(-1.5).add_(0.5)


def by_data(tensor: Tensor) -> None:
    """Changes a tensor through `data`, which autograd does not see."""
    tensor.data.mul_(-1.5).add_(0.5)


def by_numpy(tensor: Tensor) -> None:
    """Changes a tensor through numpy, as a loader does that fills a buffer in shared memory."""
    tensor.detach().numpy()[:] = 0.5


CHANGES: Sequence[Change] = (in_place, by_data)


def blocks(count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def gradients_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad


def one_step(module: nn.Module, inputs: Sequence[Tensor], change: Callable[[], object], wrap: Wrap) -> Observed:
    """A forward, the change, the backward."""
    loss = wrap(module)(*inputs).square().mean()
    change()
    loss.backward()
    return {"loss": loss, **dict(gradients_of(module))}


def steps(
    module: nn.Module,
    step: Callable[[Callable[..., Any], Tensor], Tensor],
    wrap: Wrap,
    state: nn.Module | None = None,
) -> Observed:
    """Three steps of SGD; `step` runs forward and backward, changes inside."""
    call = wrap(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    seen: dict[str, Any] = {}
    for number in range(3):
        optimizer.zero_grad()
        seen[f"loss {number}"] = step(call, torch.randn(ROWS, WIDTH)).detach()
        seen |= {f"step {number} {name}": gradient.clone() for name, gradient in gradients_of(module)}
        optimizer.step()
    return seen | {f"final {name}": value for name, value in (state or module).state_dict().items()}


# -- parameters -----------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, then layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(50, WIDTH), blocks()

    def forward(self, indices: Tensor) -> Tensor:
        return self.layers(F.gelu(self.table(indices)))


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


PARAMETERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "a bias": (blocks, rows, "2.bias"),
    "an embedding": (Words, lambda: torch.randint(50, (ROWS,)), "table.weight"),
    "the weight of the first layer": (blocks, rows, "0.weight"),
}
"""Parameters that neither eager mode nor plain torch.compile reads in the backward."""


def parameter_changes(kind: str, change: Change, wrap: Wrap) -> Observed:
    build, draw, name = PARAMETERS[kind]
    module, inputs = build(), draw()
    return one_step(module, (inputs,), lambda: change(module.get_parameter(name)), wrap)


# -- frozen parts -----------------------------------------------------------------------------------------------------------


class Stemmed(nn.Module):
    """Layers behind a frozen stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = blocks(2).requires_grad_(False), blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.stem(x))


def weights_of_a_frozen_stem(change: Change, wrap: Wrap) -> Observed:
    module = Stemmed()
    return one_step(module, (rows(),), lambda: [change(p) for p in module.stem.parameters()], wrap)


def buffer_of_a_loader(change: Change, wrap: Wrap) -> Observed:
    """A slice of it, so that the argument is a view that nobody keeps."""
    buffer = torch.randn(2 * ROWS, WIDTH)
    return one_step(Stemmed(), (buffer[:ROWS],), lambda: change(buffer), wrap)


def input_of_inference_mode(wrap: Wrap) -> Observed:
    """A tensor of inference mode cannot change, but autograd refuses to save it."""
    with torch.inference_mode():
        x = rows()
    return one_step(Stemmed(), (x,), lambda: None, wrap)


# -- statistics -----------------------------------------------------------------------------------------------------------


class Statistics(nn.Module):
    """A normaliser with running statistics, which are updated behind a graph break where `breaks`, else while training."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layers, self.breaks = blocks(), breaks
        self.register_buffer("mean", torch.full((WIDTH,), 0.1))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers((x - self.mean) * (self.var + 1e-5).rsqrt())
        if self.breaks:
            torch._dynamo.graph_break()
        if self.breaks or self.training:
            with torch.no_grad():
                self.mean.lerp_(z.mean(0) + 1, 0.5)
                self.var.lerp_(z.var(0) + 1, 0.5)
        return z


def statistics_of_a_later_graph(wrap: Wrap) -> Observed:
    return one_step(Statistics(breaks=True), (rows(),), lambda: None, wrap)


def two_modes(module: nn.Module, wrap: Wrap) -> Observed:
    """One call that reads statistics, another one that writes them, then one backward."""
    call, loss = wrap(module), torch.zeros(())
    for training in (False, True):
        module.train(training)
        loss = loss + call(rows()).square().mean()
    loss.backward()
    return {"loss": loss, **dict(gradients_of(module))}


def batch_norm(wrap: Wrap) -> Observed:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())]
    return two_modes(nn.Sequential(*layers), wrap)


# -- what plain torch.compile reads as well ---------------------------------------------------------------------------------


class Masked(nn.Module):
    """Layers that each keep a part of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.rand(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * self.mask
        return x


def tables(build: Callable[[], nn.Module], change: Change, wrap: Wrap) -> Observed:
    module = build()
    return one_step(module, (rows(),), lambda: [change(table) for table in module.buffers()], wrap)


# -- whole training loops ---------------------------------------------------------------------------------------------------


def frozen_stem(wrap: Wrap) -> Observed:
    """The buffer of a loader is filled for the next step before the backward."""
    buffer = torch.empty(ROWS, WIDTH)

    def step(call: Callable[..., Any], x: Tensor) -> Tensor:
        buffer.copy_(x)
        loss: Tensor = call(buffer).square().mean()
        buffer.normal_()
        loss.backward()
        return loss

    return steps(Stemmed(), step, wrap)


class Distilled(nn.Module):
    """Features of a student against those of its average, inside of the compiled loss."""

    def __init__(self) -> None:
        super().__init__()
        self.student = blocks()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, loss = x, x, x.new_zeros(())
        for k in range(0, len(self.student), 2):
            a = self.student[k : k + 2](a)
            with torch.no_grad():
                b = self.teacher[k : k + 2](b)
            loss = loss + F.smooth_l1_loss(a, b, beta=0.1)
        return loss


def distillation(move: Callable[[Tensor, Tensor], object], wrap: Wrap) -> Observed:
    module = Distilled()
    with torch.no_grad():
        for parameter in module.teacher.parameters():
            parameter.add_(0.1)

    def step(call: Callable[..., Any], x: Tensor) -> Tensor:
        loss: Tensor = call(x)
        with torch.no_grad():
            for average, parameter in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
                move(average, parameter)
        loss.backward()
        return loss

    return steps(module, step, wrap)


def swap(average: Tensor, parameter: Tensor) -> None:
    """As in MoCo's helper: the average gets other memory."""
    average.data = average.data * 0.5 + parameter.data * 0.5


def running_norm(wrap: Wrap) -> Observed:
    """The statistics of a policy's observations are updated by eager code."""
    module = Statistics(breaks=False).eval()

    def step(call: Callable[..., Any], x: Tensor) -> Tensor:
        z = call(x)
        with torch.no_grad():
            module.mean.lerp_(z.mean(0) + 1, 0.3)
            module.var.lerp_(z.var(0) + 1, 0.3)
        loss: Tensor = z.square().mean()
        loss.backward()
        return loss

    return steps(module, step, wrap)


# -- all of them --------------------------------------------------------------------------------------------------------------


def case(name: str, run: Callable[[Wrap], Observed], *, kernels: bool = False, is_full: bool = False) -> Case:
    return Case(name, run, "compiled", compilers=("eager", "inductor") if kernels else ("eager",), is_full=is_full)


def _changing() -> Iterator[Case]:
    """Each with a change by data, which autograd does not see; beside it, one with a change in place is enough for `make test`."""
    for change in CHANGES:
        how, is_full = change.__name__.replace("_", " "), change is in_place
        for kind in PARAMETERS:
            run = functools.partial(parameter_changes, kind, change)
            kernels = kind in ("a bias", "an embedding")
            yield case(f"{kind}, {how}", run, kernels=kernels, is_full=is_full and kind != "a bias")
        yield case(f"a frozen stem, {how}", functools.partial(weights_of_a_frozen_stem, change), is_full=is_full)
        yield case(f"the buffer of a loader, {how}", functools.partial(buffer_of_a_loader, change), is_full=is_full)
    yield case("the buffer of a loader, by numpy", functools.partial(buffer_of_a_loader, by_numpy))
    yield case("statistics of a later graph", statistics_of_a_later_graph, kernels=True)
    yield case("two modes", lambda wrap: two_modes(Statistics(breaks=False), wrap))
    yield case("FrozenStem", frozen_stem, kernels=True)
    yield case("TeacherFeatures", functools.partial(distillation, lambda a, b: a.lerp_(b, 0.5)))
    yield case("TeacherSwap", functools.partial(distillation, swap), kernels=True)
    yield case("RunningNorm", running_norm)


CHANGING = tuple(_changing())
"""Programs that plain torch.compile trains, as if nothing changed."""

READ_BY_PLAIN = (
    case("BatchNorm in two modes", batch_norm),
    case("a mask", functools.partial(tables, Masked, in_place)),
    case("a mask that stays", functools.partial(tables, Masked, lambda table: None)),
)
"""Programs whose backward under plain torch.compile reads what changes, too."""

CASES = (*CHANGING, *READ_BY_PLAIN, case("an input of inference mode", input_of_inference_mode))


def outcome(case: Case, wrap: Wrap) -> Observed | RuntimeError:
    """All that the program shows, or the error of its backward."""
    try:
        return observe(case, wrap)
    except RuntimeError as error:
        return error.with_traceback(None)


def plain(case: Case, compiler: str) -> Observed | RuntimeError:
    """The figures of plain torch.compile, run once."""
    key = case.name, compiler
    if key not in _PLAIN:
        _PLAIN[key] = outcome(case, reference_wrap("compiled", compiler))
    return _PLAIN[key]


_PLAIN: dict[tuple[str, str], Observed | RuntimeError] = {}


def under(budget: float | str, compiler: str = "eager", **options: Any) -> Wrap:
    given = {"memory_budget": budget, "compiler": compiler, **options}
    return lambda function: torch.compile(function, backend=remat, options=given)  # type: ignore[arg-type]


def differences(actual: Observed, expected: Observed) -> list[str]:
    """Returns the names that differ: each tensor is measured by its own norm, since gradients differ by orders of magnitude."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.norm()) for name, value in expected.items() if "gradient" in name)
    found = []
    for name, value in expected.items():
        apart = float((actual[name].double() - value.double()).norm())
        if apart > ROUNDING * max(float(value.double().norm()), ROUNDING * largest):
            found.append(f"{name}: {apart:.1e} of {float(value.double().norm()):.1e}")
    return found


@pytest.mark.filterwarnings("ignore:compile_remat. memory_budget = 0.5 allows")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_gradients_are_those_of_plain_torch_compile(case: Case, compiler: str, budget: float | str) -> None:
    expected, actual = plain(case, compiler), outcome(case, under(budget, compiler))
    reports = [r for r in compile_remat.reports() if r.plan is not None]
    assert reports and not any(r.status == "FALLBACK" for r in reports)
    assert any(r.num_recomputed for r in reports), "nothing is recomputed: the program is too small to show anything"
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, RuntimeError) and not isinstance(actual, InputChangedError), actual
        assert "modified by an inplace operation" in str(expected) and "modified by an inplace operation" in str(actual)
        return
    assert not isinstance(actual, RuntimeError), actual
    assert differences(actual, expected) == []


@pytest.mark.parametrize(
    "case", [CHANGING[0], *(pytest.param(c, marks=pytest.mark.full) for c in CHANGING[1:])], ids=str
)
def test_these_programs_can_tell(case: Case) -> None:
    """If `inputs` is constant, the lowest plan reads the changed inputs again: the gradient differs, or our error is raised."""
    expected, actual = plain(case, "eager"), outcome(case, under("min", inputs="constant"))
    assert not isinstance(expected, RuntimeError), "plain torch.compile trains it"
    if isinstance(actual, RuntimeError):
        assert isinstance(actual, InputChangedError), actual
    else:
        assert differences(actual, expected) != []


@pytest.mark.parametrize("case", READ_BY_PLAIN[:2], ids=str)
def test_plain_torch_compile_refuses_these(case: Case) -> None:
    assert "modified by an inplace operation" in str(plain(case, "eager"))
