"""The mesh of ranks that a model is to be trained on, and how its parameters are spread over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compile_remat._util.suggestions import did_you_mean
from compile_remat.errors import ConfigError
from compile_remat.forecast.builders import DTYPES

DIMENSIONS = ("dp", "tp")
"""Data parallel ranks have data of their own; tensor parallel ones, which are neighbours, share each product."""

SHARDS = ("ddp", "fsdp2", "fsdp2-whole")
"""Of data parallelism: every rank has all parameters; FSDP2 around each block and the model; FSDP2 around the model alone."""


@dataclass(frozen=True)
class MeshLayout:
    """Ranks as a mesh, and what FSDP2 does on it.

    Attributes:
        dp: Data parallel ranks.
        tp: Tensor parallel ranks, the inner dimension.
        shard: One of `SHARDS`.
        reshard: FSDP2's ``reshard_after_forward``; None is torch's default: all groups but the model's own.
        node_size: Devices of one node.
        param_dtype: Of FSDP2's ``MixedPrecisionPolicy``, as a name of `builders.DTYPES`: what is gathered, and what the model
            runs in; None is the parameters' own type.
        reduce_dtype: The same of what gradients are reduced in; None is that of the forward.
    """

    dp: int = 1
    tp: int = 1
    shard: str = "ddp"
    reshard: bool | None = None
    node_size: int = 8
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse what is no mesh."""
        if self.shard not in SHARDS:
            raise ConfigError(
                f"shard = {self.shard!r}: allowed are {', '.join(SHARDS)}.{did_you_mean(self.shard, SHARDS)}"
            )
        if self.node_size < 1:
            raise ConfigError(f"node_size = {self.node_size}: must be at least 1.")
        if self.reshard is not None and not self.is_fsdp:
            raise ConfigError(f"reshard_after_forward is FSDP2's, and shard is {self.shard!r}.")
        for name in ("param_dtype", "reduce_dtype"):
            written = getattr(self, name)
            if written is not None and not self.is_fsdp:
                raise ConfigError(f"{name} is of FSDP2's MixedPrecisionPolicy, and shard is {self.shard!r}.")
            if written is not None and written not in DTYPES:
                raise ConfigError(
                    f"{name} = {written!r}: no such type. Allowed: {', '.join(DTYPES)}.{did_you_mean(written, DTYPES)}"
                )

    @staticmethod
    def parse(
        written: str,
        shard: str = "ddp",
        reshard: bool | None = None,
        node_size: int = 8,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
    ) -> MeshLayout:
        """The mesh of a text such as ``dp=8,tp=2``.

        Raises:
            ConfigError: It is none.
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
        return MeshLayout(
            **sizes,
            shard=shard,
            reshard=reshard,
            node_size=node_size,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
        )

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.shard != "ddp"

    @property
    def forward_dtype(self) -> torch.dtype | None:
        """What parameters are gathered in; None is their own type."""
        return None if self.param_dtype is None else DTYPES[self.param_dtype]

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """What gradients are reduced in; None is that of the forward."""
        return None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that rank 0 exchanges gradients with, itself among them."""
        return tuple(range(0, self.num_ranks, self.tp))

    def __str__(self) -> str:
        """As it is written."""
        return f"dp={self.dp},tp={self.tp}"
