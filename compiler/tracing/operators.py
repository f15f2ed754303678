"""All operators of ours that a graph can contain."""

from __future__ import annotations

from . import attention_op, opaque_op, patch_ops


def register_operators() -> None:
    """Define them in `torch.ops.compiled_graphs`. Call this before a graph is traced, loaded or called."""
    attention_op.register_operator()
    attention_op.register_given_operator()
    opaque_op.register_operator()
    patch_ops.register_operators()
