"""Models of timm and diffusers inside a memory budget, at toy size.

    python examples/stacks/vision_models.py --model resnet --budget 0.5
    python examples/stacks/vision_models.py --model unet --plain

For the models as they are published write `timm.create_model("resnet50")`, or `UNet2DModel.from_pretrained(...)`.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat.integrations import MemoryReport


class WithLoss(nn.Module):
    """A classifier on images and labels, the loss inside, so that it is part of the plan."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


class Denoiser(nn.Module):
    """A diffusers model that predicts the noise in images at given times."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        mixed = images + noise * times[:, None, None, None] / 1000
        return F.mse_loss(self.model(mixed, times, return_dict=False)[0], noise)


def resnet() -> nn.Module:
    """Four stages of one block."""
    from timm.models.resnet import BasicBlock, ResNet

    return WithLoss(ResNet(BasicBlock, layers=(1, 1, 1, 1), channels=(8, 16, 16, 32), num_classes=10))


def convnext() -> nn.Module:
    """Four stages of one block."""
    from timm.models.convnext import ConvNeXt

    return WithLoss(ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 16, 32), num_classes=10))


def swin() -> nn.Module:
    """Two stages, of two blocks and one."""
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    return WithLoss(SwinTransformer(depths=(2, 1), num_heads=(2, 4), num_classes=10, drop_path_rate=0.0, **sizes))


def unet() -> nn.Module:
    """Two levels, the lower one with attention."""
    from diffusers import UNet2DModel

    return Denoiser(
        UNet2DModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )


MODELS = {"resnet": resnet, "convnext": convnext, "swin": swin, "unet": unet}


def inputs(name: str, batch: int, device: str) -> tuple[Tensor, ...]:
    """Random images with what belongs to them."""
    if name == "unet":
        images = torch.randn(batch, 3, 16, 16, device=device)
        return images, torch.randn_like(images), torch.randint(1000, (batch,), device=device)
    return torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)


def train(name: str, budget: str | float | None, steps: int = 3, batch: int = 16) -> list[float]:
    """The loss of each step; None is plain torch.compile."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    if budget is None:
        model.compile()
    else:
        model.compile(backend="remat", options={"memory_budget": budget})  # the one line that is new
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    report = MemoryReport()
    losses = []
    for _ in range(steps):
        given = inputs(name, batch, device)
        report.begin()
        loss = model(*given)
        loss.backward()
        report.end()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet", choices=MODELS)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    arguments = parser.parse_args(argv)
    losses = train(arguments.model, None if arguments.plain else arguments.budget)
    print("losses", " ".join(f"{loss:.5f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
