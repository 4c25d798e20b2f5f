"""Events on a CUDA device."""

import pytest
import torch

from compile_remat.cost_models.timing.cuda_events import elapsed_ns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_comes_before_is_not_counted() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)

    def product() -> torch.Tensor:
        return a @ a

    product()
    nothing = min(elapsed_ns(lambda: None, device, product) for _ in range(5))
    one = min(elapsed_ns(product, device, lambda: None) for _ in range(5))
    assert 0 <= nothing < one / 2
