"""One clock for CPU and CUDA."""

import pytest
import torch

from compile_remat.cost_models.timing.clock import MIN_CALLS, WARM_CALLS, elapsed_ns, median_ns

CPU = torch.device("cpu")


def test_calls_are_counted_and_nothing_takes_no_time() -> None:
    ran: list[str] = []
    assert elapsed_ns(lambda: ran.append("run"), CPU, calls=3, before=lambda: ran.append("before")) >= 1
    assert ran == ["run"] * 3, "there is no queue to fill on a CPU"
    ran.clear()
    assert median_ns(lambda: ran.append("run"), CPU) >= 1
    assert len(ran) >= WARM_CALLS + MIN_CALLS


def test_more_work_takes_longer() -> None:
    a = torch.randn(256, 256)
    assert median_ns(lambda: a @ a, CPU) > median_ns(lambda: a[:8, :8] @ a[:8, :8], CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_comes_before_is_not_counted() -> None:
    device = torch.device("cuda")
    a = torch.randn(4096, 4096, device=device)

    def product() -> torch.Tensor:
        return a @ a

    product()
    nothing_ns = min(elapsed_ns(lambda: None, device, before=product) for _ in range(5))
    one_ns = min(elapsed_ns(product, device) for _ in range(5))
    four_ns = min(elapsed_ns(product, device, calls=4) for _ in range(5))
    assert nothing_ns < one_ns / 2 and 2 * one_ns < four_ns
    assert median_ns(product, device) < 2 * one_ns
