"""Option `check`: planted faults are found and named, sound plans pass, and nothing of the caller's changes."""

from __future__ import annotations

import gc
import json
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat.backend import compile_graph, remat
from compile_remat.config import RematConfig
from compile_remat.device import free_memory
from compile_remat.device.measure import peak_bytes
from compile_remat.errors import BudgetError, CheckError, CheckWarning, PlannerWarning
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.planning import joint_problem
from compile_remat.verify import side_runs
from tests.correctness.harness import Case, Observed, Wrap, check, train
from tests.test_backend import Block

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _warnings_are_errors(uncached: None) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckWarning)
        warnings.simplefilter("error", PlannerWarning)
        yield


# -- models -------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Equal layers whose derivatives depend on what came before; optionally dropout, batch norm, and a counter."""

    def __init__(self, count: int = 3, drop: float = 0.0, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])
        self.norm = nn.BatchNorm1d(width)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(torch.sin(layer(x)))
            x = F.dropout(x, self.drop) if self.drop else x
        return self.norm(x)


class Drifting(nn.Module):
    """Reads a buffer, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.sin()
        with torch.no_grad():
            self.scale.add_(1)
        return y.exp()


# -- planted faults -------------------------------------------------------------------------------------------------------

Edit = Callable[[fx.Graph, fx.Graph], None]


def broken(edit: Edit, compiler: str = "eager") -> Callable[..., Any]:
    """A backend whose plan is split as always and then spoilt."""

    class Broken(RematPartitioner):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = super().__call__(gm, joint_inputs, **kwargs)
            edit(forward.graph, backward.graph)
            for module in (forward, backward):
                module.graph.lint()
                module.recompile()
            return forward, backward

    config = RematConfig(check=True, compiler=compiler, memory_budget="min")  # type: ignore[arg-type]
    return lambda gm, inputs: compile_graph(gm, inputs, config, {}, Broken)


def result_of(graph: fx.Graph) -> tuple[fx.Node, list[Any]]:
    output = graph.output_node()
    return output, list(output.args[0])  # type: ignore[arg-type]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def replace_result(graph: fx.Graph, position: int, make: Callable[[fx.Node], fx.Node]) -> None:
    output, results = result_of(graph)
    with graph.inserting_before(output):
        results[position] = make(results[position])
    output.args = (tuple(results),)


def after_inputs(graph: fx.Graph) -> Any:
    return graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder"))


def replace_reads(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def gradients_of_shape(graph: fx.Graph, shape: tuple[int, ...]) -> list[int]:
    return [k for k, n in enumerate(result_of(graph)[1]) if isinstance(n, fx.Node) and shape_of(n) == shape]


def calls(graph: fx.Graph, target: object) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def fresh_dropout(forward: fx.Graph, backward: fx.Graph) -> None:
    mask = next(n for n in backward.find_nodes(op="placeholder") if n.meta["val"].dtype is torch.bool)
    with after_inputs(backward):
        drawn = backward.call_function(aten.rand.default, (list(shape_of(mask)),))
        replace_reads(mask, backward.call_function(aten.gt.Scalar, (drawn, 0.3)))


def no_relu_mask(forward: fx.Graph, backward: fx.Graph) -> None:
    masked = calls(backward, aten.where.self)[0]
    masked.replace_all_uses_with(masked.args[2])  # type: ignore[arg-type]


def late_read(forward: fx.Graph, backward: fx.Graph) -> None:
    """Computes the saved result of the buffer's reader after the buffer has changed."""
    buffer = calls(forward, aten.copy_.default)[0].args[0]
    output, results = result_of(forward)
    reader = next(n for n in calls(forward, aten.sin.default) if buffer in n.args)
    position = results.index(reader)
    with forward.inserting_before(output):
        results[position] = forward.call_function(reader.target, reader.args)  # type: ignore[arg-type]
        results[position].meta = dict(reader.meta)
    output.args = (tuple(results),)


def zero_gradient(forward: fx.Graph, backward: fx.Graph) -> None:
    position = gradients_of_shape(backward, (8, 8))[1]
    replace_result(backward, position, lambda n: backward.call_function(aten.zeros_like.default, (n,)))


