"""Substitutes for a GPU and for CUDA graphs, and a mode that records operators."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Repeated:
    """Replays a call as a CUDA graph does: the same operators on the same addresses."""

    def __init__(self, call):
        self.call = call

    def replay(self):
        with torch.inference_mode():
            self.call()


def repeat(call, pool):
    """Satisfies `cuda_graph.Capture`."""
    call()
    return Repeated(call)


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__)
        return function(*args, **(kwargs or {}))


def on_absent_gpu(tensor):
    """Return a fake tensor that claims to be on a GPU. Most operators can be traced with it without a GPU."""
    return FakeTensor(FakeTensorMode(allow_non_fake_inputs=True), tensor.to("meta"), torch.device("cuda", 0))
