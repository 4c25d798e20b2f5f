"""The dry run of Inductor's wrapper: on code written by hand, and against what the allocator sees of real code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_remat.inductor.wrapper_dry_run import NotUnderstood, dry_run

KIB = 1024


def code(*lines: str) -> str:
    """A wrapper with one kernel."""
    kernel = "cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], 'source')"
    return "\n".join([kernel, "def call(args):", *(f"    {line}" for line in lines)])


X = torch.empty(16, 16)  # 1 KiB
NEW = "empty_strided_cpu((16, 16), (16, 1), torch.float32)"


@pytest.mark.parametrize(
    ("lines", "peak", "outputs"),
    [
        (["x, = args", f"a = {NEW}", "cpp_fused_0(x, a)", "return (a,)"], 1, 1),
        (["x, = args", f"a = {NEW}", f"b = {NEW}", "del a", f"c = {NEW}", "return (c,)"], 2, 1),
        (["x, = args", f"a = {NEW}", "b = a; del a  # reuse", f"c = {NEW}", "return (b, c)"], 2, 2),
        (["x, = args", f"a = {NEW}", "b = reinterpret_tensor(a, (256,), (1,), 0)", "del a", "return (b,)"], 1, 1),
        (["x, = args", f"a = {NEW}", "extern_kernels.mm(x, x, out=a)", "return (a,)"], 1, 1),
        (["x, = args", "a = torch.ops.aten.topk.default(x, 16)", "b = a[0]", "del a", "return (b,)"], 3, 1),
        (["x, = args", "return (x,)"], 0, 0),
        (["x, = args", f"a = {NEW}", f"a = {NEW}", "return (a,)"], 2, 1),
    ],
)
def test_storages_count_from_their_first_holder_to_their_last(lines: list[str], peak: int, outputs: int) -> None:
    run = dry_run(code(*[part.strip() for line in lines for part in line.split("#")[0].split(";")]), [X])
    assert (run.peak_bytes, run.output_bytes) == (peak * KIB, outputs * KIB)


def test_a_cuda_buffer_takes_whole_blocks_of_the_allocator() -> None:
    lines = [
        "x, = args",
        "a = empty_strided_cuda((3,), (1,), torch.float32)",
        "b = empty_strided_cpu((3,), (1,), torch.float32)",
    ]
    run = dry_run(code(*lines, "return (a, b)"), [X])
    assert (run.peak_bytes, [nbytes for _, nbytes in run.events]) == (512 + 12, [512, 12])


def test_counted_inputs_live_until_they_are_dropped() -> None:
    lines = ["x, y = args", "args.clear()", f"a = {NEW}", "del y", f"b = {NEW}", "return (b,)"]
    assert dry_run(code(*lines), [X, torch.empty(16, 32)], {1: (7, 2 * KIB)}).peak_bytes == 3 * KIB
    assert dry_run(code(*lines), [X, torch.empty(16, 32)]).peak_bytes == 2 * KIB


@pytest.mark.parametrize(
    "lines",
    [
        ["for x in args:", "    pass"],
        ["x, = args", "y = unknown_name(x)"],
        ["x, = args", "x.y = 3"],
        ["x, y = args"],
        ["x = open('/dev/null')"],
        ["x = __import__('os')"],
        ["x = eval('1')"],
        ["x = args.__class__"],
        ["cpp_fused_1(args)"],  # no kernel of this module
    ],
)
def test_what_cannot_be_followed_is_said(lines: list[str]) -> None:
    with pytest.raises(NotUnderstood):
        dry_run(code(*lines), [X])


@pytest.mark.parametrize(("device", "nbytes"), [("device(type='cpu')", 48), ("device(type='cuda', index=0)", 512)])
def test_constants_are_there_and_do_not_count(device: str, nbytes: int) -> None:
    """Inductor sets them once its module is loaded."""
    header = f"_tensor_constant0 = None  # {device} torch.int64 (3, 2) (2, 1) 7ffa68643c50\n"
    lines = ["x, = args", "cpp_fused_0(_tensor_constant0, x)", "a = torch.ops.aten.clone.default(_tensor_constant0)"]
    run = dry_run(header + code(*lines, "return (a,)"), [X])
    assert run.peak_bytes == run.output_bytes == nbytes


def test_kernels_of_triton_are_left_out() -> None:
    """The wrapper's `set_device` would change the process's device, as the guard around it is not entered."""
    lines = [
        "x, = args",
        "args.clear()",
        "with torch.cuda._DeviceGuard(1):",
        "    torch.cuda.set_device(1)",
        "    x = copy_if_misaligned(x)",
        f"    a = {NEW}",
        "    raw_stream1 = get_raw_stream(1)",
        "    multi_kernel_0.run(x, a, 256, stream=raw_stream1)",
        "return (a, )",
    ]
    kernel = "multi_kernel_0 = async_compile.multi_kernel('multi_kernel_0', [])\n"
    assert dry_run(kernel + code(*lines), [X]).peak_bytes == KIB


@pytest.mark.parametrize(
    ("body", "peak"),
    [
        (["y = args[0]", "args.clear()", "b = NEW", "c = NEW", "del y", "return (b, c)"], 3),
        (["y = args[0]", "args.clear()", "del y", "b = NEW", "c = NEW", "return (b, c)"], 2),
        (["y = args[0]", "args.clear()", "b = y; del y", "c = NEW", "return (b, c)"], 2),
        (["y, = args", "del y", "b = NEW", "c = NEW", "return (b, c)"], 3),
    ],
    ids=["dropped at the end", "dropped at once", "reused", "held by the list"],
)
def test_partitions_drop_what_they_are_handed(body: list[str], peak: int) -> None:
    """`mode="reduce-overhead"` on a GPU: the function `call` runs others, which free tensors that it made."""
    lines = [part.strip() for line in body for part in line.split(";")]
    text = "\n    ".join(["def partition_0(args):", *lines]).replace("NEW", NEW)
    method = [
        "x, = args",
        "args.clear()",
        "a = NEW",
        "partition0_args = [a]",
        "del a",
        "(b, c) = self.partitions[0](partition0_args)",
        "del partition0_args",
        "del b",
        "return (c, )",
    ]
    text += "\nclass Runner:\n    def call(self, args):\n        " + "\n        ".join(method).replace("NEW", NEW)
    run = dry_run(text, [X])
    assert (run.peak_bytes, run.output_bytes) == (peak * KIB, KIB)


def test_an_operator_may_import_modules() -> None:
    """Copying real into complex numbers does, from C++, by the builtins of the frame that called it."""
    lines = ["x, = args", f"a = {NEW.replace('float32', 'complex64')}", "a.copy_(x, False)", "del a", "return (x,)"]
    assert dry_run(code(*lines), [X]).peak_bytes == 2 * KIB


def test_sizes_are_computed_as_in_python() -> None:
    lines = ["s0, = args", "a = empty_strided_cpu((max(1, s0 // 4), 16), (16, 1), torch.float32)", "return (a, )"]
    assert dry_run(code(*lines), [64]).peak_bytes == KIB


def with_functions(*lines: str) -> str:
    """A wrapper that calls ``one(args)``, which holds two buffers at once and returns one, and ``two(args)``, which holds three."""
    buffers = {"one": ("a",), "two": ("a", "b")}
    functions = [
        f"def {name}(args):\n    x, = args\n    args.clear()\n"
        + "".join(f"    {b} = {NEW}\n" for b in (*names, "out"))
        + "".join(f"    del {b}\n" for b in names)
        + "    return (out,)\n"
        for name, names in buffers.items()
    ]
    return "\n".join([*functions, code(*lines)])


@pytest.mark.parametrize(
    ("lines", "peak", "outputs"),
    [
        (["x, = args", "given = [x]", "y, = one(given)", "return (y,)"], 2, 1),
        (["x, = args", f"y = {NEW}", "given = [y]", "del y", "z, = one(given)", "return (z,)"], 3, 1),
        (["x, = args", "given = [x]", "y, = one(given)", "given = [y]", "z, = two(given)", "return (z,)"], 4, 1),
        (
            [
                "x, = args",
                "given = [x]",
                "if x.item():",
                "    y, = one(given)",
                "else:",
                "    y, = two(given)",
                "return y",
            ],
            3,
            1,
        ),
        (["x, = args", "y = x", "while True:", "    given = [y]", "    y, = one(given)", "return (y,)"], 3, 1),
    ],
    ids=["call", "what it is handed counts", "a second call", "branches", "loop"],
)
def test_functions_branches_and_loops_are_followed(lines: list[str], peak: int, outputs: int) -> None:
    run = dry_run(with_functions(*lines), [X])
    assert (run.peak_bytes, run.output_bytes) == (peak * KIB, outputs * KIB)


@pytest.mark.parametrize("test", [["if x.item():"], ["x_selector = int(x.item())", "if x_selector == 0:"]])
def test_a_branch_does_not_see_what_the_other_one_freed(test: list[str]) -> None:
    """The second is what torch 2.15 writes for a `cond`."""
    lines = [
        "x, = args",
        f"y = {NEW}",
        *test,
        "    del y",
        "else:",
        f"    z = {NEW}",
        f"w = {NEW}",
        "return (w,)",
    ]
    assert dry_run(code(*lines), [X]).peak_bytes == 3 * KIB


def test_sizes_that_only_the_data_knows_are_not_understood() -> None:
    for name in ("u0", "x_selector"):
        lines = [
            "x, = args",
            f"{name} = int(x.item())",
            f"y = empty_strided_cpu(({name},), (1,), torch.float32)",
            "return (y,)",
        ]
        with pytest.raises(NotUnderstood):
            dry_run(code(*lines), [X])


def test_code_without_the_function_is_not_understood() -> None:
    with pytest.raises(NotUnderstood, match="call"):
        dry_run("x = 1", [])


def test_what_an_operator_takes_counts_wherever_it_stands(own_caches: Path) -> None:
    """`kthvalue` copies its input and its indices; a product of every second number copies both operands."""
    named = dry_run(code("x, = args", "a = torch.ops.aten.kthvalue.default(x, 3)", "return (a[0],)"), [X])
    assert named.peak_bytes >= 3 * KIB
    lines = [
        "x, = args",
        "a = empty_strided_cpu((64, 64), (64, 1), torch.float32)",
        "y = reinterpret_tensor(x, (64, 64), (128, 2), 0)",
        "extern_kernels.mm(y, y, out=a)",
        "return (a,)",
    ]
    assert dry_run(code(*lines), [torch.empty(64 * 128)]).peak_bytes >= 32 * KIB
