"""`GuardedChoices`: Inductor must not fuse what the plan computes at different times into one early kernel."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import compile_remat
from compile_remat import compilation
from compile_remat._torch_inductor import GuardedChoices, compile_with_partitioner
from compile_remat.backend import remat
from compile_remat.measure import peak_bytes

READERS = 12
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings, graphs, reports or cached plans from elsewhere: on a cache hit nothing of ours would run."""
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    torch.compiler.reset()
    compile_remat.reset_reports()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


def fan(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Twelve values that read `x`, each for a matmul of its own: a plan recomputes each just before it is needed."""
    total = torch.zeros((), dtype=x.dtype)
    for k, weight in enumerate(weights):
        total = total + (torch.sin(x + k) @ weight).sum()
    return total


def measured(call: Callable[..., torch.Tensor]) -> int:
    """Peak of a step: `x` is 1 MiB, the weights are small."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    weights = [torch.randn(64, 4, requires_grad=True) for _ in range(READERS)]

    def step() -> None:
        call(x, *weights).backward()

    step()
    actual = [w.grad for w in weights]
    for weight in weights:
        weight.grad = None
    fan(x, *weights).backward()
    torch.testing.assert_close(actual, [w.grad for w in weights], rtol=1e-3, atol=1e-3)
    for weight in weights:
        weight.grad = None
    return peak_bytes(step, "cpu").peak_bytes


def compiled() -> Any:
    return torch.compile(fan, backend=remat, options={"memory_budget": "min"})


def test_recomputed_siblings_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = measured(compiled())
    (report,) = compile_remat.reports()
    torch.compiler.reset()

    def without_guard(*args: Any, **kwargs: Any) -> Any:
        return compile_with_partitioner(*args, **{**kwargs, "guarded": False})

    monkeypatch.setattr(compilation, "compile_with_partitioner", without_guard)
    unguarded = measured(compiled())
    assert report.num_recomputed >= READERS
    assert guarded <= 1.05 * report.predicted_peak_bytes
    assert 3 * guarded < unguarded


def test_plain_inductor_keeps_its_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(*args: Any) -> bool:
        asked.append(1)
        return False

    monkeypatch.setattr(GuardedChoices, "can_fuse_horizontal", staticmethod(count))
    inputs = [torch.randn(64, 8), *[torch.randn(8, 4, requires_grad=True) for _ in range(3)]]
    compiled()(*inputs).backward()
    used = len(asked)
    assert used > 0
    torch.compiler.reset()
    torch.compile(fan)(*inputs).backward()
    torch.compiler.reset()
    torch.compile(fan, backend=remat, options={"memory_budget": "max"})(
        *inputs
    ).backward()  # `max` is Inductor as it is
    assert len(asked) == used
