"""Architectures that no common library has, written from their papers: gradients inside of the loss, loops over time, fields."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built
from benchmarks.zoo.building import WithLoss, entries


def layers(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them."""
    made: list[nn.Module] = []
    for before, after in pairwise(widths):
        made += [nn.Linear(before, after), activation()]
    return nn.Sequential(*made[:-1])


# -- gradients inside of the loss ----------------------------------------------------------------------------------------


class Burgers(nn.Module):
    """A physics-informed net (Raissi et al., 2019) for u_t + u u_x = nu u_xx, derivatives by `torch.func`."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.net = layers(2, *(width,) * depth, 1)

    def forward(self, points: Tensor) -> Tensor:
        """Times and places [N, 2] -> loss"""

        def first(z: Tensor) -> Tensor:
            return torch.func.grad(lambda y: self.net(y).sum())(z)

        slope = first(points)
        second = torch.func.grad(lambda z: first(z)[:, 1].sum())(points)[:, 1]
        residual = slope[:, 0] + self.net(points)[:, 0] * slope[:, 1] - 0.01 * second
        return residual.square().mean()


class Poisson(nn.Module):
    """The same for a Laplacian by `torch.func.vmap` over the Hessian of each point."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(2, 64, 64, 64, 1)

    def forward(self, points: Tensor) -> Tensor:
        """[N, 2] -> loss"""

        def laplacian(point: Tensor) -> Tensor:
            return torch.func.hessian(lambda z: self.net(z).squeeze(-1))(point).diagonal().sum()

        return (torch.func.vmap(laplacian)(points) - 1.0).square().mean()


class Critic(nn.Module):
    """A Wasserstein critic with a penalty on its gradient (Gulrajani et al., 2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1),
        )  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        """[B, 3, S, S] twice, [B, 1, 1, 1] -> loss"""
        between = share * real + (1 - share) * fake
        slope = torch.func.grad(lambda x: self.net(x).sum())(between)
        penalty = (slope.flatten(1).square().sum(1).add(1e-12).sqrt() - 1).square().mean()
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty


def burgers() -> Built:
    return Burgers(), (torch.rand(4096, 2),)


def poisson() -> Built:
    return Poisson(), (torch.rand(1024, 2),)


def critic() -> Built:
    model = Critic()
    model.net(torch.zeros(1, 3, 32, 32))
    return model, (torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32), torch.rand(16, 1, 1, 1))


# -- loops over time -----------------------------------------------------------------------------------------------------


class ConvLstm(nn.Module):
    """A recurrent cell of convolutions over pictures (Shi et al., 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width, self.gates = width, nn.Conv2d(3 + width, 4 * width, 3, 1, 1)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, frames: Tensor) -> Tensor:
        """[B, T, 3, S, S] -> loss of the next picture"""
        batch, _, _, height, width = frames.shape
        hidden = cell = frames.new_zeros(batch, self.width, height, width)
        loss = frames.new_zeros(())
        for now, then in zip(frames[:, :-1].unbind(1), frames[:, 1:].unbind(1), strict=True):
            kept, let_in, let_out, new = self.gates(torch.cat([now, hidden], 1)).chunk(4, 1)
            cell = kept.sigmoid() * cell + let_in.sigmoid() * new.tanh()
            hidden = let_out.sigmoid() * cell.tanh()
            loss = loss + F.mse_loss(self.out(hidden), then)
        return loss


class Cells(nn.Module):
    """One of torch's recurrent cells over time."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int = 128) -> None:
        super().__init__()
        self.cell, self.out = make(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, D] -> loss"""
        state, outputs = None, []
        for step in x.unbind(0):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.out(torch.stack(outputs)).square().mean()


