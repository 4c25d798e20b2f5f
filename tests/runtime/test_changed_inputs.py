"""Inputs that change before a backward reads them again: an error with the user's names, and torch's own where plain reads them."""

from __future__ import annotations

import functools
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat.errors import CheckWarning, InputChangedError
from compile_remat.passes import Plan, Status
from compile_remat.report import Report
from compile_remat.runtime.changed_inputs import ChangedInputs
from compile_remat.runtime.process_state import clear_process_state
from compile_remat.runtime.region import CompiledRegion, RunningPlan
from compile_remat.verify import side_runs
from tests.correctness.harness import without_caches

ROWS, WIDTH = 512, 32
CONSTANT = {"memory_budget": "min", "compiler": "eager", "inputs": "constant"}
TORCHS_OWN = "one of the variables needed for gradient computation has been modified by an inplace operation"


pytestmark = pytest.mark.usefixtures("fresh")


# -- the hook, on a graph of one product ------------------------------------------------------------------------------------


def product(meanwhile: Callable[[], object] = lambda: None) -> Callable[..., tuple[Tensor]]:
    """AOTAutograd's function for ``x * scale + shift``, under a plan that reads `shift` again; `meanwhile` runs in its backward."""

    class Product(torch.autograd.Function):
        compiled_fw = None  # the mark of AOTAutograd's classes

        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            # As AOTAutograd does: a view is detached, so that only memory and version are shared.
            ctx.save_for_backward(*(t.detach() if t._is_view() else t for t in (scale, shift)))
            return x * scale + shift

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            meanwhile()
            scale, _ = ctx.saved_tensors
            return gradient * scale, None, None

    return lambda *args: (Product.apply(*args),)


def region(setting: str = "constant", compiled: Callable[..., Any] | None = None, **options: Any) -> CompiledRegion:
    """A region of which plain torch.compile's backward reads `scale` alone."""
    plan = Plan("key", Status.FEASIBLE, None, (), ("sum",), 1, 1, 1, 1, 1, 1, 1)
    report = Report("key", "min", None, plan, inputs_beyond_plain=(2,), inputs_as_plain=(1,))
    hook = ChangedInputs(("x", "scale", "0.shift"), setting, **options)
    return CompiledRegion(RunningPlan(compiled or product(), report), [hook])


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(3, requires_grad=True), torch.full((3,), 2.0), torch.full((3,), 3.0)


@pytest.mark.parametrize("setting", ["as_plain", "constant"])
def test_the_error_names_the_input_and_the_cure(setting: str) -> None:
    x, scale, shift = arguments()
    (y,) = region(setting)(x, scale, shift)
    shift.add_(1)
    with pytest.raises(InputChangedError, match=r"`0\.shift` was changed in place") as caught:
        y.sum().backward()
    error = caught.value
    assert error.inputs == ("0.shift",) and error.setting == setting
    assert TORCHS_OWN in str(error.__cause__)
    assert "change it after the backward" in str(error) and ("as_plain" in str(error)) == (setting == "constant")
    assert x.grad is None


def test_nothing_changed_is_no_error() -> None:
    x, scale, shift = arguments()
    (y,) = region()(x, scale, shift)
    y.sum().backward()
    shift.add_(1)
    torch.testing.assert_close(x.grad, scale)


@pytest.mark.parametrize("both", [False, True])
def test_what_plain_reads_as_well_is_torchs_own_error(both: bool) -> None:
    """Also beside an input that it does not read: plain torch.compile refuses such a program."""
    x, scale, shift = arguments()
    (y,) = region()(x, scale, shift)
    scale.add_(1)
    shift.add_(int(both))
    with pytest.raises(RuntimeError, match=TORCHS_OWN) as caught:
        y.sum().backward()
    assert not isinstance(caught.value, InputChangedError)


def raising(text: str, change: Callable[[], object] = lambda: None) -> Callable[[], object]:
    def run() -> None:
        change()
        raise RuntimeError(text)

    return run


def test_other_errors_of_the_backward_pass() -> None:
    x, scale, shift = arguments()
    (y,) = region(compiled=product(raising("something else")))(x, scale, shift)
    shift.add_(1)
    with pytest.raises(RuntimeError, match="something else") as caught:
        y.sum().backward()
    assert not isinstance(caught.value, InputChangedError)


