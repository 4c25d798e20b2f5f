"""Models to plan for by name, at common training sizes; without weights, and without downloads.

Each row names a builder, ``module:function``, with the signature that `compile_remat.forecast.builders` describes.
"""

BUILDERS = {
    "bert-large": "compile_remat.forecast.zoo.language:bert_large",
    "llama-2-7b": "compile_remat.forecast.zoo.language:llama_2_7b",
    "llama-2-70b": "compile_remat.forecast.zoo.language:llama_2_70b",
    "t5-large": "compile_remat.forecast.zoo.language:t5_large",
    "vit-large": "compile_remat.forecast.zoo.vision:vit_large",
    "resnet-50": "compile_remat.forecast.zoo.vision:resnet_50",
    "unet": "compile_remat.forecast.zoo.vision:unet",
    "olmoe-7b": "compile_remat.forecast.zoo.language:olmoe_7b",
    "sd-unet": "compile_remat.forecast.zoo.diffusion:sd_unet",
}
