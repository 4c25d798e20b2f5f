"""Answers of the fake device where a wrong one would be silent: python -m tests.cuda_codegen.jobs.canaries [BROKEN]

Prints one line of JSON: the result of `canaries.problem` as installed, and with the answer BROKEN as without the fake device.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from compile_remat._torch.fake_cuda import canaries
from compile_remat._torch.fake_cuda.installation import install


def main(broken: str) -> dict[str, Any]:
    install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, Any] = {"problem": canaries.problem()}
    with FakeTensorMode(), torch.device("cuda"):
        for dtype in (torch.float32, torch.bfloat16):
            for groups in (1, 16):
                found[f"{dtype} in {groups}"] = canaries.convolution(dtype, groups)
        plain = torch.nn.functional.conv2d(torch.empty(2, 16, 8, 8), torch.empty(16, 16, 3, 3))
        found["contiguous stays"] = plain.is_contiguous()
    if broken == "device":
        torch.cuda.is_available = lambda: False
    elif broken == "triton":
        from torch.utils import _triton

        _triton.has_triton = lambda: False
    elif broken == "convolution":
        select, cpu = torch._C._select_conv_backend, torch.empty(2, 16, 8, 8)  # type: ignore[attr-defined]
        other: Any = torch._C
        weight = torch.empty(16, 16, 3, 3)
        other._select_conv_backend = lambda x, w, *rest: select(cpu, weight, *rest[:-1], 1)
    found["broken"] = canaries.problem()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
