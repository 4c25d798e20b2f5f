"""The differences that rounding explains."""

import math

import pytest
import torch

from compile_remat.verify import tolerance
from compile_remat.verify.first_step import is_same
from compile_remat.verify.tolerance import ErrorNorms, error_norms, magnitude


def test_error_norms() -> None:
    a = torch.tensor([1.0, math.inf, math.nan, -2.0])
    assert error_norms(a, a.clone()) == ErrorNorms(0.0, 0.0)
    assert error_norms(a, torch.tensor([1.0, math.inf, math.nan, 1.0])) == ErrorNorms(3.0, 3.0)
    assert error_norms(a, torch.tensor([1.0, -math.inf, math.nan, -2.0])).largest == math.inf
    assert error_norms(a, torch.tensor([1.0, math.inf, 0.0, -2.0])).largest == math.inf
    assert error_norms(torch.tensor([3 + 4j]), torch.tensor([0j])) == ErrorNorms(4.0, 5.0)
    assert error_norms(torch.ones(0), torch.ones(0)) == ErrorNorms(0.0, 0.0)
    assert error_norms(torch.tensor([True, False]), torch.tensor([True, True])) == ErrorNorms(1.0, 1.0)
    assert magnitude(a) == ErrorNorms(2.0, math.sqrt(5))


def test_error_norms_do_not_depend_on_how_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(7, 5), torch.randn(7, 5)
    whole = error_norms(a, b)
    monkeypatch.setattr(tolerance, "CHUNK", 3)
    assert error_norms(a, b).largest == whole.largest and math.isclose(error_norms(a, b).norm, whole.norm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_allowed(dtype: torch.dtype) -> None:
    expected, eps = torch.tensor([1.0, 0.5, 0.0], dtype=dtype), float(torch.finfo(dtype).eps)
    near, far = expected.clone(), expected.clone()
    near[2], far[2] = eps, 8 * eps
    assert is_same(near, expected, eps) and not is_same(far, expected, eps)
    assert is_same(
        far, expected, eps, [ErrorNorms(0.0, 0.0), ErrorNorms(2 * eps, 2 * eps)]
    )  # the model's own rounding is larger
    assert not is_same(far, expected, eps, [ErrorNorms(eps, 2 * eps)])
    assert not is_same(far, expected, eps, [ErrorNorms(2 * eps, eps)])
    assert not is_same(torch.tensor([1, 2]), torch.tensor([1, 3]), eps)
    assert not is_same(None, expected, eps) and not is_same(expected[:2], expected, eps) and is_same(None, None, eps)
