"""Random numbers: the backward sees those that the forward drew, and they are those of plain torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import compile_remat
from compile_remat.backend import remat
from compile_remat.compilation.driver import draws_in_turn
from compile_remat.inductor.entry import compile_with_partitioner
from tests.correctness.harness import Case, Observed, Wrap, check, train, without_caches
from tests.fuzz.partitioners import Unplanned


class Layers(nn.Module):
    """Linear layers, each followed by one of `functions`; every derivative depends on what was drawn before it."""

    def __init__(self, *functions: Callable[[Tensor], Tensor], size: int = 8) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList([nn.Linear(size, size) for _ in functions])

    def forward(self, x: Tensor) -> Tensor:
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = torch.sin(function(torch.sin(layer(x))))
        return x


def dropout_of_every_kind(wrap: Wrap) -> Observed:
    def of_channels(x: Tensor) -> Tensor:
        return F.dropout2d(x.view(4, 8, 8, 8), 0.3).view_as(x)

    def in_place(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.3, inplace=True)

    def of_features(x: Tensor) -> Tensor:
        return F.feature_alpha_dropout(x.view(4, 8, 8, 8), 0.3, training=True).view_as(x)

    model = Layers(of_channels, lambda x: F.alpha_dropout(x, 0.3, training=True), in_place, of_features)
    return train(model, [torch.randn(256, 8)], wrap)


def drawn_like_a_mask(wrap: Wrap) -> Observed:
    """Masks and noise drawn by hand, out of place and in place, from every common distribution."""

    def uniform(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 0.7) * torch.rand(x.shape) + torch.empty_like(x).uniform_(0.5, 1.5) * x

    def normal(x: Tensor) -> Tensor:
        noise = torch.normal(x.detach(), 0.1) + torch.empty_like(x).normal_() + torch.normal(0.0, 1.0, x.shape)
        return x * torch.randn_like(x) + noise * x.square()

    def counts(x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.sigmoid(x.detach())) + torch.empty_like(x).bernoulli_(0.5)
        return x * mask + x * torch.randint(0, 3, x.shape)

    def choices(x: Tensor) -> Tensor:
        rows = torch.multinomial(torch.softmax(x.detach()[:, 0], 0), 32, replacement=True)
        return x[rows] * torch.empty_like(x).exponential_() * x[torch.multinomial(torch.ones(32), 32)]

    return train(Layers(uniform, normal, counts, choices), [torch.randn(32, 8)], wrap)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True).transpose(1, 2).reshape(x.shape)
        y, weights = self.attention(torch.sin(x), x, x)
        return torch.sin(y) + self.attention(y, y, x, need_weights=False)[0] * weights.sum()


def attention(wrap: Wrap) -> Observed:
    return train(Attention(), [torch.randn(2, 6, 16)], wrap)


def dropped_sine(x: Tensor) -> Tensor:
    return torch.sin(F.dropout(torch.sin(x), 0.3))


def recompute_all(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def checkpointed_dropout(wrap: Wrap) -> Observed:
    """Dropout in regions that the user wants recomputed, as a wish and as a demand; numbers drawn between them."""
    demand = functools.partial(create_selective_checkpoint_contexts, recompute_all)

    def wished(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(dropped_sine, x, use_reentrant=False, preserve_rng_state=True)
        return y * torch.rand_like(x)

    def demanded(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(dropped_sine, x, use_reentrant=False, preserve_rng_state=True, context_fn=demand)
        return y

    return train(Layers(wished, demanded, wished, demanded), [torch.randn(16, 8)], wrap)


def drawn_in_a_branch(wrap: Wrap) -> Observed:
    """Operators that hold graphs of their own say nothing of what these draw."""

    def branch(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, dropped_sine, lambda x: x * torch.rand_like(x), (x,))
        return y

    return train(Layers(branch, branch), [torch.randn(16, 8)], wrap)


def drawn_in_a_region(wrap: Wrap) -> Observed:
    region = torch.compiler.nested_compile_region(dropped_sine)
    return train(Layers(region, region, region), [torch.randn(16, 8)], wrap)


def distributions(wrap: Wrap) -> Observed:
    def draw(x: Tensor) -> Tensor:
        gamma = torch.distributions.Gamma(F.softplus(x) + 0.1, torch.ones(())).rsample()
        normal = torch.distributions.Normal(x, 1.0).rsample()
        return gamma * normal + torch.poisson(x.detach().abs()) * x + x[torch.randperm(16)]

    return train(Layers(draw, draw, draw), [torch.randn(16, 8)], wrap)


def generator(wrap: Wrap) -> Observed:
    """Dynamo leaves draws from the user's own generator out of the graph: they are eager mode's."""
    numbers = torch.Generator().manual_seed(3)

    def draw(x: Tensor) -> Tensor:
        return torch.sin(x * torch.rand(x.shape, generator=numbers))

    seen = dict(train(Layers(draw, draw, draw), [torch.randn(16, 8)], wrap))
    return {**seen, "generator": numbers.get_state()}


class NoisyGradient(torch.autograd.Function):
    """Draws in the backward, as stochastic rounding of gradients does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def drawn_by_the_backward(wrap: Wrap) -> Observed:
    def noisy(x: Tensor) -> Tensor:
        noisy_x: Tensor = NoisyGradient.apply(x)
        return F.dropout(noisy_x, 0.3)

    return train(Layers(noisy, noisy, noisy), [torch.randn(16, 8)], wrap)


