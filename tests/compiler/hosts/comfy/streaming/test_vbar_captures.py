"""Captures while ComfyUI's library for streamed weights wants memory back: the real library, on a GPU.

In a process of its own, since a process does not survive such a capture that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import compiled_graphs
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SCRIPT = """
import torch
from comfy_aimdo import control

number = torch.zeros(2**26, device="cuda")
assert control.init() and control.init_devices([0])  # before model_vbar is imported
import comfy.memory_management
from comfy_aimdo import model_vbar
from compiled_graphs.compiler.hosts.comfy.streaming import vbar_places
from compiled_graphs.compiler.runtime.cuda_graph import capture_on_gpu

comfy.memory_management.aimdo_enabled = True
places = [model_vbar.ModelVBAR(2**31, 0).alloc(2**29) for _ in range(2)]
for place in places:
    assert model_vbar.vbar_fault(place) is not None
    model_vbar.vbar_unpin(place)
total = torch.cuda.mem_get_info()[1]
control.lib.set_simple_vram_headroom(total - control.get_total_vram_usage() - 2**26)

def call():
    number.add_(1).mul_(torch.ones_like(number))

with CONTEXT:
    graph = capture_on_gpu(call, torch.cuda.graph_pool_handle())
resident = [vbar_places.is_resident(place) for place in places]
graph.replay()
torch.cuda.synchronize()
print("resident", resident, "number", number[0].item())
call()
print("resident", [vbar_places.is_resident(place) for place in places], "number", number[0].item())
"""


@pytest.fixture
def run():
    for name in ("comfy_aimdo.control", "comfy.memory_management"):
        pytest.importorskip(name)

    def run(context):
        package = Path(compiled_graphs.__file__).parents[1]
        path = os.pathsep.join([os.environ.get("COMFYUI_PATH", ""), str(package), *sys.path])
        options = {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
        command = [sys.executable, "-c", SCRIPT.replace("CONTEXT", context)]
        return subprocess.run(command, env=os.environ | options, capture_output=True, text=True, timeout=300)

    return run


def test_a_capture_takes_no_pages_and_an_allocation_after_it_does(run):
    ran = run("vbar_places.without_evictions()")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-2:] == [
        "resident [True, True] number 1.0",
        "resident [False, True] number 2.0",
    ]


def test_without_the_limits_it_would_not_be_as_before(run):
    ran = run("__import__('contextlib').nullcontext()")
    assert ran.returncode != 0 or "resident [True, True] number 1.0" not in ran.stdout
