"""The peak that is predicted before Inductor is entered, where kernels take more than their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compile_remat
from compile_remat._torch import conv_layout
from compile_remat._torch.fake import say_device
from compile_remat.backend import remat
from compile_remat.cost_models import UnitCost
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor import workspace
from compile_remat.inductor.workspace import workspace_bytes
from compile_remat.passes import build_problem

pytestmark = pytest.mark.usefixtures("own_caches")

aten = torch.ops.aten


# -- one kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("channels", "size", "stride"), [((3, 24), 32, 1), ((24, 48), 16, 2), ((32, 32), 16, 1)])
def test_the_workspace_is_what_the_allocator_sees_beside_the_outputs(
    order: torch.memory_format, channels: tuple[int, int], size: int, stride: int
) -> None:
    x = torch.randn(4, channels[0], size, size).to(memory_format=order)
    weight = torch.randn(channels[1], channels[0], 3, 3).to(memory_format=order)
    how = ([stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    forward = (x, weight, None, *how)
    gradient = torch.empty_like(aten.convolution.default(*forward))
    backward = (gradient, x, weight, [0], *how, [True, True, False])
    for target, args in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        run: Callable[[], Any] = lambda target=target, args=args: target(*args)  # noqa: E731
        run()
        measured = peak_bytes(run, "cpu")
        assert workspace_bytes(target, args, {}) == measured.peak_bytes - measured.end_bytes


CALLS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "a transform of two dimensions": (
        aten._fft_c2r.default,
        (torch.zeros(8, 64, 65, dtype=torch.cfloat), [1, 2], 2, 128),
        8 * 64 * 65 * 8,
    ),
    "an inverse": (aten.linalg_inv_ex.default, (torch.eye(64),), 64 * 64 * 4),
    "every second number": (aten.mm.default, (torch.ones(64, 64, 2)[..., 0], torch.ones(64, 64)), 64 * 64 * 4),
    "an argument written into": (
        aten.index_put_.default,
        (torch.ones(64), [torch.ones(64) > 0], torch.ones(64)),
        64 * 8,
    ),
    "random numbers": (aten.multinomial.default, (torch.ones(64, 64), 2), 64 * 64 * 4),
}
"""The operator, its arguments, and the least that it takes on any processor."""


@pytest.mark.parametrize("name", CALLS)
def test_any_operator_is_measured(name: str) -> None:
    target, args, least = CALLS[name]
    state = torch.get_rng_state()
    found = workspace_bytes(target, args, {})
    assert torch.equal(torch.get_rng_state(), state)
    measured = peak_bytes(lambda: target(*args), "cpu")
    assert found == measured.peak_bytes - measured.end_bytes >= least


def test_a_call_with_a_place_for_the_result_takes_what_the_call_without_it_does() -> None:
    args = CALLS["every second number"][1]
    found = workspace_bytes(aten.mm.out, args, {"out": torch.empty(64, 64)})
    assert found == workspace_bytes(aten.mm.default, args, {}) > 0


def test_products_that_blas_computes_where_their_operands_lie_are_not_run() -> None:
    with FakeTensorMode():
        huge = torch.empty(1 << 30, 1 << 30)
        assert workspace_bytes(aten.mm.default, (huge, huge.t()), {}) == 0
        assert workspace_bytes(aten.addmm.default, (huge[0], huge, huge.t()), {}) == 0


def test_what_does_not_fit_counts_as_none_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode():
        huge = torch.empty(1 << 30, 1 << 30, dtype=torch.bfloat16)
        assert workspace_bytes(aten.mm.default, (huge, huge), {}) == 0
    assert "the workspace of aten.mm.default cannot be measured" in caplog.text


@pytest.mark.parametrize("use_kineto", [True, False])
def test_an_operator_is_measured_while_the_user_profiles_this_very_step(use_kineto: bool) -> None:
    args = CALLS["an inverse"][1]
    with torch.autograd.profiler.profile(use_kineto=use_kineto, profile_memory=True) as profile:
        found = workspace_bytes(aten.linalg_inv_ex.default, args, {})
    assert found >= 64 * 64 * 4 and not any("inv" in event.name for event in profile.function_events)


def test_what_cannot_be_run_counts_as_none() -> None:
    assert workspace_bytes(aten.linalg_inv_ex.default, (torch.ones(3, 4),), {}) == 0
    assert not kept()


# -- what must not run ------------------------------------------------------------------------------------------------

runs: list[str] = []


@torch.library.custom_op("workspace_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """An operator with a Python kernel: its memory beside the result is unknown."""
    runs.append("counted")
    return x.clone()


def test_operators_that_may_do_something_else_are_not_run() -> None:
    x = torch.ones(8)
    operators = torch.ops.workspace_tests.counted.default, aten._print.default, aten.nonzero.default
    for target, args in zip(operators, ((x,), ("a text",), (x,)), strict=True):
        assert workspace_bytes(target, args, {}) == 0
    assert not runs and not kept()


# -- what is kept -----------------------------------------------------------------------------------------------------


def kept() -> dict[str, int]:
    return workspace._file("cpu").read()


def test_what_was_measured_is_kept_by_operator_sizes_types_strides_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(workspace, "most_allocated", lambda run, device: (ran.append(run()), (77, None))[1])
    x = torch.ones(4, 6)
    calls = (x, x), (x, x), (x.t(), x.t()), (x.double(), x), (x[:2], x[:2])
    sizes = [len(ran) for args in calls if workspace_bytes(aten.special_zeta.default, args, {}) == 77]
    assert sizes == [1, 1, 2, 3, 4]
    workspace._known.cache_clear()  # as another process
    assert workspace_bytes(aten.special_zeta.default, (x, x), {}) == 77 and len(ran) == 4
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert workspace_bytes(aten.special_zeta.default, (x, x), {}) == 77 and len(ran) == 5
    finally:
        torch.set_num_threads(threads)


# -- which nodes ------------------------------------------------------------------------------------------------------


def test_operators_that_inductor_emits_itself_take_nothing_and_those_that_it_calls_do() -> None:
    def called(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.kthvalue(x, 2), torch.complex(x, x).abs(), x + y, x @ y, x.index_put([y.long()[0]], x[0], True)

    graph = make_fx(called, tracing_mode="fake")(torch.ones(64, 64), torch.ones(64, 64)).graph
    is_called = {str(n.target): workspace.is_library_kernel(n) for n in graph.nodes if n.op == "call_function"}
    for name in ("kthvalue.default", "abs.default", "complex.default", "mm.default"):
        assert is_called[f"aten.{name}"]
    for name in ("add.Tensor", "index_put.default", "_to_copy.default"):
        assert not is_called[f"aten.{name}"]
    (values,) = (n for n in graph.nodes if n.target is aten.kthvalue.default)
    assert workspace.node_workspace_bytes(values) > 0


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL draws masks as integers of four bytes")
def test_what_dropout_takes_for_its_mask_under_fallback_random_counts() -> None:
    """Inductor calls the operator then; otherwise it draws the numbers itself, and the graph has other nodes."""
    before = torch.get_rng_state()
    graph = make_fx(lambda x: aten.native_dropout(x, 0.2, True), tracing_mode="fake")(torch.ones(512, 512)).graph
    (node,) = (n for n in graph.nodes if n.target is aten.native_dropout.default)
    assert workspace.node_workspace_bytes(node) == 512 * 512 * 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gpus_convolutions_are_asked_about_in_the_layout_of_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches of an image lie channels last there, a decoder that halves the channels does not; another kernel adds the bias."""
    asked: list[list[tuple[int, ...]]] = []

    def known(target: Any, call: Any, device_type: str) -> int:
        assert (target, device_type) == (aten.convolution.default, "cuda")
        asked.append([like.strides for like in workspace.likes(call)])
        return 77

    monkeypatch.setattr(workspace, "_is_here", lambda device_type: True)
    monkeypatch.setattr(workspace, "_known_or_measured", known)
    for channels, kernel in ((3, 128), 8), ((256, 128), 3):
        with FakeTensorMode():
            shapes = (1, channels[0], 16, 16), (channels[1], channels[0], kernel, kernel), (channels[1],)
            graph = make_fx(lambda x, w, b: torch.conv2d(x, w, b))(*map(torch.empty, shapes))
        say_device(graph, torch.device("cuda", 0))
        problem = build_problem(graph, cost=UnitCost(), workspace=workspace.node_workspace_bytes)
        assert [value.workspace_bytes for value in problem.values] == [77]
    assert asked == [[(768, 1, 48, 3), (192, 1, 24, 3)], [(65536, 256, 16, 1), (2304, 9, 3, 1)]]


