"""The sources: where their figures stand, how to read the tables, and what could not be found or rebuilt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One source.

    Attributes:
        unit: Unit of the column "baseline", with its bytes.
        text: Text above the source's tables.
        missing: Results that could not be found or rebuilt, a line each.
        is_range: True if the source's figures are a range over networks: then no single row is compared.
    """

    title: str
    unit: tuple[str, int]
    text: str
    missing: tuple[str, ...] = ()
    is_range: bool = False


GIB = ("GiB", 1 << 30)
GB = ("GB", 1_000_000_000)

READING = """\
How to read a row: the source trains within `its peak`, a part of its own `baseline` (training without a plan), and takes `its
time` more than that. `ours at its peak` is the extra time of our plan within the same bytes, over our fastest plan: below `its
time` is better. `bound` is a time that no plan of one recomputation can beat there (no plan at all, where ours recomputes twice).
`ours at its time` is the lowest peak of ours that takes no longer than the source does: below `its peak` is better. `eager`,
`no plan` and `our lowest` are peaks of what was rebuilt: in eager mode, of our fastest plan, of our lowest one. Peaks are parts
of the baseline; times are parts of a step, estimates of one cost model. Nothing runs."""

SOURCES: dict[str, Source] = {
    "monet": Source(
        "The published record: MONeT",
        GIB,
        f"""\
Five networks of MONeT (Shah and others, ICLR 2021; the tables of the README of utsaslab/MONeT: torch 1.5.1, float32, a P100 of
16 GB), rebuilt at its batches (184, 320, 11, 272, 176) and priced for a P100.

{READING}

Bytes are all on the device, parameters and inputs included. MONeT's times are over eager mode, and below zero where its choice of
convolution algorithms is faster than that: then only bytes compare. VGG-16 below 7.5 GiB is where ours is worse. Three maps of
2.1 GiB lie there at once: both gradients of the second convolution, and the output of the ReLU in front of it, whose sign is asked
next. MONeT keeps signs as bits (`BinaryActReLU` in its `lm_ops/relu.py`): 67 MiB in place of 2.1 GiB. Ours computes such a mask
where it is read, from the map, or saves it as 539 MiB of booleans. So what is missing is a choice of operators, not a plan.

![ResNet-50: peak and extra time of our plans, below MONeT's six points](images/published_resnet50.svg)

![MobileNetV2: peak and extra time of our plans, below MONeT's six points](images/published_mobilenet_v2.svg)

The pictures are drawn by `python -m benchmarks.published --show benchmarks/results/published.json --pictures docs/images`.""",
        (
            "GoogleNet is without its two side classifiers.",
            "MobileNetV2: eager mode of today's torch keeps what ReLU6 reads, that of 1.5.1 what it writes.",
            "VGG-16: cuDNN's workspaces are in the reported bytes, and not in ours.",
        ),
    ),
    "checkmate": Source(
        "The published record: Checkmate",
        GB,
        """\
Checkmate (Jain and others, MLSys 2020, arXiv 1910.02653) plans for graphs of layers: each layer with its activation writes one
tensor, each gradient one more, and a gradient reads the layer's output and those of the layers behind it. Such a graph is a
problem of ours as it is, so nothing is traced: layers are priced by their multiplications, as Checkmate's own cost model `flops`
does. The first table is the paper's figure 6: the largest batch on a V100 (16 GB, less twice the parameters) whose step takes at
most one forward more. `most` is proven: no plan reaches more. On VGG19 and on U-Net both reach it. On MobileNet ours is worse:
there convolution, norm and ReLU write three tensors of a size. The gradient of a ReLU reads the last of them alone, but the
others were computed again to reach it, and a plan of ours keeps them for the next two gradients: six tensors of 3.2 MB an image
live there. Checkmate drops them and computes them again. In torch's graphs norm and ReLU are fused, and most of these tensors are
not there.

The second table holds the networks of figure 5 at its batches; `eager` and the other columns are as for MONeT. The paper draws
these frontiers and gives one figure, "less than 10% higher overhead" for U-Net at 16 GB, where it would need 23 GB; the other
rows show what ours takes (`ours at its peak`) beside what no plan can beat (`bound`). Parts below the proven lowest peak are left
out.

![U-Net: peak and extra time of our plans, below Chen's two rules](images/published_unet.svg)""",
        (
            "Figure 5 prices layers by measurements on a V100, ours by multiplications; its curves are not given as numbers.",
            "Figure 6 gives SegNet, FCN8 and ResNet50 as bars alone.",
            "Table 2 is a mean over budgets that are not named.",
        ),
    ),
    "moccasin": Source(
        "The published record: Moccasin",
        ("k", 1000),
        """\
Moccasin (Bartan and others, ICML 2023, arXiv 2304.14463) takes random layered graphs G1 to G4 (100, 250, 500 and 1,000 nodes; 236,
944, 2,461 and 5,857 edges) at 0.9 and 0.8 of the peak of a given order, and reports by how much the duration grows. There is no
backward: each node is computed in that order, and may be computed again anywhere behind. A plan of ours computes again behind
the end of a forward only, so this cannot be expressed as it is. "one order" is the nearest: the order is cut in two (at 0.5, 0.6
or 0.7 of its nodes, the best of them), and what is before the cut may be computed again behind it. Such a plan is one of theirs as
well; where peaks lie on both sides of every cut, none fits. "training" takes the graph as the forward of a step, with gradients
as Checkmate adds them: what this planner is for. `ours at its peak` is the increase of the duration, `bound` what no plan of that
problem can beat.""",
        (
            "Their figures were not found, so no row compares: stored pages of arXiv 2304.14463 and PMLR 202 have the abstract "
            "alone, haoming-codes/moccasin has graphs and code and no results.",
            "The graphs are drawn from a seed by the parameters in the names of its files; theirs have no licence.",
            "G4 in one order: planning for its cuts takes minutes each.",
        ),
    ),
    "rockmate": Source(
        "The published record: Rockmate and HiRemate",
        GIB,
        """\
Rockmate (Zhao and others, ICML 2023, arXiv 2307.01236) reports activations lower "by a factor of 2 to 5" for an overhead "of the
order of 10% to 20%", HiRemate (Gusak and others, ICML 2025, PMLR 267) "up to 50-70% memory reduction with only 10-15%
overhead". The rows take that as 10 % more time at a half of the activations (both), 15 % at 0.3 (HiRemate) and 20 % at a fifth
(Rockmate). Both are ranges over networks, so no row shows by itself that ours is better or worse. Networks have the sizes of
`models/__init__.py` of topal-team/rockmate, in float32, priced for a V100; bytes are the activations of eager mode: all but
parameters, their gradients, and inputs. Columns are as for MONeT. HiRemate's own log of June 2024 (playground/stdout.txt of the
same repository) ends in an error for UNO, U-FNO and RegNetX-32GF; ours plans for all three. Complex tensors and Fourier
transforms are priced by the bytes that they move. On U-FNO, gradients of slices are written into complex zeros as large as the
map, which fuse with nothing: the backward of one layer alone takes 0.4 of the activations. At a fifth the
lowest plans of RegNetX-32GF and ResNet-101 are 2 and 5 % above: three maps of 483 MiB around the first convolution in groups, and
the first block of ResNet's second stage with the block in front of it, take as much.""",
        (
            "Figures of single networks were not found: Rockmate draws them, and results/ of its repository has a pickle that is "
            "not stored as text; stored pages of HiRemate have the abstract and reviews.",
            "FNO, MLPMixer, nn.Transformer and their U-Net are not rebuilt.",
        ),
        is_range=True,
    ),
    "pofo": Source(
        "The published record: POFO",
        GIB,
        """\
POFO (Beaumont and others, NeurIPS 2021) reports activations lower "by a factor 4 to 6, with an overhead below 20%", by recomputing
and by moving to the host together, and that moving can remove "one third of the overhead of rematerialization": without it, that
is 30 %. Ours moves nothing, and the rows stand beside 20 %. ResNets at its sizes (batch 16, 500 x 500), priced for a V100; bytes
and columns are as for Rockmate, and so is what a row can show. At a sixth none of ours fits: the gradient of the first bottleneck
with a projected shortcut holds five maps of 244 MiB at once, a fifth of ResNet-50's activations.""",
        (
            "Figures of single networks: not found (stored pages have the abstract alone).",
            "DenseNets and Inception are not rebuilt.",
        ),
        is_range=True,
    ),
    "chen": Source(
        "The published record: the square root of n",
        ("layers", 1000),
        """\
Chen and others (2016, arXiv 1604.06174) keep each k-th of n equal layers, k the square root of n: about 2 k layers at the peak,
for less than one forward more, which is a third of the step where a gradient takes two forwards. Here the rule is priced on a
chain of layers of one unit by the same simulator as our plan: `its peak` and `its time` are the rule's. Columns are as for
MONeT.""",
        (
            'The abstract\'s "1,000-layer deep residual network from 48G to 7G" at 30 % more time: depths and batch not found.',
        ),
    ),
}
