"""The memory model against Inductor: the predicted peak is that of the emitted code, on small copies of the benchmarks' models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch.nn import functional as F

import compile_remat
from benchmarks import models
from benchmarks.common.code_only import without_compiler
from compile_remat._torch.codegen_rules import inductor_rules
from compile_remat._torch.version import torch_version
from compile_remat.backend import remat

TOLERANCE = 0.01
TOO_HIGH = {"densenet": 0.04}
"""On torch 2.11; on later ones seen on a processor with AVX2 alone, before masks of ReLUs were counted where they are written."""

OVERESTIMATED = pytest.mark.xfail(
    strict=True,
    reason="the forward of an unrolled cell this small: the code needs 8 % less than predicted",
)
PROOFS = ("gpt", "resnet")
LIKE_ANOTHER = ("chain1024", "bert", "vit")
"""Models built of the layers of chain256 and gpt."""

CASES = [
    pytest.param(
        name,
        budget,
        id=f"{name} at {budget}",
        marks=marks
        + [OVERESTIMATED] * (name == "recurrent" and budget != "min")
        + [pytest.mark.full] * (name in LIKE_ANOTHER)
        + [pytest.mark.proof] * (name in PROOFS and budget == "min"),
    )
    for budget, marks in (("min", []), (0.7, [pytest.mark.full]))
    for name in models.CASES
]


def reports_of(
    function: Callable[..., Any], inputs: Sequence[Any], budget: str | float, **more: str
) -> list[compile_remat.Report]:
    """The reports of one forward; code is generated and not compiled."""
    torch.compiler.reset()
    compile_remat.reset_reports()

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        remat(module, inputs, options={"memory_budget": budget, **more})
        return module.forward

    with without_compiler():
        torch.compile(function, backend=backend)(*inputs)
    return compile_remat.reports()


def assert_predicted(
    function: Callable[..., Any], inputs: Sequence[Any], budget: str | float = "min", **more: str
) -> compile_remat.Report:
    """The report of one graph whose predicted peak is that of its code."""
    (report,) = reports_of(function, inputs, budget, **more)
    assert report.predicted_peak_bytes == pytest.approx(report.scheduled_peak_bytes, rel=TOLERANCE)
    return report


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_the_predicted_peak_is_that_of_the_code(name: str, budget: str | float) -> None:
    case = models.build(name, scale=models.TOY_SCALE)
    reports = reports_of(case.module, case.inputs, budget)
    assert reports
    for report in reports:
        assert report.scheduled_peak_bytes and report.predicted_peak_bytes
        above = report.predicted_peak_bytes / report.scheduled_peak_bytes - 1
        assert -TOLERANCE <= above <= TOO_HIGH.get(name, TOLERANCE)


@pytest.mark.full
def test_what_is_computed_for_a_product_alone_is_not_written_before() -> None:
    """A Llama's SiLU was written to memory because a product's operand, itself in memory, would read too many buffers without it.
    The operand then reused the SiLU's buffer and not the gradient's: 17.6 % above the plan with gradients that leave early."""
    case = models.build("llama", scale=models.TOY_SCALE)
    assert assert_predicted(case.module, case.inputs, gradients="early").num_early


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.full), "vit"])
def test_inputs_that_autocast_casts_for_a_convolution_are_copied_before(name: str) -> None:
    """No prediction counted the copies of these inputs in channels-last layout, in float32: vit needed 22 % more, resnet 11 %."""
    case = models.build(name, scale=models.TOY_SCALE, dtype="autocast")
    assert_predicted(case.module, case.inputs)


def test_what_a_branch_allocates_counts() -> None:
    """All but 2 of the 29 MiB are temporaries inside of the branch's backward."""
    torch.manual_seed(0)
    norm, up, down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def model(x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 0, lambda x: x + down(nn.functional.gelu(up(norm(x)))), torch.sin, (x,))
        return y.square().mean()

    report = assert_predicted(model, [torch.randn(2048, 256, requires_grad=True)])
    assert report.predicted_peak_bytes == pytest.approx(29 << 20, rel=TOLERANCE)


