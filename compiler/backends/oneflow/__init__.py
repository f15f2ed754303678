"""The OneFlow backend is for GPUs that its packages support (Ampere and older) and environments pinned to it.

`program` turns an exported graph into plain data, `operators` maps each of its operators to OneFlow's, and `instances`
has OneFlow compile it, once for each set of sizes. That happens in this process if OneFlow can be imported here, and
otherwise in a Python that has OneFlow (`worker_process`, `serve`).
"""

from .backend import OneFlowBackend, onediff_text

__all__ = ["OneFlowBackend", "onediff_text"]
