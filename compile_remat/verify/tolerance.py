"""How much two computations of one tensor may differ: by rounding, as far as rounding goes in this very model.

A fixed tolerance is wrong for every deep net: too tight for 24 layers of float16, too loose for the first of them, and
senseless for a gradient that is zero but for rounding (that of a bias before a batch norm, or of attention's keys).  So
a difference within a few spacings of the tensor's largest number passes at once; a larger one is held against what
happens to the tensor when the parameters move by one spacing each, which is the definition of a backward stable
computation (Higham, Accuracy and Stability of Numerical Algorithms, 1.5).  Two figures are compared, the largest element
and the 2-norm: the first sees one wrong element, the second a small error everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

SPACINGS = 2
"""Differences of this many spacings of the largest number pass without a measurement: bfloat16 1.6e-2, as in
``torch.testing.assert_close``, float16 2e-3, float32 2.4e-7."""

MARGIN = 4
"""Times the measured rounding that a difference may reach.  Measured with torch 2.13 on CPU, 24 layers of a transformer
through Inductor at `min`, all 291 tensors: 0 in float32, at most 1.0 (median 0.35) in bfloat16, 1.0 (0.33) in float16, where
rounding itself reaches 10 spacings of a gradient's largest number (``tests/verify/test_first_step.py --full`` runs such models)."""

CHUNK = 1 << 22


@dataclass(frozen=True)
class Gap:
    """How far apart two tensors are: the largest difference of an element, and the 2-norm of all of them."""

    largest: float
    norm: float

    def exceeds(self, other: Gap) -> bool:
        """Whether it is larger in either figure; what is no number exceeds every number."""
        return not (self.largest <= other.largest and self.norm <= other.norm)


def gap(actual: torch.Tensor, expected: torch.Tensor) -> Gap:
    """Distance of two tensors of one shape; the same infinity, or no number on both sides, is no distance."""
    largest, squares = 0.0, 0.0
    for a, b in zip(_chunks(actual), _chunks(expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        distance = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
        largest = max(largest, float(distance.max()))
        squares += float(distance.square().sum())
    return Gap(largest, math.sqrt(squares))


def size(tensor: torch.Tensor) -> Gap:
    """Largest magnitude and 2-norm of the finite elements."""
    largest, squares = 0.0, 0.0
    for chunk in _chunks(tensor):
        finite = torch.where(chunk.isfinite(), chunk, 0.0)
        largest = max(largest, float(finite.abs().max()))
        squares += float(finite.square().sum())
    return Gap(largest, math.sqrt(squares))


def allowance(expected: torch.Tensor, epsilon: float, noise: Iterable[Gap] = ()) -> Gap:
    """How far from `expected` rounding may lead: some spacings of its numbers, or what was measured where that is more.

    Whole numbers have no spacing.  Infinite noise (an overflow that comes or goes) allows everything.
    """
    largest = norm = 0.0
    if expected.is_floating_point() or expected.is_complex():
        own, least = size(expected), float(torch.finfo(expected.dtype).tiny)
        largest, norm = SPACINGS * (epsilon * own.largest + least), SPACINGS * (epsilon * own.norm + least)
    for measured in noise:
        largest, norm = max(largest, MARGIN * measured.largest), max(norm, MARGIN * measured.norm)
    return Gap(largest, norm)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements as double precision numbers, some at a time: a copy of the whole could be too large."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    for chunk in flat.split(CHUNK):
        if chunk.numel():
            yield chunk.double()