class Fan(nn.Module):
    """Branches of one input, whose gradients are summed up by the kernels of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branches = nn.Linear(128, 128), nn.ModuleList(nn.Linear(128, 128, False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 128] -> scalar"""
        h = self.trunk(x).tanh()
        return torch.stack([(branch(h).sin() * h).exp() for branch in self.branches]).logsumexp(0).mean()


def test_summed_up_gradients_of_branches_do_not_keep_their_products() -> None:
    """With each product alive until the last addition, 26 MiB were predicted where the code needs 13: such budgets were refused."""
    report = assert_predicted(Fan(), (torch.randn(2048, 128),))
    assert report.scheduled_peak_bytes is not None and report.scheduled_peak_bytes < 14 * 2**20


class Skips(nn.Module):
    """Two resolutions with a skip by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up = block_of(3, 32), block_of(32, 64), block_of(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> scalar"""
        skip = self.first(x)
        below = self.down(nn.functional.avg_pool2d(skip, 2))
        return self.up(torch.cat([nn.functional.interpolate(below, scale_factor=2.0), skip], dim=1)).square().mean()


def block_of(inner: int, outer: int) -> nn.Sequential:
    """Two convolutions."""
    layers = [nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GroupNorm(8, outer), nn.SiLU())))


@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(
            "min",
            marks=pytest.mark.skipif(
                inductor_rules("cpu").gradients_read_eager_strides,
                reason="the workspace of a gradient is measured for the concatenation as the forward makes it: 2 % too much",
            ),
        ),
        "24MiB",
    ],
)
def test_a_skip_is_part_of_its_concatenation_and_copied_for_each_reader(budget: str) -> None:
    """In a forward the concatenation begins with the skip; convolutions get copies of it right before they run."""
    assert_predicted(Skips(), [torch.randn(4, 3, 64, 64)], budget)


class Decoder(nn.Module):
    """The end of an autoencoder: convolutions, then the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> scalar loss"""
        return nn.functional.mse_loss(self.body(x), x)


def test_what_is_saved_behind_the_last_convolution_has_the_layout_of_eager_mode() -> None:
    """The loss's gradient does not lie in place of the picture, which has its channels innermost."""
    assert_predicted(Decoder(), (torch.randn(32, 3, 64, 64),))


class Standardised(nn.Module):
    """Convolutions whose weights are standardised, as in big transfer's residual networks; arXiv:1903.10520."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64, 5, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 64, H, W] -> scalar"""
        for weight in self.weights:
            centred = weight - weight.mean((1, 2, 3), keepdim=True)
            x = nn.functional.conv2d(x, centred / weight.std((1, 2, 3), keepdim=True), padding=2).relu()
        return x.sum()


class Normed(nn.Module):
    """An input that is normalised before it is convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 16, H, W] -> scalar"""
        return self.second(self.first(nn.functional.group_norm(x, 4).sigmoid()).tanh()).sin().mean()


@pytest.mark.parametrize("budget", ["1GiB", "min"])
@pytest.mark.parametrize(
    ("model", "shape", "is_leaf"),
    [(Standardised, (4, 64, 16, 16), False), (Normed, (8, 16, 32, 32), True), (Normed, (8, 16, 32, 32), False)],
)
def test_inputs_that_convolutions_are_computed_from_are_copied(
    model: type[nn.Module], shape: tuple[int, ...], is_leaf: bool, budget: str
) -> None:
    """Only inputs that a convolution reads directly were counted: standardised weights needed 29 % more than predicted."""
    assert_predicted(model(), (torch.randn(shape, requires_grad=is_leaf),), budget)


class Head(nn.Module):
    """The end of a language model: norm, head, loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 1024, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[N, 64], [N] -> scalar loss"""
        return nn.functional.cross_entropy(self.head(self.norm(x)), targets)


