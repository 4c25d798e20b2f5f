"""Workspace of library kernels: the bytes that a kernel takes beside its outputs, measured on the device that is here.

Imports only `_torch` and `_util` of this package.  oneDNN copies weights, and inputs of other than its own layout, into blocks of
16 channels, sums gradients for each group of threads by itself, and takes scratch memory that depends on the processor and the
number of threads; LAPACK's drivers, sorting, transforms of several dimensions and many backward operators take copies.  No formula
covers this: each operator is run once on tensors of the real sizes, types and strides, and the allocator is watched.  The results
are kept on disk for later processes, below Inductor's own cache.

Every operator for which Inductor calls a library kernel, instead of emitting a kernel of its own, is measured, except operators

- that wait for other processes, return nothing, or have outputs of data-dependent size;
- of libraries other than torch's own that are written in Python, write into an argument, or read integers, which may be indices
  into another tensor;
- whose inputs take more than `FREE_SHARE` of the host's free memory, or that fail on ones: a line is logged, and they count as 0.

Private names, same in 2.11 to 2.15: ``lowerings``, ``fallbacks`` and the attribute ``_is_fallback_handler`` of
``torch._inductor.lowering``; ``torch._inductor.decomposition.decompositions``; ``torch.library._impls``; ``_schema`` of operators.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile_remat._torch import ambient, cache_key_text, conv_layout, operators, sizes
from compile_remat._torch.allocator_events import most_allocated
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules
from compile_remat._torch.delivery.delivery_ops import DELIVER
from compile_remat._torch.operators import Like, NotPlain, Strides, filled, lazily, likes, plain, text
from compile_remat._torch.version import private_name
from compile_remat._util.host import host_free_bytes, processor_name
from compile_remat._util.number_file import NumberFile

LOG = logging.getLogger("compile_remat")

FREE_SHARE = 0.25
"""Largest share of the host's free memory that the inputs of an operator on the CPU may take for a run; outputs come on top."""

aten = torch.ops.aten
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
SOMETIMES_CALLED = frozenset(
    {
        aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default, aten.median.default, aten.median.dim,
        aten.mode.default, aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default, aten._adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default,
        aten.native_dropout.default,
    }
)  # fmt: skip
"""Operators that Inductor calls or emits kernels for, by sizes and device; it calls those that we take for unfused kernels."""

TORCHS_OWN = frozenset({"aten", "prims", "mkldnn"})
NOT_ZERO = frozenset({aten.linalg_lu_solve.default, aten.lu_unpack.default, aten.linalg_ldl_solve.default})
"""Operators that take pivots, which count from 1."""
COPIES = frozenset(
    {aten.copy_.default, aten.clone.default, aten._to_copy.default, aten.fill_.Scalar, aten.zero_.default}
)
"""Operators in wrappers that take no workspace if no operand is lazy and all operands have the same strides."""
UNKNOWN_SIZES = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})

_implementations = private_name("torch.library", "_impls")


def node_workspace_bytes(node: fx.Node, rules: RulesOf = inductor_rules) -> int:
    """Bytes of workspace of a node's kernel, with inputs in the layout that Inductor gives them; 0 if Inductor emits the kernel.

    The first call for an operator and its operands runs the operator once.

    Args:
        rules: Rules of the node's graph.  On a GPU, the graph's convolutions decide their layout (`conv_layout.with_layout`).
    """
    if node.op != "call_function" or not is_library_kernel(node):
        return 0
    return _beside(node.target, _args_of(node), node.kwargs, _strides_for(node, rules))


