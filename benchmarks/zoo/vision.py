"""Image classifiers of timm, convolutional and not, and of vit-pytorch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, images

CLASSES = 10
HALF_WIDTH = {"channels": (32, 64, 128, 256)}


def classifier(name: str, *, batch: int = 8, size: int = 96, **options: Any) -> Builder:
    """A model of timm by its registered name, sizes changed where the named one is too large."""

    def build() -> Built:
        import timm

        return WithLoss(timm.create_model(name, num_classes=CLASSES, **options)), (images(batch, size),)

    return build


def transformer(name: str, *, batch: int = 16, size: int = 64, **options: Any) -> Builder:
    """The same for images of a fixed size, which the model has to be told."""
    return classifier(name, batch=batch, size=size, img_size=size, **options)


def made_by(
    module: str, name: str, options: Callable[[Any], dict[str, Any]], *, batch: int = 16, size: int = 64
) -> Builder:
    """A model of the class `name` of a module, for sizes that no registered name has.

    Args:
        options: Makes the class's arguments of the module, which may hold classes that go among them.
    """

    def build() -> Built:
        place = import_module(module)
        return WithLoss(getattr(place, name)(num_classes=CLASSES, **options(place))), (images(batch, size),)

    return build


FLAT = {"patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4}
STAGES = {"depths": (2, 2, 2), "num_heads": (2, 4, 8), "embed_dim": 48}
MIXER = {"img_size": 64, "patch_size": 8, "num_blocks": 6, "embed_dim": 128}
OUTLOOK = {"layers": (1, 1, 2, 1), "embed_dims": (64, 128, 128, 128), "num_heads": (2, 4, 4, 4)}
COMPACT = {
    "img_size": 64, "embedding_dim": 128, "n_conv_layers": 2, "kernel_size": 3, "stride": 1, "padding": 1,
    "pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1, "num_layers": 4, "num_heads": 4,
    "mlp_ratio": 3.0, "positional_embedding": "learnable",
}  # fmt: skip
NESTED = {"image_size": 64, "patch_size": 4, "dim": 48, "heads": 3, "num_hierarchies": 3, "block_repeats": (2, 2, 2)}

ENTRIES = (
    *entries(
        "convolutional",
        "timm",
        {
            "efficientnet_b0": classifier("efficientnet_b0"),
            "resnet18": classifier("resnet18", **HALF_WIDTH),
            "resnet50d": classifier("resnet50d", layers=(2, 2, 2, 2), **HALF_WIDTH),
            "mobilenetv3": classifier("mobilenetv3_small_100", size=128),
            "ghostnet": classifier("ghostnet_050", size=128),
            "regnety": classifier("regnety_002", size=128),
            "convnext": classifier("convnext_atto"),
            "densenet": classifier("densenet121", block_config=(3, 3, 3, 3), growth_rate=16),
            "vgg": made_by(
                "timm.models.vgg",
                "VGG",
                lambda place: {"cfg": place.cfgs["vgg11"], "norm_layer": place.nn.BatchNorm2d, "mlp_ratio": 0.03},
            ),
            "repvgg": classifier("repvgg_a0", size=128),
            "inception": classifier("inception_v3", size=128, aux_logits=False),
            "hrnet": classifier("hrnet_w18_small"),
            "nfnet": classifier("nfnet_f0", depths=(1, 1, 2, 1), size=64),
            "fastvit": classifier("fastvit_t8"),
        },
    ),
    *entries(
        "vision transformer",
        "timm",
        {
            "vit": transformer("vit_tiny_patch16_224", **FLAT),
            "deit": transformer("deit3_small_patch16_224", **FLAT),
            "beit": transformer("beitv2_base_patch16_224", **FLAT),
            "swin": transformer("swin_tiny_patch4_window7_224", window_size=4, **STAGES),
            "maxvit": transformer("maxvit_rmlp_pico_rw_256", batch=8, depths=(1, 1, 1, 1)),
            "coatnet": transformer("coatnet_pico_rw_224", batch=8, depths=(1, 1, 2, 1)),
            "pvt": classifier("pvt_v2_b0", size=64, batch=16),
            "poolformer": made_by(
                "timm.models.metaformer",
                "MetaFormer",
                lambda place: {"depths": (1, 1, 2, 1), "dims": (32, 64, 128, 128), "token_mixers": place.Pooling},
            ),
            "mlp_mixer": made_by("timm.models.mlp_mixer", "MlpMixer", lambda place: MIXER),
            "xcit": transformer("xcit_nano_12_p8_224", batch=8, depth=6),
            "levit": classifier("levit_128s", batch=4, size=224),
            "mobilevit": classifier("mobilevit_xxs"),
            "hiera": transformer("hiera_tiny_224", stages=(1, 1, 2, 1), embed_dim=48),
        },
    ),
    *entries(
        "vision transformer",
        "vit-pytorch",
        {
            "nest": made_by("vit_pytorch.nest", "NesT", lambda place: NESTED, batch=8),
        },
    ),
)