class DiagonalStateSpace(nn.Module):
    """Complex diagonal state space layers, as convolutions by Fourier transforms (S4D, Gu et al., 2022)."""

    def __init__(self, width: int = 64, states: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.rates = nn.ParameterList(nn.Parameter(torch.randn(width, states) * 0.5) for _ in range(depth))
        self.turns = nn.ParameterList(nn.Parameter(torch.randn(width, states)) for _ in range(depth))
        self.mix = nn.ParameterList(nn.Parameter(torch.randn(width, states, 2) / states) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> loss"""
        length = x.shape[1]
        steps = torch.arange(length, device=x.device, dtype=torch.float32)
        for rate, turn, mix, norm, out in zip(self.rates, self.turns, self.mix, self.norms, self.out, strict=True):
            pole = torch.complex(-rate.exp() * 0.1, turn)
            kernel = torch.einsum("ds,dst->dt", torch.view_as_complex(mix), (pole[..., None] * steps).exp()).real
            y = norm(x).transpose(1, 2)
            z = torch.fft.irfft(torch.fft.rfft(y, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
            x = x + F.glu(out(F.gelu(z[..., :length]).transpose(1, 2)), -1)
        return x.square().mean()


# -- fields and points ---------------------------------------------------------------------------------------------------


class RadianceField(nn.Module):
    """Colours along rays by a network of places and directions, with a skip (Mildenhall et al., 2020)."""

    def __init__(self, width: int = 128, bands: int = 6) -> None:
        super().__init__()
        self.bands, size = bands, 3 + 6 * bands
        self.first, self.second = (
            layers(size, width, width, width, width, activation=nn.ReLU),
            layers(width + size, width, width, width, activation=nn.ReLU),
        )
        self.density, self.colour = nn.Linear(width, 1), layers(width + 3, width // 2, 3, activation=nn.ReLU)

    def forward(self, points: Tensor, directions: Tensor, colours: Tensor) -> Tensor:
        """[R, S, 3], [R, 3], [R, 3] -> loss"""
        turns = [f(points * 2.0**k) for k in range(self.bands) for f in (torch.sin, torch.cos)]
        place = torch.cat([points, *turns], -1)
        x = self.second(torch.cat([self.first(place).relu(), place], -1)).relu()
        opaque = 1 - (-F.softplus(self.density(x)[..., 0]) * 0.1).exp()
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque[:, :-1] + 1e-6], 1), 1)
        seen = self.colour(torch.cat([x, directions[:, None].expand_as(points)], -1)).sigmoid()
        return F.mse_loss(((opaque * through)[..., None] * seen).sum(1), colours)


class PointCloud(nn.Module):
    """Edge convolutions over the nearest neighbours in features (Wang et al., 2019)."""

    def __init__(self, neighbours: int = 8) -> None:
        super().__init__()
        self.neighbours, widths = neighbours, (3, 32, 64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
            for a, b in pairwise(widths)
        )
        self.out = nn.Sequential(nn.Linear(160, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2), nn.Linear(128, 10))

    def forward(self, points: Tensor) -> Tensor:
        """[B, N, 3] -> [B, 10]"""
        x, found = points, []
        for layer in self.layers:
            near = torch.cdist(x, x).topk(self.neighbours, largest=False).indices
            batch = torch.arange(len(x), device=x.device)[:, None, None]
            around, middle = x[batch, near], x[:, :, None].expand(-1, -1, self.neighbours, -1)
            x = layer(torch.cat([around - middle, middle], -1).permute(0, 3, 1, 2)).amax(-1).transpose(1, 2)
            found.append(x)
        return self.out(torch.cat(found, -1).amax(1))


ENTRIES = (
    *entries(
        "gradients inside",
        "torch",
        {"pinn_burgers": burgers, "pinn_poisson": poisson, "gradient_penalty": critic},
    ),
    *entries(
        "recurrent",
        "torch",
        {
            "conv_lstm": lambda: (ConvLstm(), (torch.randn(4, 8, 3, 32, 32),)),
            "lstm_cells": lambda: (Cells(nn.LSTMCell), (torch.randn(24, 128, 128),)),
        },
    ),
    *entries("state space", "torch", {"diagonal": lambda: (DiagonalStateSpace(), (torch.randn(8, 256, 64),))}),
    *entries(
        "field",
        "torch",
        {
            "radiance_field": lambda: (
                RadianceField(),
                (torch.randn(256, 32, 3), torch.randn(256, 3), torch.rand(256, 3)),
            ),
            "point_cloud": lambda: (WithLoss(PointCloud()), (torch.randn(8, 256, 3),)),
        },
    ),
)
