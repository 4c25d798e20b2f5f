"""Detection, segmentation, depth, flow, and medical volumes: transformers, segmentation_models_pytorch, torchvision, monai."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, images
from benchmarks.zoo.pairs import of_class

SIZE = 64


def pictures(batch: int = 4, size: int = SIZE) -> Callable[[], dict[str, Tensor]]:
    """Float [B, 3, S, S]."""
    return lambda: {"pixel_values": images(batch, size)}


def labelled(batch: int = 4, size: int = SIZE, scale: int = 1) -> Callable[[], dict[str, Tensor]]:
    """Pictures with a class for each pixel, at a smaller size."""
    side = size // scale
    return lambda: {"pixel_values": images(batch, size), "labels": torch.randint(4, (batch, side, side))}


def segmenting(name: str, encoder: str = "resnet18", *, batch: int = 4, size: int = SIZE, **options: Any) -> Builder:
    """A model of segmentation_models_pytorch."""

    def build() -> Built:
        import segmentation_models_pytorch as smp

        model = getattr(smp, name)(encoder, encoder_weights=None, classes=4, **options)
        return WithLoss(model), (images(batch, size),)

    return build


def raft() -> Built:
    """Optical flow of torchvision: a loop over correlations that are looked up by position."""
    from torchvision.models.optical_flow import raft_small

    return WithLoss(raft_small(), field=-1, num_flow_updates=3), (images(1, 128), images(1, 128))


def volumes(name: str, *, batch: int = 1, size: int = 32, **options: Any) -> Builder:
    """A model of monai for volumes of one channel."""

    def build() -> Built:
        model = getattr(import_module("monai.networks.nets"), name)(**options)
        return WithLoss(model), (torch.randn(batch, 1, size, size, size),)

    return build


BACKBONE = {
    "use_timm_backbone": True, "use_pretrained_backbone": False, "backbone": "resnet18", "backbone_config": None,
}  # fmt: skip
DETECTOR = {
    "d_model": 128, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "num_queries": 50,
}  # fmt: skip
VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 4}

ENTRIES = (
    *entries(
        "detection",
        "transformers",
        {
            "detr": of_class("DetrModel", "DetrConfig", pictures(4, 224), "last_hidden_state", **DETECTOR, **BACKBONE),
            "deformable_detr": of_class(
                "DeformableDetrModel", "DeformableDetrConfig", pictures(4, 224), "last_hidden_state", **DETECTOR, **BACKBONE,
                num_feature_levels=3,
            ),
            "yolos": of_class(
                "YolosModel", "YolosConfig", pictures(8), "last_hidden_state", hidden_size=128, num_hidden_layers=4,
                num_attention_heads=4, intermediate_size=512, image_size=[64, 64], patch_size=8,
                num_detection_tokens=20,
            ),
        },
    ),
    *entries(
        "segmentation",
        "transformers",
        {
            "segformer": of_class(
                "SegformerForSemanticSegmentation", "SegformerConfig", labelled(8, 128), num_labels=4, depths=[1, 1, 2, 1],
                hidden_sizes=[32, 64, 96, 128], decoder_hidden_size=128,
            ),
            "mask2former": of_class(
                "Mask2FormerModel", "Mask2FormerConfig", pictures(2, 128), "transformer_decoder_last_hidden_state",
                backbone_config={"model_type": "swin", "embed_dim": 24, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8],
                                 "out_features": ["stage1", "stage2", "stage3", "stage4"], "image_size": 64,
                                 "window_size": 4},
                hidden_dim=64, mask_feature_size=64, feature_size=64, encoder_layers=2, decoder_layers=3,
                num_attention_heads=4, encoder_feedforward_dim=128, dim_feedforward=128, num_queries=20,
            ),
            "dpt": of_class(
                "DPTForDepthEstimation", "DPTConfig", pictures(), "predicted_depth", hidden_size=128,
                num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, image_size=64, patch_size=8,
                backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[32, 64, 64, 64], fusion_hidden_size=64,
                is_hybrid=False,
            ),
            "sam_encoder": of_class(
                "SamVisionModel", "SamVisionConfig", pictures(2, 128), "last_hidden_state", hidden_size=128,
                num_hidden_layers=4, num_attention_heads=4, image_size=128, patch_size=8, mlp_dim=512, output_channels=64,
                global_attn_indexes=[1, 3], window_size=7,
            ),
        },
    ),
    *entries(
        "segmentation",
        "segmentation_models_pytorch",
        {
            "smp_unet": segmenting("Unet", size=128),
            "smp_unet_plus_plus": segmenting("UnetPlusPlus", "timm-mobilenetv3_small_100", size=96),
            "smp_deeplab": segmenting("DeepLabV3Plus", "mobilenet_v2", batch=8),
        },
    ),
    *entries("optical flow", "torchvision", {"raft": raft}),
    *entries(
        "volumes",
        "monai",
        {
            "monai_unet": volumes("UNet", batch=4, **VOLUME, channels=(16, 32, 64), strides=(2, 2), num_res_units=2),
            "attention_unet": volumes("AttentionUnet", **VOLUME, channels=(16, 32, 64), strides=(2, 2)),
            "swin_unetr": volumes("SwinUNETR", size=64, in_channels=1, out_channels=4, feature_size=12, depths=(1, 1, 1, 1),
                                  num_heads=(1, 2, 4, 4)),
        },
    ),
)  # fmt: skip
