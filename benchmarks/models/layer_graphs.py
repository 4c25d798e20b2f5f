"""Networks as Checkmate plans for them (Jain and others, MLSys 2020): a graph of layers, priced by what they multiply; torch-free.

`remat/tensorflow2` on the branch `mlsys20_artifact` of parasj/checkmate makes such graphs of Keras models, and this module makes
the same of their descriptions.  A layer with its activation is one node that writes a tensor of its own in float32.  Its gradient
is one node of the same size and twice the time, which reads the gradients of the layers behind it, its output, and theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from compile_remat.passes import Problem, Step, Value
from compile_remat.passes.problem.problem import CONSTANT, EXTERN

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Layer:
    """One node of the forward, for one image.

    Attributes:
        nbytes: Bytes of the layer's output.
        reads: Numbers of the layers that the layer reads; empty if it reads the image.
        operations: Multiplications and additions, as Checkmate counts them.
    """

    name: str
    nbytes: int
    reads: tuple[int, ...]
    operations: int


@dataclass
class LayerGraph:
    """Layers in their order; each method adds one behind the last, or behind `at`, and returns its number."""

    image: tuple[int, int, int]
    layers: list[Layer] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    parameter_bytes: int = 0

    @property
    def forward_operations(self) -> int:
        return sum(layer.operations for layer in self.layers)

    def conv(self, channels: int, size: int = 3, stride: int = 1, *, pads: bool = True, bias: bool = True) -> int:
        """A convolution; with `pads` the sides shrink by the stride alone."""
        height, width, before = self._shape()
        lost = 0 if pads else size - 1
        sides = tuple((side - lost - 1) // stride + 1 for side in (height, width))
        weights = size * size * before
        shape = (*sides, channels)
        return self._add("conv", shape, weights * prod(shape), weights * channels + channels * bias)

    def depthwise(self, size: int = 3, stride: int = 1, *, pads: bool = True) -> int:
        height, width, channels = self._shape()
        lost = 0 if pads else size - 1
        shape = ((height - lost - 1) // stride + 1, (width - lost - 1) // stride + 1, channels)
        return self._add("depthwise", shape, size * size * prod(shape), size * size * channels)

    def norm(self) -> int:
        shape = self._shape()
        return self._add("norm", shape, 4 * prod(shape), 4 * shape[-1])

    def relu(self) -> int:
        return self._add("relu", self._shape(), prod(self._shape()))

    def pool(self) -> int:
        height, width, channels = self._shape()
        return self._add("pool", (height // 2, width // 2, channels), 0)

    def pad(self, rows: int, columns: int) -> int:
        height, width, channels = self._shape()
        return self._add("pad", (height + rows, width + columns, channels), 0)

    def up(self) -> int:
        height, width, channels = self._shape()
        shape = (2 * height, 2 * width, channels)
        return self._add("up", shape, prod(shape))

    def cat(self, beside: int) -> int:
        height, width, channels = self._shape()
        shape = (height, width, channels + self.shapes[beside][-1])
        return self._add("cat", shape, 0, beside=(beside,))

    def dense(self, columns: int) -> int:
        rows = prod(self._shape())
        return self._add("dense", (columns,), rows * columns, rows * columns + columns)

    def same(self, name: str, *shape: int) -> int:
        """Another shape of the same numbers, or a dropout: a tensor of its own that costs no time."""
        return self._add(name, shape or self._shape(), 0)

    def _shape(self) -> tuple[int, ...]:
        return self.shapes[-1] if self.shapes else self.image

    def _add(
        self, kind: str, shape: tuple[int, ...], operations: int, parameters: int = 0, beside: tuple[int, ...] = ()
    ) -> int:
        number = len(self.layers)
        reads = (*beside, number - 1) if number else ()
        self.layers.append(Layer(f"{kind}_{number}", FLOAT_BYTES * prod(shape), reads, operations))
        self.shapes.append(shape)
        self.parameter_bytes += FLOAT_BYTES * parameters
        return number

    def problem(self, batch: int = 1) -> Problem:
        """The planning problem of a batch: bytes, and operations in place of nanoseconds."""
        return training(
            [replace(one, nbytes=batch * one.nbytes, operations=batch * one.operations) for one in self.layers]
        )


def training(layers: Sequence[Layer]) -> Problem:
    """Layers with their gradients as Checkmate adds them; the last layer is what the loss reads."""
    count = len(layers)
    readers: list[list[int]] = [[] for _ in layers]
    for number, layer in enumerate(layers):
        for read in layer.reads:
            readers[read].append(number)
    values = tuple(
        Value(layer.name, layer.nbytes, EXTERN, layer.reads, layer.operations, position=number)
        for number, layer in enumerate(layers)
    )
    steps = [Step("loss", FLOAT_BYTES, EXTERN, (count - 1,), ())]
    for number in reversed(range(count)):
        layer, behind = layers[number], readers[number]
        gradients = tuple(sorted(count - k for k in behind)) or (0,)
        reads = tuple(sorted({number, *behind}))
        steps.append(Step(f"d_{layer.name}", layer.nbytes, EXTERN, reads, gradients, 2 * layer.operations))
    steps.append(Step("output", 0, CONSTANT, (), (count,)))
    return Problem(values, tuple(steps), 3 * sum(layer.operations for layer in layers))


def vgg(depths: tuple[int, ...]) -> LayerGraph:
    """VGG at 224 pixels: 16 layers of weights for depths 2, 2, 3, 3, 3 and 19 for 2, 2, 4, 4, 4."""
    graph = LayerGraph((224, 224, 3))
    _stages(graph, depths)
    graph.same("flatten", prod(graph.shapes[-1]))
    for columns in (4096, 4096, 1000):
        graph.dense(columns)
    return graph


def _stages(graph: LayerGraph, depths: tuple[int, ...]) -> list[int]:
    """Convolutions and a pooling for each depth; the numbers of the poolings."""
    pools = []
    for depth, channels in zip(depths, (64, 128, 256, 512, 512), strict=False):
        for _ in range(depth):
            graph.conv(channels)
        pools.append(graph.pool())
    return pools


def mobilenet() -> LayerGraph:
    """MobileNet at 224 pixels (Howard and others, 2017), as Keras builds it: with paddings before strides of 2."""
    graph = LayerGraph((224, 224, 3))
    graph.pad(1, 1)
    graph.conv(32, 3, 2, pads=False, bias=False)
    graph.norm()
    graph.relu()
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    for stride, channels in zip(strides, (64, 128, 128, 256, 256, *[512] * 6, 1024, 1024), strict=True):
        if stride == 2:
            graph.pad(1, 1)
        graph.depthwise(3, stride, pads=stride == 1)
        graph.norm()
        graph.relu()
        graph.conv(channels, 1, bias=False)
        graph.norm()
        graph.relu()
    graph.same("mean", 1024)
    graph.same("reshape", 1, 1, 1024)
    graph.same("dropout")
    graph.conv(1000, 1)
    graph.same("reshape", 1000)
    graph.relu()
    return graph


def unet() -> LayerGraph:
    """U-Net with VGG's first four stages, 416 x 608, 19 classes: `vgg_unet` of keras-segmentation."""
    graph = LayerGraph((416, 608, 3))
    pools = _stages(graph, (2, 2, 3, 3))
    for level, channels in enumerate((512, 256, 128, 64)):
        if level:
            graph.up()
            graph.cat(pools[3 - level])
        graph.pad(2, 2)
        graph.conv(channels, pads=False)
        graph.norm()
    graph.conv(19)
    graph.same("reshape", 208 * 304, 19)
    graph.relu()
    return graph


LAYER_GRAPHS: dict[str, Callable[[], LayerGraph]] = {
    "VGG16": lambda: vgg((2, 2, 3, 3, 3)),
    "VGG19": lambda: vgg((2, 2, 4, 4, 4)),
    "MobileNet": mobilenet,
    "U-Net": unet,
}