def no_gradient(forward: fx.Graph, backward: fx.Graph) -> None:
    output, results = result_of(backward)
    results[gradients_of_shape(backward, (8, 8))[1]] = None
    output.args = (tuple(results),)


def off_by_one(forward: fx.Graph, backward: fx.Graph) -> None:
    again = calls(backward, aten.sin.default)[0]
    with backward.inserting_after(again):
        replace_reads(again, backward.call_function(aten.mul.Tensor, (again, 33 / 32)))


def one_element(forward: fx.Graph, backward: fx.Graph) -> None:
    def spoil(gradient: fx.Node) -> fx.Node:
        element = backward.call_function(aten.select.int, (gradient, 0, 3))
        return backward.call_function(aten.select_scatter.default, (gradient, element, 0, 2))

    replace_result(backward, gradients_of_shape(backward, (8, 8))[0], spoil)


def wrong_output(forward: fx.Graph, backward: fx.Graph) -> None:
    replace_result(forward, 0, lambda n: forward.call_function(aten.mul.Tensor, (n, 1.001)))


def wrong_buffer(forward: fx.Graph, backward: fx.Graph) -> None:
    copy = next(n for n in calls(forward, aten.copy_.default) if shape_of(n) == (8,))
    with forward.inserting_before(copy):
        copy.args = (copy.args[0], forward.call_function(aten.neg.default, (copy.args[1],)))


def advanced_random_state(forward: fx.Graph, backward: fx.Graph) -> None:
    with backward.inserting_before(backward.output_node()):
        backward.call_function(aten.rand.default, ([1],))


def failing(forward: fx.Graph, backward: fx.Graph) -> None:
    replace_result(backward, 0, lambda n: backward.call_function(aten.view.default, (n, [7, 11, 13])))


FAULTS: list[tuple[Edit, Callable[[], nn.Module], str | tuple[str, ...], str | tuple[str, ...]]] = [
    (fresh_dropout, lambda: Layers(drop=0.3), "the gradient of layers.", "layers."),
    (no_relu_mask, Layers, "the gradient of layers.2.weight", "layers.2"),
    (late_read, Drifting, "the gradient of linear.", "linear"),
    (zero_gradient, Layers, "the gradient of layers.1.weight", "layers.1"),
    (no_gradient, Layers, "the gradient of layers.1.weight", "layers.1"),
    (off_by_one, Layers, "the gradient of norm.weight", "norm"),
    (one_element, Layers, "the gradient of layers.0.weight", "layers.0"),
    (wrong_output, Layers, "output 0", "norm"),
    (wrong_buffer, Layers, "the new value of norm.running_", "norm"),
    (advanced_random_state, Layers, "the random state of cpu", ""),
    (failing, Layers, "the step", ""),
]


@pytest.mark.parametrize(("edit", "make", "tensor", "path"), FAULTS, ids=[edit.__name__ for edit, *_ in FAULTS])
def test_a_fault_is_found_and_named(
    edit: Edit, make: Callable[[], nn.Module], tensor: str | tuple[str, ...], path: str | tuple[str, ...]
) -> None:
    model, x = make(), torch.randn(32, 8)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    step = torch.compile(model, backend=broken(edit))
    for _ in range(2):  # an unsound plan never gets to run
        with pytest.raises(CheckError) as caught:
            step(x)
        assert caught.value.tensor.startswith(tensor)
        assert caught.value.module_path.startswith(path) and bool(caught.value.module_path) == bool(path)
        assert caught.value.difference > 0
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    (report,) = compile_remat.reports()
    assert report.check.startswith(f"failed: {caught.value.tensor}")


def test_the_error_lists_what_is_recomputed_on_the_way() -> None:
    step = torch.compile(Layers(), backend=broken(off_by_one))
    with pytest.raises(CheckError) as caught:
        step(torch.randn(32, 8))
    plan = compile_remat.reports()[0].plan
    names = [entry.split(" ")[0] for entry in caught.value.recomputed]
    assert names and set(names) <= set(plan.recomputed)
    text = str(caught.value)
    assert "the first of" in text and f"Recomputed on the way to it ({len(names)})" in text
    assert all("test_first_step.py:" in entry for entry in caught.value.recomputed)


