"""What the fake device answers where a wrong answer would be silent: python -m tests.cuda_codegen.jobs.canaries

Prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import Any

from compile_remat._torch.fake_cuda import install


def main() -> dict[str, Any]:
    install.install()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: dict[str, Any] = {}
    with FakeTensorMode(), torch.device("cuda"):
        for dtype in (torch.float32, torch.bfloat16):
            for groups in (1, 16):
                x = torch.empty(2, 16, 8, 8, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
                w = torch.empty(16, 16 // groups, 3, 3, dtype=dtype, requires_grad=True)
                y = torch.nn.functional.conv2d(x, w, padding=1, groups=groups)
                y.sum().backward()
                name = f"{dtype} in {groups}"
                assert x.grad is not None
                found[name] = [
                    torch._C._select_conv_backend(x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups).name,
                    y.is_contiguous(memory_format=torch.channels_last),
                    str(x.grad.device),
                ]
        plain = torch.nn.functional.conv2d(torch.empty(2, 16, 8, 8), torch.empty(16, 16, 3, 3))
        found["contiguous stays"] = plain.is_contiguous()
        found["made of numbers"] = type(torch.tensor(2.0)).__name__
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