def drawn_as_eager_mode_draws(wrap: Wrap) -> Observed:
    """Under `fallback_random` the numbers are those of eager mode, so the reference is the truth itself."""
    model = Layers(
        lambda x: F.dropout(x, 0.3),
        lambda x: x * torch.rand_like(x),
        lambda x: F.dropout(x, 0.3) + torch.randn_like(x) * x,
        lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    )
    seen = dict(train(model, [torch.randn(32, 8)], wrap))
    return {**seen, "random state": torch.get_rng_state()}


CASES = [
    Case("every kind of dropout", dropout_of_every_kind, reference="compiled"),
    Case("rand, normal, bernoulli, multinomial", drawn_like_a_mask, reference="compiled"),
    Case("attention", attention, reference="compiled"),
    Case("checkpointed dropout", checkpointed_dropout, reference="compiled"),
    Case("drawn by the backward", drawn_by_the_backward, reference="compiled"),
    Case("cond", drawn_in_a_branch, reference="compiled", compilers=("eager",)),
    # Not with Inductor: plain torch 2.13 gives wrong gradients for regions that are called more than once, random or not.
    Case("nested region", drawn_in_a_region, reference="compiled", compilers=("eager",)),
    # Not with Inductor: plain torch 2.13 cannot compile an index made by randperm.
    Case("distributions", distributions, reference="compiled", compilers=("eager",)),
    Case("generator", generator, compilers=("eager",)),
    Case("fallback_random", drawn_as_eager_mode_draws, compilers=("inductor",), options={"fallback_random": True}),
]