def test_a_view_that_is_gone_is_found_through_its_base() -> None:
    x, scale, _ = arguments()
    buffer = torch.zeros(6)
    (y,) = region()(x, scale, buffer[:3])
    buffer.normal_()
    with pytest.raises(InputChangedError, match=r"0\.shift"):
        y.sum().backward()


def test_a_second_backward_of_one_graph() -> None:
    x, scale, shift = arguments()
    (y,) = region()(x, scale, shift)
    y.sum().backward(retain_graph=True)
    shift.add_(1)
    with pytest.raises(InputChangedError, match=r"0\.shift"):
        y.sum().backward()


def test_what_changes_within_the_backward_has_not_changed_before_it() -> None:
    """For example a parameter whose hook steps an optimizer."""
    x, scale, shift = arguments()
    (y,) = region(compiled=product(raising(TORCHS_OWN, lambda: shift.add_(1))))(x, scale, shift)
    with pytest.raises(RuntimeError, match=TORCHS_OWN) as caught:
        y.sum().backward()
    assert not isinstance(caught.value, InputChangedError)


def test_no_input_is_kept_alive() -> None:
    """Autograd may have put what is saved elsewhere, as under hooks for saved tensors."""
    x, scale, shift = arguments()
    gone = weakref.ref(shift)
    with torch.autograd.graph.save_on_cpu():
        (y,) = region()(x, scale, shift * 1)
    del shift
    gc.collect()
    assert gone() is None
    y.sum().backward()


@pytest.mark.parametrize("retries", [0, 1])
def test_a_tensor_of_inference_mode_has_no_version(retries: int) -> None:
    """Autograd cannot save it, but a graph whose backward does not read it may take it."""
    with torch.inference_mode():
        x = rows()
    net = Net(stem=True)
    compiled(net, memory_budget="max", oom_retry=retries)(x).backward()
    assert net.layers[0].weight.grad is not None


# -- compiled programs --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers; those of a frozen stem, if it has one, before them."""

    def __init__(self, depth: int = 4, *, stem: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).requires_grad_(False) if stem else nn.Identity()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="remat", options={**CONSTANT, **options})  # type: ignore[return-value]


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def add(tensor: Tensor, number: float = 1.0) -> None:
    with torch.no_grad():
        tensor.add_(number)


@pytest.mark.parametrize(
    ("compiler", "retain"),
    [("eager", False), ("eager", True), pytest.param("inductor", False, marks=pytest.mark.full)],
)
def test_a_bias_of_a_module(compiler: str, retain: bool) -> None:
    net = Net()
    loss = compiled(net, compiler=compiler)(rows())
    if retain:
        loss.backward(retain_graph=True)
    add(net.layers[1].bias)
    with pytest.raises(InputChangedError, match=r"`layers\.1\.bias` was changed in place"):
        loss.backward()


def test_an_argument_of_a_function() -> None:
    net = Net(stem=True)

    def loss_of(images: Tensor) -> Tensor:
        return net(images)  # type: ignore[no-any-return]

    images = rows()
    loss = compiled(loss_of)(images)
    images.normal_()
    with pytest.raises(InputChangedError) as caught:
        loss.backward()
    assert caught.value.inputs == ("images",)


def test_a_region_that_is_checkpointed_in_the_graph() -> None:
    """Plain torch.compile reads the bias of that region, and none of the others."""
    net = Net()

    def loss_of(x: Tensor) -> Tensor:
        x = checkpoint(lambda x: F.gelu(net.layers[0](x)).sin(), x, use_reentrant=False)
        return (F.gelu(net.layers[2](F.gelu(net.layers[1](x)))) ** 2).mean()  # type: ignore[no-any-return]

    inside, outside = net.layers[0].bias, net.layers[1].bias
    call = compiled(loss_of)
    for bias, kind in ((inside, RuntimeError), (outside, InputChangedError)):
        loss = call(rows())
        add(bias)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace") as caught:
            loss.backward()
        assert type(caught.value) is kind


def test_a_checkpoint_around_the_graph_runs_it_again_as_in_eager_mode() -> None:
    """Torch recomputes with what the bias is then, and raises nothing."""
    found = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        net = Net()
        loss = checkpoint(wrap(net), rows(), use_reentrant=False)
        add(net.layers[1].bias)
        loss.backward()
        found.append(net.layers[0].weight.grad)
    torch.testing.assert_close(*found)