def test_gradients_before_the_fault_are_not_blamed() -> None:
    """The backward reaches layers.2 first; a fault further on leaves it and what it recomputes alone."""

    def edit(forward: fx.Graph, backward: fx.Graph) -> None:
        position = gradients_of_shape(backward, (8, 8))[0]
        replace_result(backward, position, lambda n: backward.call_function(aten.mul.Tensor, (n, 2.0)))

    with pytest.raises(CheckError) as caught:
        torch.compile(Layers(), backend=broken(edit))(torch.randn(32, 8))
    assert (caught.value.tensor, caught.value.others) == ("the gradient of layers.0.weight", 0)


@pytest.mark.proof
def test_a_fault_is_found_through_inductor() -> None:
    with pytest.raises(CheckError, match="the gradient of norm"):
        torch.compile(Layers(2), backend=broken(off_by_one, compiler="inductor"))(torch.randn(32, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fault_is_found_in_half_precision(dtype: torch.dtype) -> None:
    with pytest.raises(CheckError):
        torch.compile(Layers().to(dtype), backend=broken(no_relu_mask))(torch.randn(32, 8, dtype=dtype))


# -- sound plans ----------------------------------------------------------------------------------------------------------


def dropout(wrap: Wrap) -> Observed:
    return train(Layers(drop=0.3), [torch.randn(32, 8, requires_grad=True)], wrap)


def drifting(wrap: Wrap) -> Observed:
    return train(Drifting(), [torch.randn(32, 8)], wrap)


def on_function(
    function: Callable[..., Any], inputs: Callable[[], list[torch.Tensor]], wrap: Wrap, steps: int = 2
) -> Observed:
    """Leaves, then the function on what is made of them; all of it observed."""
    seen: dict[str, Any] = {}
    call = wrap(function)
    for step in range(steps):
        leaves = inputs()
        out = call(*leaves)
        outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        total = sum((t.abs().float().sum() for t in outs if t.requires_grad), torch.zeros(()))
        total.backward()
        for k, t in enumerate(outs):
            seen[f"{step} output {k}"] = t
        for k, t in enumerate(leaves):
            seen[f"{step} input {k}"] = t
            seen[f"{step} gradient {k}"] = t.grad if t.is_leaf else None
    return seen


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.sin(x).exp().cos()
    return x


def aliases(wrap: Wrap) -> Observed:
    def function(x: torch.Tensor, part: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        part.mul_(2)
        return deep(x * w)

    def inputs() -> list[torch.Tensor]:
        base = torch.linspace(0, 1, 32).view(4, 8)
        return [base, base[1:3], torch.ones(8, requires_grad=True)]

    return on_function(function, inputs, wrap)


def views_as_inputs(wrap: Wrap) -> Observed:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return deep(x * w), x.view(-1), w

    def inputs() -> list[torch.Tensor]:
        base = torch.linspace(0, 1, 64, requires_grad=True)
        return [(base * 2)[::2].view(4, 8), torch.ones(4, 1, requires_grad=True).expand(4, 8)]

    return on_function(function, inputs, wrap)


def mutated_with_gradient(wrap: Wrap) -> Observed:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = deep(x + w)
        x.add_(w)
        return y

    call = wrap(function)

    def wrapped(leaf: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = leaf * 1
        return call(x, w), x

    return on_function(
        wrapped, lambda: [torch.linspace(0, 1, 8, requires_grad=True), torch.ones(8, requires_grad=True)], lambda f: f
    )


def odd_values(wrap: Wrap) -> Observed:
    def function(x: torch.Tensor, z: torch.Tensor, n: int) -> tuple[Any, ...]:
        y = deep(x)
        return y, y.argmax(), y > 0.5, torch.view_as_real(z * y).sin(), y[:0], y.sum() * n, n, None

    call = wrap(function)
    return on_function(
        lambda x, z: call(x, z, 3),
        lambda: [torch.linspace(0, 1, 8, requires_grad=True), torch.ones(8, dtype=torch.complex64)],
        lambda f: f,
    )


def checkpointed(wrap: Wrap) -> Observed:
    """The compiled part stands inside a checkpoint, whose hooks count what is saved."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    call = wrap(layers)
    return train(
        nn.ModuleList([layers]), [torch.randn(4, 8)], lambda _: lambda x: checkpoint(call, x, use_reentrant=False)
    )


def zero_but_for_rounding(wrap: Wrap) -> Observed:
    """A bias before a batch norm, and that of attention's keys, have no gradient but rounding."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm, self.end = nn.Linear(8, 24), nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.norm(self.end(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2)).sin().exp()

    return train(Attention(), [torch.randn(2, 16, 8)], wrap)


def growing(wrap: Wrap) -> Observed:
    """Symbolic sizes."""
    model = Layers(2)
    call = wrap(model)
    seen: dict[str, Any] = {}
    for rows in (8, 16, 32):
        out = call(torch.randn(rows, 8))
        out.sin().sum().backward()
        seen[f"{rows}"] = out
    return seen | {n: p.grad for n, p in model.named_parameters()}


SOUND = [
    Case("dropout", dropout, reference="compiled", options={"check": 1}),
    Case("drifting", drifting, options={"check": 1}, compilers=("eager",)),
    Case("aliases", aliases, options={"check": 1}, compilers=("eager",)),
    Case("views as inputs", views_as_inputs, options={"check": 1}, compilers=("eager",)),
    Case("mutated with gradient", mutated_with_gradient, options={"check": 1}, compilers=("eager",)),
    Case("odd values", odd_values, options={"check": 1}, compilers=("eager",)),
    Case("checkpointed", checkpointed, options={"check": 1}, compilers=("eager",)),
    Case("zero but for rounding", zero_but_for_rounding, options={"check": 1}, rtol=1e-3, atol=1e-3),
    Case("growing", growing, options={"check": 1}, compilers=("eager",), rtol=1e-4, atol=1e-4),
]


@pytest.mark.parametrize(
    ("case", "compiler"),
    [
        pytest.param(
            c,
            n,
            id=f"{c}-{n}",
            marks=[pytest.mark.full] if (c.name, n) == ("zero but for rounding", "inductor") else [],
        )
        for c in SOUND
        for n in c.compilers
    ],
)
def test_a_sound_plan_passes_and_trains_as_ever(case: Case, compiler: str) -> None:
    check(case, compiler, ["min"])
    assert {report.check for report in compile_remat.reports()} == {"passed"}


@pytest.mark.full
def test_deep_models_of_every_precision_pass_through_inductor() -> None:
    """Fused recompute keeps more digits than a saved tensor of 16 bits: a difference, and no fault."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.compiler.reset()
        model = nn.Sequential(*[Block(16) for _ in range(24)]).to(dtype)
        step(model, compiler="inductor")(torch.randn(4, 16, 16, dtype=dtype))
        assert compile_remat.reports()[-1].check == "passed"
        assert compile_remat.reports()[-1].num_recomputed > 0


# -- the step itself --------------------------------------------------------------------------------------------------------


def step(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options = {"memory_budget": "min", "compiler": "eager", "check": 1, **options}
    return torch.compile(model, backend=remat, options=options)  # type: ignore[arg-type]


def test_without_gradients_nothing_is_compared_until_there_are_some() -> None:
    model, x = Layers(2), torch.randn(8, 8)
    call = step(model)
    with torch.no_grad():
        call(x)
    with torch.inference_mode():
        call(torch.randn(8, 8))
    assert compile_remat.reports() == []
    call(x).sum().backward()
    (report,) = compile_remat.reports()
    assert report.check == "passed"


def test_the_second_step_takes_no_more_memory() -> None:
    def second_peak(**options: Any) -> int:
        torch.compiler.reset()
        model, x = Layers(3), torch.randn(512, 8)
        call = step(model, **options)
        call(x).sum().backward()
        model.zero_grad()
        return peak_bytes(lambda: call(x).sum().backward(), "cpu").peak_bytes

    assert second_peak() <= second_peak(check=0)


def test_nothing_is_kept_of_the_first_step() -> None:
    kept: list[weakref.ref[Any]] = []

    class Watched(RematPartitioner):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            kept.append(weakref.ref(gm))
            return super().__call__(gm, joint_inputs, **kwargs)

    config = RematConfig(check=True, compiler="eager", memory_budget="min")  # type: ignore[arg-type]
    call = torch.compile(Layers(2), backend=lambda gm, inputs: compile_graph(gm, inputs, config, {}, Watched))
    call(torch.randn(8, 8)).sum().backward()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]  # the plan, and its copy that is compared


def test_a_budget_error_stays_what_it_is() -> None:
    with pytest.raises(BudgetError):
        step(Layers(), memory_budget="1KiB")(torch.randn(64, 8))


def test_the_fallback_of_the_planner_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(joint_problem.ProblemBuilder, "build", fail)
    with pytest.warns(PlannerWarning, match="planted"), pytest.raises(CheckError, match=r"layers\.1\.weight"):
        torch.compile(Layers(), backend=broken(zero_gradient))(torch.randn(32, 8))


def test_the_report_says_how_it_ended(tmp_path: Path) -> None:
    step(Layers(2), report_dir=str(tmp_path))(torch.randn(8, 8))
    (report,) = compile_remat.reports()
    assert report.check == "passed" and "  check passed\n" in str(report)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["check"] == "passed"


def test_the_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CHECK", "1")
    torch.compile(Layers(1), backend=remat, options={"compiler": "eager", "memory_budget": "min"})(torch.randn(8, 8))
    assert compile_remat.reports()[0].check == "passed"


# -- where it cannot be compared --------------------------------------------------------------------------------------------


def skipped(call: Callable[[], Any], why: str) -> None:
    with pytest.warns(CheckWarning, match=why):
        call()
    assert all(re.match(f"skipped: .*{why}", r.check) for r in compile_remat.reports())


def test_too_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_runs, "host_free_bytes", lambda: 1000)
    call, x = step(Layers(2)), torch.randn(8, 8)
    skipped(lambda: call(x), "1000 B is free")
    call(x).sum().backward()  # and no second warning


def test_a_tensor_of_another_kind_is_a_warning() -> None:
    x = TwoTensor(torch.randn(8, 8), torch.randn(8, 8)).requires_grad_()
    call = step(lambda t: deep(t).sum())
    skipped(lambda: call(x).backward(), "TwoTensor")


@torch.library.custom_op("remat_check::moody", mutates_args=())
def moody(x: torch.Tensor) -> torch.Tensor:
    """A function whose backward fails when it runs."""
    return x.sin()


@torch.library.custom_op("remat_check::moody_backward", mutates_args=())
def moody_backward(gradient: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no backward on this device")


moody.register_fake(torch.empty_like)
moody_backward.register_fake(torch.empty_like)
moody.register_autograd(lambda ctx, gradient: moody_backward(gradient))


def test_a_backward_that_always_fails_fails_in_the_backward() -> None:
    """The error does not come in the forward, which this training loop may never follow by a backward."""
    call, x, outputs = step(lambda x: moody(x.exp()) * x.cos().exp()), torch.randn(8, requires_grad=True), []
    skipped(lambda: outputs.append(call(x)), "no backward on this device")
    with pytest.raises(NotImplementedError, match="no backward on this device"):
        outputs[0].sum().backward()


# -- on a GPU --------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_on_a_gpu(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(drop=0.3).cuda(), torch.randn(32, 8, device="cuda")
    options = {"memory_budget": "min", "check": 1} | ({"mode": mode} if mode else {})
    torch.compile(model, backend=remat, options=options)(x).sum().backward()
    assert compile_remat.reports()[-1].check == "passed"
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 0)
    torch.compiler.reset()
    with pytest.warns(CheckWarning, match="not enough device memory"):
        torch.compile(Layers().cuda(), backend=remat, options=options)(x).sum().backward()


# -- the error -----------------------------------------------------------------------------------------------------------------


def test_a_check_error_survives_pickle() -> None:
    error = CheckError("output 0", "norm", "differs", 0.5, ("sin norm (model.py:1)",), 2)
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == str(error) and vars(back) == vars(error)
    assert "output 0 (module norm) differs." in str(error) and "first of 3 tensors" in str(error)
