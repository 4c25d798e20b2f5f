"""Flows of zuko, differential equations of torchdiffeq, a picture as a network of siren-pytorch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.models.building import Built
from benchmarks.zoo.building import WithLoss, entries
from benchmarks.zoo.written import layers


class Likelihood(nn.Module):
    """The loss of a flow of zuko."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        """[B, D] -> loss"""
        return -self.flow().log_prob(x).mean()


def flow(name: str, *, batch: int = 2048, **options: object) -> Callable[[], Built]:
    """A flow of zuko by its class."""

    def build() -> Built:
        import zuko

        return Likelihood(getattr(zuko.flows, name)(8, 0, hidden_features=(128, 128), **options)), (
            torch.randn(batch, 8),
        )

    return build


class Dynamics(nn.Module):
    """The rate of change of a state, which depends on the time too."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = layers(width, 4 * width, 4 * width, width)

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        """[B, D] -> [B, D]"""
        return self.net(state + time)


class NeuralOde(nn.Module):
    """A state followed by torchdiffeq over four steps of a Runge-Kutta rule."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.dynamics, self.method = Dynamics(), method

    def forward(self, state: Tensor, times: Tensor) -> Tensor:
        """[B, D], [T] -> loss"""
        from torchdiffeq import odeint

        return odeint(self.dynamics, state, times, method=self.method)[-1].square().mean()


def neural_ode(method: str) -> Callable[[], Built]:
    return lambda: (NeuralOde(method), (torch.randn(512, 64), torch.linspace(0.0, 1.0, 5)))


def siren() -> Built:
    """A picture as a network of sines, of siren-pytorch."""
    from siren_pytorch import SirenNet

    net = SirenNet(dim_in=2, dim_hidden=128, dim_out=3, num_layers=5, w0_initial=30.0)
    return WithLoss(net), (torch.rand(8192, 2),)


ENTRIES = (
    *entries(
        "flow",
        "zuko",
        {"spline_flow": flow("NSF", transforms=3), "masked_flow": flow("MAF", transforms=4)},
    ),
    *entries("differential equation", "torchdiffeq", {"ode_rk4": neural_ode("rk4")}),
    *entries("field", "siren-pytorch", {"siren": siren}),
)
