"""The mesh of ranks on which a model is to be trained, and the way its parameters are spread over these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compile_remat._util.suggestions import did_you_mean
from compile_remat.errors import ConfigError
from compile_remat.forecast.builders import DTYPES

DIMENSIONS = ("dp", "tp")
"""Data parallel ranks have data of their own; tensor parallel ranks, which are neighbours, share each product."""

SHARDS = ("ddp", "fsdp2", "fsdp2-whole")
"""Kinds of data parallelism: all parameters on every rank; FSDP2 around each block and the model; FSDP2 around the model alone."""


@dataclass(frozen=True)
class MeshLayout:
    """Ranks as a mesh, and the settings of FSDP2 on it.

    Attributes:
        dp: Number of data parallel ranks.
        tp: Number of tensor parallel ranks, the inner dimension.
        shard: One of `SHARDS`.
        reshard: FSDP2's ``reshard_after_forward``; None is torch's default: all groups except for the model's own.
        node_size: Devices of one node.
        param_dtype: ``param_dtype`` of FSDP2's ``MixedPrecisionPolicy``, as a name of `builders.DTYPES`: the dtype of gathered
            parameters and of the forward; None is the parameters' own dtype.
        reduce_dtype: Its ``reduce_dtype``, in which gradients are reduced; None is the dtype of the forward.
    """

    dp: int = 1
    tp: int = 1
    shard: str = "ddp"
    reshard: bool | None = None
    node_size: int = 8
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for invalid settings."""
        if self.shard not in SHARDS:
            raise ConfigError(
                f"shard = {self.shard!r}: allowed are {', '.join(SHARDS)}.{did_you_mean(self.shard, SHARDS)}"
            )
        if self.node_size < 1:
            raise ConfigError(f"node_size = {self.node_size}: must be at least 1.")
        if self.reshard is not None and not self.is_fsdp:
            raise ConfigError(
                f"reshard_after_forward is a setting of FSDP2, and shard is {self.shard!r}: leave it out."
            )
        for name in ("param_dtype", "reduce_dtype"):
            written = getattr(self, name)
            if written is not None and not self.is_fsdp:
                raise ConfigError(f"{name} is a setting of FSDP2, and shard is {self.shard!r}: leave it out.")
            if written is not None and written not in DTYPES:
                raise ConfigError(
                    f"{name} = {written!r}: no such type. Allowed: {', '.join(DTYPES)}.{did_you_mean(written, DTYPES)}"
                )

    @property
    def node_ranks(self) -> int:
        """The number of ranks that share a node, and its host's memory."""
        return min(self.node_size, self.num_ranks)

    @staticmethod
    def parse(
        written: str,
        shard: str = "ddp",
        reshard: bool | None = None,
        node_size: int = 8,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
    ) -> MeshLayout:
        """Returns the mesh that a text such as ``dp=8,tp=2`` describes.

        Raises:
            ConfigError: The text describes none, or another setting is invalid.
        """
        sizes: dict[str, int] = {}
        for part in written.split(","):
            name, equals, size = (word.strip() for word in part.partition("="))
            if name not in DIMENSIONS:
                raise ConfigError(
                    f"mesh = {written!r}: {name!r} is no dimension. Allowed: {', '.join(DIMENSIONS)}, as in dp=8,tp=2."
                    + did_you_mean(name, DIMENSIONS)
                )
            if name in sizes or not equals or not size.isascii() or not size.isdecimal() or int(size) < 1:
                raise ConfigError(f"mesh = {written!r}: write each dimension once with its size, as in dp=8,tp=2.")
            sizes[name] = int(size)
        dp, tp = (sizes.get(name, 1) for name in DIMENSIONS)
        return MeshLayout(dp, tp, shard, reshard, node_size, param_dtype, reduce_dtype)

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return self.dp * self.tp

    @property
    def is_fsdp(self) -> bool:
        """True if FSDP2 shards the parameters."""
        return self.shard != "ddp"

    @property
    def forward_dtype(self) -> torch.dtype | None:
        """Dtype of gathered parameters; None is their own dtype."""
        return None if self.param_dtype is None else DTYPES[self.param_dtype]

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are reduced; None is the dtype of the forward."""
        return None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks with which rank 0 exchanges gradients, itself included."""
        return tuple(range(0, self.num_ranks, self.tp))

    def __str__(self) -> str:
        """Returns the mesh as text that `parse` reads."""
        return f"dp={self.dp},tp={self.tp}"