@pytest.mark.parametrize("limit", [30, 32])
def test_the_loss_in_bfloat16_has_as_many_operations_as_a_fused_expression_may_have(limit: int) -> None:
    """The loss's backward has 30 operations, and two more if the logarithm and a conversion are recomputed: then the gradient of
    the logits gets a buffer of its own beside the logits."""
    x, targets = torch.randn(2048, 64, dtype=torch.bfloat16), torch.randint(0, 1024, (2048,))
    with config.patch(realize_opcount_threshold=limit):
        report = assert_predicted(Head().bfloat16(), (x, targets))
    assert report.predicted_peak_bytes is not None and report.predicted_peak_bytes < 7 * 2**20  # the logits are 4 MiB


@pytest.mark.parametrize("budget", ["min", 0.8])
def test_what_is_written_depends_on_what_is_saved(budget: str | float) -> None:
    """A norm's gradient has 33 operations and is written in float32 if the norm's input is saved.  If that input is recomputed,
    the input is written, and the gradient after its sum, in bfloat16: a vision transformer needed 2 % more than predicted."""
    case = models.build("vit", scale=models.TOY_SCALE, dtype="bfloat16")
    with config.patch(realize_opcount_threshold=30):
        (report,) = reports_of(case.module, case.inputs, budget)
    assert report.predicted_peak_bytes == pytest.approx(report.scheduled_peak_bytes, rel=TOLERANCE / 10)


def test_two_readers_of_the_forward_part_no_kernel_of_the_backward() -> None:
    """Under autocast, the loss and its backward read the logarithm of the softmax; the backward has one reader of it, which
    computes it again in registers and writes over the logits.  Believed to be computed apart there, it gave 4 MiB too much."""

    def loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: Tensor = head(x, targets)
        return found

    x, targets = torch.randn(2048, 64), torch.randint(0, 1024, (2048,))
    assert_predicted(partial(loss, Head()), (x, targets))


class Spectral(nn.Module):
    """Filters with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(129, dtype=torch.complex64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 256] -> scalar"""
        for weight in self.weights:
            x = torch.fft.irfft(torch.fft.rfft(x) * weight, n=256).tanh() + x
        return x.mean()


def test_operators_on_complex_numbers_are_kernels_of_their_own() -> None:
    """Predicted were 18 MiB where the code of four such layers on [2048, 256] needed 22."""
    assert_predicted(Spectral(), (torch.randn(1024, 256),))


class Normed(nn.Module):
    """Three blocks with a batch norm and an activation, and their mean square."""

    def __init__(self, layer: Callable[[], nn.Module], activation: nn.Module, *, is_residual: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(layer(), nn.BatchNorm2d(32), activation) for _ in range(3)]
        self.blocks, self.is_residual = nn.ModuleList(blocks), is_residual

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) if self.is_residual else block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("kernel", "activation", "is_residual"),
    [(3, nn.SiLU(), True), (3, nn.ReLU(), True), (1, nn.ReLU(), False)],
    ids=["silu-residual", "relu-residual", "relu-1x1"],
)
def test_a_batch_norm_parts_the_kernel_that_sums_from_the_one_that_reads_the_sums(
    kernel: int, activation: nn.Module, is_residual: bool
) -> None:
    """The gradient of a batch norm sums over all dimensions but the second, so no kernel can read the sums in the same loops.  A
    value that both kernels read is a buffer.  The prediction lacked the buffer: 28 % of the peak with SiLU, 10 with ReLU."""
    model = Normed(
        lambda: nn.Conv2d(32, 32, kernel, padding=kernel // 2, bias=False), activation, is_residual=is_residual
    )
    images = torch.randn(8, 32, 32, 32, dtype=torch.bfloat16, requires_grad=True)
    assert_predicted(model.to(torch.bfloat16), [images])


def block(*behind: nn.Module) -> nn.Module:
    """Convolution, norm and activation, and what comes behind them."""
    return nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU(), *behind)


