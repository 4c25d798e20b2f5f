"""Installs a partitioner as an option of Inductor: its type, the option's name, and its process-wide installation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor import config as inductor_config

from compile_remat._torch.version import private_name
from compile_remat.inductor.observe import GraphRewrite

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
else:
    CustomGraphPass = private_name("torch._inductor.custom_graph_pass", "CustomGraphPass")
    CustomPartitionerFn = private_name("torch._inductor.custom_graph_pass", "CustomPartitionerFn")

PARTITIONER_OPTION = "custom_partitioner_fn"
"""The option of Inductor that holds a partitioner."""

PASS_OPTION = "joint_custom_post_pass"
"""The option of Inductor that holds a pass which runs after Inductor's own passes over joint graphs and inference graphs."""

_JOINT_INPUT = "primals_"
"""Prefix that AOTAutograd gives to inputs of joint graphs, and of no other graphs."""

_replaced: dict[str, Any] = {}
"""The values of Inductor's settings before `set_global_partitioner`."""


def joint_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those keyword arguments of a partitioner that tell the outputs of a joint graph from its gradients."""
    return {name: given.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}


class InferencePass(CustomGraphPass):
    """Rewrites graphs that are compiled for inference, for which Inductor calls no partitioner.

    Args:
        rewrite: Returns the graph that replaces the given graph, or the given graph itself.
        partitioner: Its identity in torch's caches covers all that the rewrite depends on.
    """

    def __init__(self, rewrite: GraphRewrite, partitioner: CustomPartitionerFn) -> None:
        self.rewrite, self.partitioner = rewrite, partitioner

    def __call__(self, graph: fx.Graph) -> None:
        """Put the rewritten graph into the module of the old graph; joint graphs are left as they are."""
        module = graph.owning_module
        if module is None or any(n.name.startswith(_JOINT_INPUT) for n in graph.find_nodes(op="placeholder")):
            return
        rewritten = self.rewrite(module)
        if rewritten is not module:
            module.graph = rewritten.graph

    def uuid(self) -> object:
        """Identity of the pass in torch's caches: the one of its partitioner."""
        return self.partitioner.uuid()


def set_global_partitioner(
    partitioner: CustomPartitionerFn | None,
    options: Mapping[str, Any] | None = None,
    rewrite: GraphRewrite | None = None,
) -> None:
    """Set Inductor's process-wide partitioner and process-wide options; None restores the values from before.

    Args:
        rewrite: Rewrites graphs that are compiled for inference; not installed if the user has set `PASS_OPTION`.
    """
    for name, value in _replaced.items():
        setattr(inductor_config, name, value)
    _replaced.clear()
    if partitioner is not None:
        wanted = {**(options or {}), PARTITIONER_OPTION: partitioner}
        if rewrite is not None and getattr(inductor_config, PASS_OPTION) is None:
            wanted[PASS_OPTION] = InferencePass(rewrite, partitioner)
        _replaced.update({name: getattr(inductor_config, name) for name in wanted})
        for name, value in wanted.items():
            setattr(inductor_config, name, value)