def test_early_gradients_step_the_parameters_inside_of_the_backward() -> None:
    def train(wrap: Callable[..., Any], *, changes: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        net = Net()

        def step(p: Tensor) -> None:
            add(p, 0.01)
            p.grad = None

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        call = wrap(net)
        for _ in range(2):
            loss = call(rows())
            if changes:
                add(net.layers[2].bias)
            loss.backward()
        return list(net.parameters())

    early = functools.partial(compiled, gradients="early")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = train(early)
    torch.testing.assert_close(actual, train(lambda f: f))
    torch.compiler.reset()
    with pytest.raises(InputChangedError, match=r"layers\.2\.bias"):
        train(early, changes=True)


@pytest.mark.usefixtures("one_rank")
def test_the_module_of_a_rank() -> None:
    net = Net()
    loss = compiled(DistributedDataParallel(net))(rows())
    add(net.layers[1].bias)
    with pytest.raises(InputChangedError, match=r"layers\.1\.bias"):
        loss.backward()


@pytest.mark.full
@pytest.mark.usefixtures("own_caches")
def test_what_a_cache_gives_knows_its_inputs() -> None:
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        for from_cache in (False, True):
            torch.compiler.reset()
            clear_process_state()
            net = Net()
            call = compiled(net, compiler="inductor")
            call(rows()).backward()
            assert [report.from_cache for report in compile_remat.reports()] == [from_cache]
            loss = call(rows())
            add(net.layers[1].bias)
            with pytest.raises(InputChangedError, match=r"layers\.1\.bias"):
                loss.backward()


# -- check -------------------------------------------------------------------------------------------------------------------


def by_data(tensor: Tensor) -> None:
    tensor.data.add_(1)


def by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[:] = 0


@pytest.mark.parametrize("change", [add, by_data, by_numpy])
def test_a_check_finds_changes_of_every_kind(change: Callable[[Tensor], None]) -> None:
    net = Net()
    with without_caches():
        loss = compiled(net, check="1")(rows())
        assert compile_remat.reports()[-1].check == "passed"
        change(net.layers[1].bias)
        with pytest.raises(InputChangedError, match=r"`layers\.1\.bias` was changed by \d\.\d\de[-+]\d\d") as caught:
            loss.backward()
    assert re.search("change it after the backward.*as_plain", str(caught.value), re.DOTALL)
    assert compile_remat.reports()[-1].check == "failed: layers.1.bias changed before the backward"
    assert net.layers[0].weight.grad is None


def test_a_check_names_the_one_that_changed_most() -> None:
    x, scale, shift = arguments()
    hook = ChangedInputs(("x", "0.shift", "1.shift"), "constant", checks=True)
    one = region()
    report = compile_remat.report.replace(one.running.report, inputs_beyond_plain=(1, 2), inputs_as_plain=())
    one = CompiledRegion(RunningPlan(product(), report), [hook])
    (y,) = one(x, scale, shift)
    scale.data.add_(1)
    shift.data.add_(2)
    with pytest.raises(
        InputChangedError, match=r"`0\.shift`, `1\.shift` were changed, most of all `1\.shift`, by 2\.00e"
    ):
        y.sum().backward()


def test_a_check_compares_the_first_step_alone() -> None:
    x, scale, shift = arguments()
    one = region(checks=True)
    (y,) = one(x, scale, shift)
    y.sum().backward()
    (y,) = one(x, scale, shift)
    shift.data.add_(1)
    y.sum().backward()


def test_a_check_leaves_what_plain_reads_to_torch() -> None:
    x, scale, shift = arguments()
    (y,) = region(checks=True)(x, scale, shift)
    scale.add_(1)
    shift.data.add_(1)
    with pytest.raises(RuntimeError, match=TORCHS_OWN):
        y.sum().backward()


def test_a_check_without_memory_for_copies_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_runs, "host_free_bytes", lambda: 1)
    x, scale, shift = arguments()
    with pytest.warns(
        CheckWarning, match="changes of inputs before the backward are not looked for: not enough host memory"
    ):
        (y,) = region(checks=True)(x, scale, shift)
    shift.data.add_(1)
    y.sum().backward()
