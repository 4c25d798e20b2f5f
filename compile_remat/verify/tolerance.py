"""Tolerance: the part of the difference between two computations of one tensor that rounding can explain.

A fixed tolerance is wrong for every deep net: too tight for 24 layers of float16, too loose for the first of them, and
meaningless for a gradient that is zero up to rounding (of a bias before a batch norm, or of attention's keys).  So a
difference within a few spacings of the tensor's largest number passes at once.  A larger difference is compared with the
change of the tensor when each parameter moves by one spacing, as in the definition of a backward stable computation (Higham,
Accuracy and Stability of Numerical Algorithms, 1.5).  Two norms are compared, the largest element and the 2-norm: the
first detects one wrong element, the second a small error in all elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

FREE_SPACINGS = 2
"""A difference up to this number of spacings of the tensor's largest number passes without a measurement: bfloat16 1.6e-2, as
in ``torch.testing.assert_close``, float16 2e-3, float32 2.4e-7."""

MARGIN = 4
"""Limit of a difference, as a multiple of the measured rounding.  Measured with torch 2.13 on CPU, 24 layers of a transformer
through Inductor at `min`, all 291 tensors: 0 in float32, at most 1.0 (median 0.35) in bfloat16, 1.0 (0.33) in float16, where
rounding itself reaches 10 spacings of a gradient's largest number (``tests/verify/test_first_step.py --full`` runs such models)."""

CHUNK = 1 << 22


@dataclass(frozen=True)
class ErrorNorms:
    """Norms of a difference (or of one tensor): the largest magnitude of an element, and the 2-norm."""

    largest: float
    norm: float

    def exceeds(self, other: ErrorNorms) -> bool:
        """Returns True if either norm is larger than the other's; NaN exceeds every number."""
        return not (self.largest <= other.largest and self.norm <= other.norm)


def error_norms(actual: torch.Tensor, expected: torch.Tensor) -> ErrorNorms:
    """Returns the norms of the difference of two tensors of one shape; equal infinities, and NaN in both, count as equal."""
    largest, squares = 0.0, 0.0
    for a, b in zip(_chunks(actual), _chunks(expected), strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        distance = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
        largest = max(largest, float(distance.max()))
        squares += float(distance.square().sum())
    return ErrorNorms(largest, math.sqrt(squares))


def magnitude(tensor: torch.Tensor) -> ErrorNorms:
    """Returns the largest magnitude and the 2-norm of the finite elements."""
    largest, squares = 0.0, 0.0
    for chunk in _chunks(tensor):
        finite = torch.where(chunk.isfinite(), chunk, 0.0)
        largest = max(largest, float(finite.abs().max()))
        squares += float(finite.square().sum())
    return ErrorNorms(largest, math.sqrt(squares))


def bound(expected: torch.Tensor, epsilon: float, rounding: Iterable[ErrorNorms] = ()) -> ErrorNorms:
    """Returns the largest error norms that rounding explains: a few spacings of `expected`, or `MARGIN` times `rounding`.

    Integers have no spacing: only `rounding` counts for them.  Infinite rounding (an overflow in one run only) allows every
    difference.
    """
    largest = norm = 0.0
    if expected.is_floating_point() or expected.is_complex():
        own, least = magnitude(expected), float(torch.finfo(expected.dtype).tiny)
        largest, norm = FREE_SPACINGS * (epsilon * own.largest + least), FREE_SPACINGS * (epsilon * own.norm + least)
    for measured in rounding:
        largest, norm = max(largest, MARGIN * measured.largest), max(norm, MARGIN * measured.norm)
    return ErrorNorms(largest, norm)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the elements in double precision, `CHUNK` at a time, since a copy of the whole tensor could be too large."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    for chunk in flat.split(CHUNK):
        if chunk.numel():
            yield chunk.double()
