"""What a node asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...identity.graph_spec import GraphIdentity
from ...storage.graph_file import StoredGraph


@dataclass(frozen=True)
class Request:
    """What a node wants of the object it is given."""

    backend: str = "auto"
    verify: bool = True
    node_id: str = ""
    workflow: Callable[[], str] = lambda: ""
    """Asked whenever the object runs: ComfyUI may hand one node's output to another workflow."""
    on_change: Callable[[str], None] = lambda text: None
    """Told when a later prompt compiles more, or a graph is retired."""
    on_progress: Callable[[str], None] = lambda text: None
    """Told in words how far compiling is, while the node runs."""
    graphs: Sequence[StoredGraph] = ()
    """From a file. They serve the regions they were made for; only what they leave is looked for elsewhere."""
    listed: Sequence[GraphIdentity] = ()
    """From a file whose graphs cannot be loaded: compiled here, at once."""
    left: Sequence[GraphIdentity] = ()
    """From a file that may run here: its graphs for other machines. Compiled here if no other graph serves."""
    source: str = ""
    """What people call the file."""
    background: bool = False
    """Whether to compile while the model runs, block by block, and not before."""
    capture: bool = True
    """Whether steps that repeat may be replayed as CUDA graphs."""
    low_rank: bool = False
    """Whether LoRAs on quantised weights are computed beside the layers, instead of merged into the weights."""


ANYTHING = Request()
"""The request of somebody who asks for nothing in particular."""
