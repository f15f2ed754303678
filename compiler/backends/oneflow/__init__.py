"""OneFlow: for GPUs that its packages know (Ampere and older) and environments that are pinned to it.

`program` makes an exported graph plain data, `operators` says what each of its operators is in OneFlow, and
`instances` has OneFlow compile it, once for each set of sizes. That happens in this process if OneFlow can be
imported here, and else in a Python that has it (`worker_process`, `serve`).
"""

from .backend import OneFlowBackend, onediff_text

__all__ = ["OneFlowBackend", "onediff_text"]