@pytest.mark.parametrize(
    ("tensor", "is_copied"),
    [
        (torch.empty(8, 4, 3, 3), True),
        (torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last), False),
        (torch.empty(8, 4, 1, 1), False),
        (torch.empty(8, 1, 3, 3), False),
        (torch.empty(8, 4, 3), False),
        (torch.empty(8, 4, 3, 3, device="meta"), False),
    ],
)
def test_inputs_of_convolutions_are_copied_where_their_channels_are_not_innermost(
    tensor: torch.Tensor, is_copied: bool
) -> None:
    assert conv_layout.is_copied(tensor) == is_copied


# -- whole models -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A convolution with a norm, which decides in which order its gradients are made."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, 1, 1), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class Filter(nn.Module):
    """A filter in the frequencies of the last `dims` dimensions: its kernels are all called, and some take copies."""

    def __init__(self, dims: int, size: int) -> None:
        super().__init__()
        self.dims = tuple(range(-dims, 0))
        self.weight = nn.Parameter(torch.randn(*[size] * (dims - 1), size // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfftn(x, dim=self.dims) * self.weight
        sizes = [x.shape[d] for d in self.dims]
        return torch.fft.irfftn(frequencies, s=sizes, dim=self.dims).tanh()


class Above(nn.Module):
    """Each row minus its quantile; `kthvalue` takes a copy of all rows and of their indices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.tanh(h - h.kthvalue(10, dim=-1, keepdim=True).values)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *[Layer(32, nn.GroupNorm(8, 32)) for _ in range(4)]),
        (8, 3, 32, 32),
    ),
    "quantiles": (lambda: nn.Sequential(*[Above(128) for _ in range(4)]), (512, 128)),
    "transforms of images": (lambda: nn.Sequential(*[Filter(2, 32) for _ in range(4)]), (16, 8, 32, 32)),
}


class Scalar(nn.Module):
    """A model with a scalar output, so that no output of the user is part of the peak."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("name", "share"), [("group norm", 200), ("quantiles", 20), ("transforms of images", 200)])
def test_the_prediction_is_what_the_allocator_sees(name: str, share: int) -> None:
    """The prediction is the emitted code's peak to one part in `share`, and the allocator's peak to 2 % or that part."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = Scalar(make()), torch.randn(shape)
    call = torch.compile(model, backend=remat, options={"memory_budget": "min"})
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        measured = peak_bytes(lambda: call(x).backward(), "cpu").peak_bytes  # of the second step
    (report,) = compile_remat.reports()
    assert report.predicted_peak_bytes is not None and report.scheduled_peak_bytes is not None
    assert abs(report.predicted_peak_bytes - report.scheduled_peak_bytes) <= measured // share
    assert abs(report.predicted_peak_bytes - measured) <= measured // min(share, 50)