def _args_of(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a node's kernel: on a GPU a convolution has no bias, which Inductor adds by a kernel of its own."""
    value = node.meta.get("val")
    if node.target is aten.convolution.default and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return (*node.args[:2], None, *node.args[3:])
    return node.args


def _strides_for(node: fx.Node, rules: RulesOf) -> Strides:
    """A function that returns the strides of each tensor argument; see `InductorRules.gradients_read_eager_strides`."""
    if node.target not in CONVOLUTIONS:
        return sizes.hint_strides
    of_convolution = functools.partial(conv_layout.convolution_strides, rules=rules)
    concatenated = [n.meta["val"] for n in node.all_input_nodes if n.target is aten.cat.default]
    if node.target is not aten.convolution_backward.default or not concatenated:
        return of_convolution
    if not rules(concatenated[0].device.type).gradients_read_eager_strides:
        return of_convolution

    def strides(value: torch.Tensor) -> tuple[int, ...]:
        is_eager = any(value is v for v in concatenated)
        return sizes.hint_strides(value) if is_eager else of_convolution(value)

    return strides


def workspace_bytes(target: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """Bytes of workspace of one call on tensors, which may be fake; for a library's kernel, even if Inductor emits it elsewhere.

    A call with ``out=`` takes the same bytes as the call without it.
    """
    if target is DELIVER:  # its last argument says whether it copies the gradient
        gradient: Any = args[0]
        return int(gradient.nbytes) if args[-1] else 0
    if target.is_view or (target in COPIES and _is_plain(args)):
        return 0
    if target._overloadname == "out" and hasattr(target.overloadpacket, "default"):
        target, kwargs = target.overloadpacket.default, {k: v for k, v in kwargs.items() if k != "out"}
    return _beside(target, args, kwargs, sizes.hint_strides)


def _is_plain(args: Sequence[object]) -> bool:
    """Returns whether a copy keeps the order of elements: torch transposes by blocks, and resolves lazy operands first."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return len({sizes.hint_strides(tensor) for tensor in tensors}) < 2 and not any(map(lazily, tensors))


def is_library_kernel(node: fx.Node) -> bool:
    """Returns whether Inductor calls this operator's own kernel; for `SOMETIMES_CALLED`, whether Inductor may call it."""
    from torch._inductor import decomposition, lowering

    target: Any = node.target
    if not isinstance(target, operators.OpOverload):
        return False
    if target in CONVOLUTIONS or target in PRODUCTS or target in SOMETIMES_CALLED or target in lowering.fallbacks:
        return True
    if operators.is_complex(node):
        return True
    lowered = lowering.lowerings.get(target)
    if lowered is None:
        return target not in decomposition.decompositions
    return hasattr(lowered, "_is_fallback_handler")


# -- one call ---------------------------------------------------------------------------------------------------------


def _beside(target: Any, args: Sequence[object], kwargs: Mapping[str, object], strides: Strides) -> int:
    if not _may_be_run(target):
        return 0
    try:
        call = plain((args, sorted(kwargs.items())), strides)
    except NotPlain:
        return 0
    tensors = list(likes(call))
    kinds = {like.device_type for like in tensors}
    if not tensors or not all(map(_is_here, kinds)) or (target in PRODUCTS and all(map(_suits_blas, tensors))):
        return 0
    if target.namespace not in TORCHS_OWN and any(like.is_of_places for like in tensors):
        return 0
    return _known_or_measured(target, call, "cuda" if "cuda" in kinds else "cpu")


def _is_here(device_type: str) -> bool:
    """Returns whether this machine has a device of this type whose allocator counts the requested bytes."""
    return device_type == "cpu" or (
        device_type == "cuda" and torch.cuda.is_available() and bool(torch.cuda.memory_stats())
    )


def _may_be_run(target: Any) -> bool:
    if (
        not operators.waits_for_nobody(target)
        or not target._schema.returns
        or not UNKNOWN_SIZES.isdisjoint(target.tags)
    ):
        return False
    return target.namespace in TORCHS_OWN or not (operators.is_mutable(target) or _is_python(target))


def _is_python(target: Any) -> bool:
    """Returns whether a kernel of the operator was registered from Python: such a kernel may count its calls, or print."""
    name = f"{target.namespace}/{target._schema.name.split('::')[1]}"
    names = (name, f"{name}.{target._schema.overload_name}")
    keys = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{name}/{key}" in _implementations for name in names for key in keys)


def _suits_blas(like: Like) -> bool:
    """Returns whether a product on the CPU reads this matrix without a copy: MKL takes nothing from torch's allocator."""
    is_exact = like.dtype is torch.float64 or (
        like.dtype is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    )
    if like.device_type != "cpu" or not is_exact or not torch.backends.mkl.is_available():
        return False
    if like.lazily:
        return False
    rows, columns = (1, *like.shape)[-2:]
    outer, inner = (columns, *like.strides)[-2:]
    return (inner == 1 and outer >= columns) or (outer == 1 and inner >= rows) or len(like.shape) < 2


def _known_or_measured(target: Any, call: Any, device_type: str) -> int:
    file = _file(device_type)
    known, signature = _known(file), f"{target}{text(call)}"
    if signature not in known:
        try:
            known[signature] = _measured(target, call, torch.device(device_type))
        except (MemoryError, torch.OutOfMemoryError) as error:
            LOG.warning("the workspace of %s cannot be measured and counts as 0 bytes: %s", target, error)
            return 0
        except Exception as error:  # an operator may raise anything on such numbers; training goes on
            LOG.info(
                "the workspace of %s cannot be measured and counts as 0 bytes: %s: %s",
                signature,
                type(error).__name__,
                str(error).splitlines()[:1],
            )
            return 0
        file.add({signature: known[signature]})
    return known[signature]


def _measured(target: Any, call: Any, device: torch.device) -> int:
    nbytes, free = sum(like.nbytes for like in likes(call)), host_free_bytes()
    if device.type == "cpu" and free is not None and nbytes > FREE_SHARE * free:
        raise MemoryError(f"its inputs have {nbytes:,} bytes, and {free:,} are free")
    with ExitStack() as stack:
        stack.enter_context(ambient.plainly(device))
        if torch.Tag.nondeterministic_seeded in target.tags:
            devices = [device] if device.type == "cuda" else []
            stack.callback(ambient.write_random_state, ambient.read_random_state(devices))
        args, kwargs = filled(call, functools.partial(_tensor, int(target in NOT_ZERO)))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        most, result = most_allocated(lambda: target(*args, **dict(kwargs)), device)
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
        return max(0, most - sum(nbytes for key, nbytes in made.items() if key not in given))


def _tensor(place: int, like: Like) -> torch.Tensor:
    """A tensor of ones, which also are valid probabilities and mask entries; of `place` for integers."""
    fill = place if like.is_of_places else 1
    return like.over(torch.full((like.elements,), fill, dtype=like.dtype, device=like.device_type))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in operators.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# -- earlier measurements ---------------------------------------------------------------------------------------------


@functools.cache
def _known(file: NumberFile) -> dict[str, int]:
    """Bytes by call: the content of the file at its first read, and all measurements of this process since."""
    return file.read()


def _file(device_type: str) -> NumberFile:
    """The file of measurements: one for each device, torch version and setting that changes a library's choice of algorithm."""
    if device_type == "cuda":
        how: tuple[object, ...] = (
            torch.cuda.get_device_name(),
            torch.backends.cudnn.version(),
            torch.backends.cudnn.benchmark,
        )
    else:
        how = (processor_name(), f"{torch.get_num_threads()} threads", f"oneDNN {torch.backends.mkldnn.enabled}")
    is_exact = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    place = ", ".join(map(str, (*how, *is_exact, f"torch {torch.__version__}")))
    return _file_in(cache_key_text.inductor_cache_folder(), place)


@functools.cache
def _file_in(folder: str, place: str) -> NumberFile:
    name = f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"
    return NumberFile(Path(folder) / "remat" / "workspaces" / name, place)
