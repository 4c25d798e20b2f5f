"""Denoisers and autoencoders of diffusers."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, images

WORDS, WORD_WIDTH = 16, 64


def model(name: str, *inputs: Tensor, names: tuple[str, ...] = (), field: str | None = "sample", **sizes: Any) -> Built:
    """A model of diffusers by its class, with the inputs of one step, by `names` where these are given."""
    import diffusers

    return WithLoss(getattr(diffusers, name)(**sizes), names, field), inputs


def times(batch: int) -> Tensor:
    """Int64 [B]: a step of the noise for each sample."""
    return torch.randint(1000, (batch,))


def words(batch: int, width: int = WORD_WIDTH) -> Tensor:
    """Float [B, words, width]: what a text encoder made of a prompt."""
    return torch.randn(batch, WORDS, width)


DOWN, UP = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
CROSS_DOWN, CROSS_UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
CROSS = {
    "sample_size": 32, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": WORD_WIDTH,
    "attention_head_dim": 4, "norm_num_groups": 8,
}  # fmt: skip
CODED = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "latent_channels": 4}
PATCHED = {
    "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 4, "sample_size": 16, "patch_size": 2,
    "in_channels": 4,
}  # fmt: skip


def unet_2d() -> Built:
    return model(
        "UNet2DModel", images(4, 32), times(4), sample_size=32, block_out_channels=(32, 64, 64), layers_per_block=1,
        down_block_types=DOWN, up_block_types=UP, norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip


def unet_2d_condition() -> Built:
    sizes = {**CROSS, "down_block_types": CROSS_DOWN, "up_block_types": CROSS_UP}
    return model("UNet2DConditionModel", images(4, 32, 4), times(4), words(4), **sizes)


def unet_1d() -> Built:
    return model(
        "UNet1DModel", torch.randn(4, 16, 256), times(4), sample_size=256, in_channels=16, out_channels=16,
        extra_in_channels=64, block_out_channels=(32, 64, 64), layers_per_block=1,
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )  # fmt: skip


def unet_3d() -> Built:
    return model(
        "UNet3DConditionModel", torch.randn(1, 4, 4, 32, 32), times(1), words(1), **{**CROSS, "attention_head_dim": 8},
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )  # fmt: skip


def controlnet() -> Built:
    return model(
        "ControlNetModel", images(4, 32, 4), times(4), words(4), images(4, 64), field="mid_block_res_sample",
        block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=WORD_WIDTH, attention_head_dim=4,
        norm_num_groups=8, down_block_types=CROSS_DOWN, conditioning_embedding_out_channels=(16, 32),
    )  # fmt: skip


def autoencoder_kl() -> Built:
    return model(
        "AutoencoderKL", images(2, 64), **CODED, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def autoencoder_tiny() -> Built:
    widths = {"encoder_block_out_channels": (32, 32, 32), "decoder_block_out_channels": (32, 32, 32)}
    blocks = {"num_encoder_blocks": (1, 2, 2), "num_decoder_blocks": (2, 2, 1)}
    return model("AutoencoderTiny", images(4, 64), **widths, **blocks, upsampling_scaling_factor=2)


def vq_model() -> Built:
    return model(
        "VQModel", images(2, 64), **{**CODED, "latent_channels": 3}, num_vq_embeddings=64, vq_embed_dim=3,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


def autoencoder_temporal() -> Built:
    return model(
        "AutoencoderKLTemporalDecoder", images(4, 32), names=("sample",), block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1, latent_channels=4,
    )  # fmt: skip


def dit() -> Built:
    names = ("hidden_states", "timestep", "class_labels")
    inputs = images(8, 16, 4), times(8), torch.randint(10, (8,))
    return model("DiTTransformer2DModel", *inputs, names=names, num_embeds_ada_norm=10, **PATCHED)


def transformer_2d() -> Built:
    names = ("hidden_states", "encoder_hidden_states")
    return model(
        "Transformer2DModel", images(4, 16, 64), words(4), names=names, num_attention_heads=4, attention_head_dim=16,
        in_channels=64, num_layers=4, cross_attention_dim=WORD_WIDTH, norm_num_groups=8,
    )  # fmt: skip


def pixart() -> Built:
    names = ("hidden_states", "timestep", "encoder_hidden_states")
    sizes = {**PATCHED, "caption_channels": WORD_WIDTH, "cross_attention_dim": 128, "use_additional_conditions": False}
    return model("PixArtTransformer2DModel", images(8, 16, 4), times(8), words(8), names=names, **sizes)


def sd3() -> Built:
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    return model(
        "SD3Transformer2DModel", images(12, 16, 4), words(12), torch.randn(12, 64), times(12), names=names, **PATCHED,
        joint_attention_dim=WORD_WIDTH, caption_projection_dim=128, pooled_projection_dim=64, pos_embed_max_size=16,
    )  # fmt: skip


def flux() -> Built:
    names = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "img_ids", "txt_ids")
    inputs = (
        torch.randn(8, 64, 16),
        words(8),
        torch.randn(8, 64),
        torch.rand(8),
        torch.zeros(64, 3),
        torch.zeros(WORDS, 3),
    )
    return model(
        "FluxTransformer2DModel", *inputs, names=names, in_channels=16, num_layers=2, num_single_layers=2,
        attention_head_dim=32, num_attention_heads=4, joint_attention_dim=WORD_WIDTH, pooled_projection_dim=64,
        axes_dims_rope=(8, 12, 12), guidance_embeds=False,
    )  # fmt: skip


def aura_flow() -> Built:
    names = ("hidden_states", "encoder_hidden_states", "timestep")
    return model(
        "AuraFlowTransformer2DModel", images(4, 16, 4), words(4), torch.rand(4), names=names, sample_size=16,
        num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=WORD_WIDTH, caption_projection_dim=128, pos_embed_max_size=64,
    )  # fmt: skip


def sana() -> Built:
    names = ("hidden_states", "encoder_hidden_states", "timestep")
    return model(
        "SanaTransformer2DModel", images(4, 16, 4), words(4), times(4), names=names, in_channels=4, out_channels=4,
        num_attention_heads=4, attention_head_dim=32, num_layers=3, num_cross_attention_heads=4,
        cross_attention_head_dim=32, cross_attention_dim=128, caption_channels=WORD_WIDTH, sample_size=16, patch_size=1,
    )  # fmt: skip


def prior() -> Built:
    names = ("hidden_states", "timestep", "proj_embedding", "encoder_hidden_states")
    return model(
        "PriorTransformer", torch.randn(32, 64), times(32), torch.randn(32, 64), torch.randn(32, WORDS, 64),
        names=names, field="predicted_image_embedding", num_attention_heads=4, attention_head_dim=32, num_layers=4,
        embedding_dim=64, num_embeddings=WORDS, additional_embeddings=4,
    )  # fmt: skip


def cog_video() -> Built:
    names = ("hidden_states", "encoder_hidden_states", "timestep")
    return model(
        "CogVideoXTransformer3DModel", torch.randn(1, 4, 4, 32, 32), words(1), times(1), names=names, in_channels=4,
        out_channels=4, num_attention_heads=4, attention_head_dim=32, num_layers=3, text_embed_dim=WORD_WIDTH,
        sample_width=32, sample_height=32, sample_frames=13, max_text_seq_length=WORDS, time_embed_dim=64,
    )  # fmt: skip


BUILDERS: dict[str, Builder] = {
    "unet_2d": unet_2d,
    "unet_2d_condition": unet_2d_condition,
    "unet_3d": unet_3d,
    "controlnet": controlnet,
    "autoencoder_kl": autoencoder_kl,
    "vq_model": vq_model,
    "dit": dit,
    "transformer_2d": transformer_2d,
    "sd3": sd3,
    "flux": flux,
    "sana": sana,
    "cog_video": cog_video,
}
ENTRIES = entries("diffusion", "diffusers", BUILDERS)