def report_of_blocks(dtype: torch.dtype, *behind: nn.Module) -> compile_remat.Report:
    """The report of the lowest plan of two blocks, whose predicted peak is that of their code."""
    images = torch.randn(4, 16, 32, 32, dtype=dtype, requires_grad=True)
    return assert_predicted(nn.Sequential(block(*behind), block(*behind)).to(dtype), [images])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_group_norm_with_an_activation_has_the_peak_of_its_code(dtype: torch.dtype) -> None:
    """Pixels are summed up, then channels, before the gradient of the input: that gradient is read from memory, twice.  Believed to
    stay in registers it gave 14 % too little in bfloat16.  The sigmoid that SiLU's backward computes again, and that two read, is
    computed by their kernel: believed to lie in memory, it gave 15 % too much in float32."""
    report_of_blocks(dtype)


def test_a_pooled_group_norms_gradient_is_one_kernel_from_2_13_on() -> None:
    """The gradient of the pooling goes over rows and columns, what it is multiplied by over pixels: in two loops, the sigmoid
    was written to memory between them, 24 % above the plan.  Before 2.13 they are two, and so they are in the plan."""
    report = report_of_blocks(torch.bfloat16, nn.AvgPool2d(2))
    if torch_version() >= (2, 13) and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # without bfloat16 instructions the peak is a convolution's, which converts its inputs
        assert report.scheduled_peak_bytes is not None and report.scheduled_peak_bytes < 600_000


def test_a_gradient_that_comes_in_for_a_convolution_is_copied_into_its_layout() -> None:
    """The caller's gradient has its channels outermost: predicted were 4.2 MB, and the code needed 6.3."""
    images = torch.randn(8, 16, 32, 32)
    assert_predicted(nn.Sequential(block(), nn.Conv2d(16, 64, 1)), [images])


class Applied(nn.Module):
    """A function of a tensor and a parameter."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(shape)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def scaled_and_dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x * weight, 0.3)


def dropped_and_scaled(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x * 0.5 + x[:1, :1], 0.3) * weight


@pytest.mark.parametrize("needs_gradient", [True, False], ids=["input with gradient", "input without"])
@pytest.mark.parametrize("function", [scaled_and_dropped, dropped_and_scaled])
@pytest.mark.parametrize("shape", [(32,), (40, 1), (12, 1, 1), (1,)], ids=["rows", "middle", "first", "one"])
def test_numbers_that_are_drawn_again_for_a_sum_alone_are_written(
    shape: tuple[int, ...], function: Callable[[Tensor, Tensor], Tensor], needs_gradient: bool
) -> None:
    """A parameter's gradient sums in other loops than those in which Inductor draws: predictions were 33 to 50 % too low."""
    x = torch.randn(12, 40, 32, requires_grad=needs_gradient)
    assert_predicted(Applied(shape, function), [x])


READERS: dict[str, tuple[Tensor, tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "parts of a gradient": (
        torch.zeros(6, 8, 24, 16, requires_grad=True),
        (16,),
        lambda x, w: F.layer_norm(torch.cat([x, x, x]), (16,), w, w),
    ),
    "a flipped sum": (torch.zeros(12, 40, 32, requires_grad=True), (1,), lambda x, w: x.cumsum(-1) * 0.5),
    "every other column": (torch.zeros(12, 40, 29), (29, 29), lambda x, w: F.linear(x, w)[..., ::2].square()),
    "the largest": (
        torch.zeros(12, 40, 32, dtype=torch.float64),
        (32,),
        lambda x, w: (x * w).topk(29, -1)[0].to(torch.float32),
    ),
    "read by two sums": (
        torch.zeros(12, 40, 32, requires_grad=True),
        (32,),
        lambda x, w: F.dropout(x * w, 0.3).tanh().sin(),
    ),
    "repeated columns": (
        torch.zeros(64, 64, requires_grad=True),
        (64,),
        lambda x, w: (x * w).repeat_interleave(2, -1),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_elsewhere_is_not_written_over_and_short_sums_are_no_reductions(name: str) -> None:
    """Kernels that read slices, or sum in another order, do not compute what they read, and nothing is written over that is read
    elsewhere: 24 to 37 % were missing.  A sum of a few elements is part of its readers' expressions, and the gradient of the
    largest is written by a fused kernel: 16 to 33 % too much."""
    x, weight, function = READERS[name]
    assert_predicted(Applied(weight, function), [x])
