"""Code that uses a tensor while it is copied to or from the host is refused, and the plan that needs it is not taken."""

from __future__ import annotations

import textwrap

import pytest
import torch

import compile_remat
from benchmarks.common.code_only import compile_code, without_compiler
from compile_remat._torch.offload import inductor_lowering
from compile_remat._torch.offload.copy_check import check_copies
from compile_remat._torch.offload.copy_order import CopiesMisplaced
from compile_remat.errors import PlannerWarning
from tests.correctness.test_offload import Wide

FORWARD = """
buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
kernel_0(arg0_1, buf0)
buf1 = torch.ops.compile_remat.stash.default(buf0)
buf2 = buf1[0]
assert_size_stride(buf2, (8, 8), (8, 1))
buf3 = buf1[1]
del buf1
buf4 = reinterpret_tensor(buf0, (64, ), (1, ), 0)
kernel_1(buf0, buf4, buf5)
torch.ops.compile_remat.release.default(buf0, buf3)
buf6 = buf0; del buf0  # reuse
kernel_2(buf5, buf6)
return (buf6, buf2, buf3, )
"""
BACKWARD = """
buf0 = torch.ops.compile_remat.fetch.default(host, ticket, device(type='cpu'))
buf1 = buf0[0]
assert_size_stride(buf1, (8, 8), (8, 1))
buf2 = buf0[1]
del buf0
kernel_0(tangents_1, buf3)
torch.ops.compile_remat.arrived.default(buf1, host, buf2)
del buf2
kernel_1(buf1, buf3)
del buf1
return (buf3, )
"""


def check(body: str) -> None:
    check_copies("def call(args):\n    with torch.cuda._DeviceGuard(0):\n" + textwrap.indent(body, " " * 8))


@pytest.mark.parametrize("body", [FORWARD, BACKWARD])
def test_code_in_order_passes(body: str) -> None:
    check(body)


@pytest.mark.parametrize(
    ("body", "old", "new", "text"),
    [
        (FORWARD, "release.default(buf0, buf3)", "release.default(buf5, buf3)", "no release of its own"),
        (FORWARD, "torch.ops.compile_remat.release.default(buf0, buf3)", "pass", "no release of its own"),
        (FORWARD, "kernel_1(buf0, buf4, buf5)", "mm(x, y, out=buf0)", "written over before its copy"),
        (FORWARD, "buf4 = reinterpret_tensor(buf0, (64, ), (1, ), 0)", "buf4 = buf0", "freed or written over before"),
        (FORWARD, "kernel_1(buf0, buf4, buf5)", "del buf0", "freed or written over before its copy"),
        (FORWARD, "buf6 = buf0; del buf0", "kernel_3(buf0)", "read behind the place where the plan frees it"),
        (FORWARD, "buf6 = buf0; del buf0", "kernel_3(buf4)", "read behind the place where the plan frees it"),
        (FORWARD, "buf3 = buf1[1]", "pass", "has no variable"),
        (
            BACKWARD,
            "kernel_0(tangents_1, buf3)",
            "kernel_0(buf1, buf3)",
            "used before its copy from the host has ended",
        ),
        (BACKWARD, "kernel_0(tangents_1, buf3)", "buf4 = reinterpret_tensor(buf1, (64, ))", "used before its copy"),
        (BACKWARD, "arrived.default(buf1, host, buf2)", "arrived.default(buf3, host, buf2)", "no arrived of its own"),
    ],
)
def test_code_out_of_order_is_refused(body: str, old: str, new: str, text: str) -> None:
    assert old in body
    with pytest.raises(CopiesMisplaced, match=text):
        check(body.replace(old, new))


@pytest.mark.full
def test_a_plan_with_misplaced_copies_gives_way_to_one_that_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_lowering, "_release", lambda given, ticket: None)
    with (
        without_compiler(),
        pytest.warns(PlannerWarning, match=r"(?s)moves nothing: in the code .* has no release of its own"),
    ):
        compile_code(Wide(), [torch.randn(2048, 128)], "24MiB", device="h100-sxm", offload="auto")
    plan = compile_remat.reports()[-1].plan
    assert plan is not None and plan.is_feasible and not plan.offloaded
