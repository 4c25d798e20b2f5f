"""Graph networks of torch_geometric, and recommendation and tables of deepctr-torch and of torch."""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries

NODES, EDGES, WIDTH, LAYERS = 4096, 16384, 64, 4


def links(nodes: int = NODES, edges: int = EDGES) -> Tensor:
    """Int64 [2, E]: from where to where."""
    return torch.randint(nodes, (2, edges))


def basic(name: str, **options: Any) -> Builder:
    """One of the library's own stacks of convolutions, with norms and dropout."""

    def build() -> Built:
        from torch_geometric.nn import models

        inner = getattr(models, name)(WIDTH, WIDTH, LAYERS, out_channels=8, dropout=0.1, norm="BatchNorm", **options)
        return WithLoss(inner), (torch.randn(NODES, WIDTH), links())

    return build


class Stack(nn.Module):
    """Convolutions of one class, each with a ReLU and the input added."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """[N, D] -> [N, D]; the others are what a convolution is called with."""
        for layer in self.layers:
            x = x + F.relu(layer(x, *others))
        return x


def stack(name: str, *given: Any, edge_width: int = 0, **options: Any) -> Builder:
    """A stack of the library's convolutions, with features of the edges where `edge_width` is given."""

    def build() -> Built:
        import torch_geometric.nn as gnn

        others = (torch.randn(EDGES, edge_width),) if edge_width else ()
        model = Stack(lambda: getattr(gnn, name)(WIDTH, *given, **options))
        return WithLoss(model), (torch.randn(NODES, WIDTH), links(), *others)

    return build


def relational() -> Built:
    """Convolutions with weights for each kind of edge."""
    from torch_geometric.nn import FastRGCNConv

    model = Stack(lambda: FastRGCNConv(WIDTH, WIDTH, 4, num_bases=2))
    return WithLoss(model), (torch.randn(512, WIDTH), links(512, 2048), torch.randint(4, (2048,)))


def graph_transformer() -> Built:
    """Attention over all nodes beside messages along the edges (GPS)."""
    import torch_geometric.nn as gnn

    def make() -> nn.Module:
        local = gnn.GINEConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), edge_dim=8)
        layer: nn.Module = gnn.GPSConv(WIDTH, local, heads=4, attn_type="multihead")
        return layer

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(make() for _ in range(LAYERS))

        def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edges, edge_attr=features)
            return x

    return WithLoss(Model()), (torch.randn(512, WIDTH), links(512, 2048), torch.randn(2048, 8))


def schnet() -> Built:
    """Atoms and their distances; neighbours are given, as looking for them needs another library."""
    from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.atoms, self.smear = nn.Embedding(20, WIDTH), GaussianSmearing(0.0, 5.0, 32)
            self.blocks = nn.ModuleList(InteractionBlock(WIDTH, 32, WIDTH, 5.0) for _ in range(LAYERS))
            self.out = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, kinds: Tensor, places: Tensor, edges: Tensor) -> Tensor:
            distances = (places[edges[0]] - places[edges[1]]).square().sum(-1).add(1e-6).sqrt()
            features, x = self.smear(distances), self.atoms(kinds)
            for block in self.blocks:
                x = x + block(x, edges, distances, features)
            return self.out(x).sum()

    return Model(), (torch.randint(20, (1024,)), torch.randn(1024, 3), links(1024, 8192))


# -- tables and recommendation -----------------------------------------------------------------------------------------

SPARSE, DENSE, ROWS = 16, 8, 4096


def clicks(name: str, **options: Any) -> Builder:
    """A model of deepctr-torch for rows of categories and numbers, with the loss of a click."""

    def build() -> Built:
        with mock.patch.object(threading.Thread, "start"):  # when imported, it asks a server for newer versions
            inputs = import_module("deepctr_torch.inputs")
        features = [inputs.SparseFeat(f"c{k}", 200, embedding_dim=16) for k in range(SPARSE)]
        features += [inputs.DenseFeat(f"n{k}", 1) for k in range(DENSE)]
        model = getattr(import_module("deepctr_torch.models"), name)(features, features, device="cpu", **options)
        rows = torch.cat([torch.randint(200, (ROWS, SPARSE)).float(), torch.randn(ROWS, DENSE)], 1)
        return WithLoss(model), (rows,)

    return build


class Dlrm(nn.Module):
    """Embedding bags and pairwise products of them (Naumov et al., 2019): no library for CPUs has it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(500, width, mode="sum") for _ in range(SPARSE))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (SPARSE + 1) * SPARSE // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self.register_buffer("rows_and_columns", torch.tril_indices(SPARSE + 1, SPARSE + 1, -1))

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        """[B, dense], [B, sparse, bag], [B, 1] -> loss"""
        x = self.bottom(numbers)
        vectors = torch.stack([x, *(bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = self.rows_and_columns
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products[:, rows, columns]], 1)), clicked)


def dlrm() -> Built:
    return Dlrm(), (torch.randn(ROWS, DENSE), torch.randint(500, (ROWS, SPARSE, 4)), torch.rand(ROWS, 1).round())


ENTRIES = (
    *entries(
        "graph",
        "torch_geometric",
        {
            "gcn": basic("GCN"),
            "graph_sage": basic("GraphSAGE"),
            "gat": basic("GAT", heads=4),
            "gin": basic("GIN"),
            "edge_cnn": basic("EdgeCNN"),
            "transformer_conv": stack("TransformerConv", WIDTH // 4, heads=4, edge_dim=8, edge_width=8),
            "gen": stack("GENConv", WIDTH, edge_dim=8, edge_width=8),
            "relational": relational,
            "graph_transformer": graph_transformer,
            "schnet": schnet,
        },
    ),
    *entries(
        "recommendation",
        "deepctr-torch",
        {
            "deepfm": clicks("DeepFM", dnn_hidden_units=(256, 128)),
            "xdeepfm": clicks("xDeepFM", dnn_hidden_units=(256, 128), cin_layer_size=(32, 32)),
            "autoint": clicks("AutoInt", att_layer_num=3),
        },
    ),
    *entries("recommendation", "torch", {"dlrm": dlrm}),
)
