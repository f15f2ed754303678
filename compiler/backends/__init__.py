"""The compilers that can compile a region's graph.

`inductor` is the default. `inductor_fp8` is faster on some GPUs and less exact. `eager` runs the exported graph
operator by operator, as the reference in tests. `oneflow` is for GPUs and environments that Inductor does not serve.
A new backend is one package with a class that satisfies `Backend`, and one entry in `BACKENDS`.
"""

from __future__ import annotations

import torch

from ..common.torch_compat import missing
from .base import Backend
from .eager import EagerBackend
from .inductor import Float8Backend, InductorBackend
from .oneflow import OneFlowBackend

_all = (InductorBackend(), Float8Backend(), EagerBackend(), OneFlowBackend())
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _all}
AUTO, DEFAULT = "auto", "inductor"
NAMES = [AUTO, *BACKENDS]


def choose_backend(name: str, device: torch.device, only_loads: bool = False) -> tuple[Backend | None, str]:
    """Return the backend for a name and device, or None with the reason and the remedy in words.

    With `only_loads`, it may lack what compiling needs: then it comes with the reason why it only loads.
    "auto" means Inductor only. An exported graph that runs uncompiled would be slower than the original model.
    """
    chosen = BACKENDS.get(DEFAULT if name == AUTO else name)
    if chosen is None:
        return None, f"There is no backend named '{name}'; choose one of {', '.join(NAMES)}."
    reason = chosen.available(device) or missing()
    if reason and only_loads and chosen.loads(device) is None and missing() is None:
        return chosen, reason
    return (None, reason) if reason else (chosen, "")