def test_random(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


# -- without a reference ----------------------------------------------------------------------------------------------

NOISES: Sequence[Callable[[Tensor], Tensor]] = (
    lambda x: F.dropout(torch.ones_like(x), 0.3),
    lambda x: torch.sin(torch.rand_like(x)),
    lambda x: torch.exp(torch.randn(x.shape)),
    lambda x: torch.tanh(torch.bernoulli(torch.full_like(x, 0.7)) + torch.randint(0, 3, x.shape)),
    lambda x: torch.cos(torch.empty_like(x).exponential_()),
    lambda x: F.dropout2d(torch.ones_like(x).view(4, 8, 8, 1), 0.3).view_as(x),
    lambda x: torch.sin(torch.normal(torch.zeros_like(x), 1.0)),
)


def noisy(x: Tensor) -> Tensor:
    """Linear in each element, so that output divided by input is what the gradient has to be, whatever was drawn."""
    for noise in NOISES:
        x = x * noise(x)
    return F.dropout(x, 0.3)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_gradient_holds_the_numbers_that_the_output_shows(compiler: str, budgets: Sequence[float | str]) -> None:
    for budget in budgets:
        x = (1 + torch.rand(32, 8)).requires_grad_()
        torch.compiler.reset()
        with without_caches():
            output = torch.compile(noisy, backend=remat, options={"memory_budget": budget, "compiler": compiler})(x)
            output.sum().backward()
        assert x.grad is not None and 0 < (output == 0).sum() < output.numel()
        assert torch.equal(x.grad == 0, output == 0), budget
        torch.testing.assert_close(x.grad, (output / x).detach(), msg=lambda m, b=budget: f"{b}: {m}")
    assert {b for b in budgets if isinstance(b, str)} <= {report.budget for report in compile_remat.reports()}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_budget_changes_no_number_that_is_drawn(compiler: str) -> None:
    """Inductor calls `multinomial`; sorted by their memory, the seeds of what it draws itself would come before that."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = torch.sin(x @ w)
        with torch.no_grad():
            products = [x @ (w + k) for k in range(5)]
            rows = torch.multinomial(torch.softmax(products[-1], -1), 4)
            noise = torch.randn(5, 5)
            scale = sum(p @ p[:, :4] for p in products)
        return h.gather(1, rows).sum() * torch.as_tensor(scale).mean(), rows, noise

    drawn = []
    x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
    for budget in ("max", "min"):
        torch.compiler.reset()
        options = {"memory_budget": budget, "compiler": compiler}
        with without_caches():
            torch.manual_seed(1)
            _, *numbers = torch.compile(function, backend=remat, options=options)(x, w)
        drawn.append([*numbers, torch.get_rng_state()])
    assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_kernel_that_is_joined_with_an_earlier_one_takes_no_draw_with_it(guarded: bool) -> None:
    """`sin` and what reads the second draw read one tensor: joined, they run where `sin` stood, behind the second draw."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        sine = torch.sin(x)
        product = sine @ sine
        first = torch.empty_like(x).uniform_(-1, 1)
        return product, torch.roll(first, 1, 0), x * torch.empty_like(x).normal_()

    def compiled(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return compile_with_partitioner(gm, inputs, Unplanned(), {}, guarded=guarded, is_ordered=draws_in_turn)

    seen = []
    for wrapped in (function, torch.compile(function, backend=compiled)):
        with without_caches():
            torch.manual_seed(1)
            seen.append([*wrapped(torch.ones(64, 64, requires_grad=True)), torch.get_rng_state()])
    assert all(map(torch.equal, *seen))


# -- the two graphs ---------------------------------------------------------------------------------------------------


def seeded(graph: fx.Graph) -> set[str]:
    """Names of the nodes that draw numbers."""
    return {n.name for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())}


@pytest.mark.parametrize("decompose", [True, False])
@pytest.mark.parametrize("budget", ["max", 0.9, "min"])
def test_no_random_operator_runs_twice(budget: object, decompose: bool) -> None:
    def function(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.sin(noisy(torch.sin(x @ weight)))
        x = F.rrelu(x, training=True) * torch.multinomial(x.detach().exp(), 8, replacement=True)
        return F.scaled_dot_product_attention(
            x.view(4, 2, 16, 2), x.view(4, 2, 16, 2), x.view(4, 2, 16, 2), dropout_p=0.3
        )

    graphs: list[fx.Graph] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    traced = aot_function(
        function,
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=functools.partial(compile_remat.partition, memory_budget=budget),
        decompositions=core_aten_decompositions() if decompose else {},
    )
    traced(torch.randn(32, 8), *[torch.randn(8, 8, requires_grad=True) for _ in range(2)]).sum().backward()
    forward, backward = graphs
    assert len(seeded(forward)) >= 2 * len(NOISES)
    assert not seeded(backward)
