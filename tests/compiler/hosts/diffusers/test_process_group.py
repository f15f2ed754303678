"""Networks whose attention runs over several processes: two of this machine, with torch's own group on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compiled_graphs.diffusers import as_operator

ROOT = Path(__file__).resolve().parents[4]
PROCESS = """
import copy, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from compiled_graphs.compiler.common.counters import totals
from compiled_graphs.diffusers import as_operator, compile_module

rank, folder, kind, world = int(sys.argv[1]), sys.argv[2], sys.argv[3], 2
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)

def gathered(x):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=2)

def over_all(q, k, v):
    return F.scaled_dot_product_attention(q, gathered(k), gathered(v))

attend = as_operator(over_all, "host_of_tests::attention") if kind == "operator" else over_all

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, 2, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(attend(q, k, v).transpose(1, 2).reshape(batch, tokens, width))

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

torch.manual_seed(0)
network = Network().eval()
reference, compiled, far = copy.deepcopy(network), compile_module(network, backend="eager"), 0.0
with torch.no_grad():
    for tokens in (8, 12, 8, 20):
        whole = torch.randn(2, world * tokens, 32, generator=torch.Generator().manual_seed(tokens))
        part = whole[:, rank * tokens : (rank + 1) * tokens]
        far = max(far, (compiled(part) - reference(part)).abs().max().item())
found = {"compiles": totals.compiles, "calls": totals.calls, "checks": totals.verifications, "differs": far,
         "reasons": [str(reason) for reason in totals.eager_calls]}
print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)  # something keeps gloo's threads; Python's own exit sometimes aborted while they let go of tensors
"""


@pytest.fixture
def in_two_processes(tmp_path):
    def run(kind):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")]),
            "COMPILED_GRAPHS_STORE": str(tmp_path / "store"),
            "OMP_NUM_THREADS": "1",
        }
        commands = [[sys.executable, "-c", PROCESS, str(rank), str(tmp_path), kind] for rank in range(2)]
        processes = [
            subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for command in commands
        ]
        texts = [process.communicate(timeout=300)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        return [json.loads(text.splitlines()[-1]) for text in texts]

    return run


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_attention_over_processes_runs_inside_graphs_as_an_operator(in_two_processes):
    found = in_two_processes("operator")
    for each in found:
        assert each["differs"] < 1e-5
        assert each["reasons"] == []
        assert each["calls"] == 12
        assert each["checks"] > 0
    first, second = (each["checks"] for each in found)
    assert first == second  # a check calls the operator once more, and each process waits for the other
    graphs = sum(each["compiles"] for each in found)
    assert graphs == first  # over both processes each graph is compiled once


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
def test_attention_over_processes_in_a_blocks_own_code_stays_uncompiled_and_says_why(in_two_processes):
    for each in in_two_processes("in the code"):
        assert each["differs"] == 0
        assert each["compiles"] == 0
        assert all("exchanges data with other processes by itself" in reason for reason in each["reasons"])
        assert each["reasons"]


def test_an_operator_returns_what_its_function_does_and_may_return_its_input():
    doubled = as_operator(lambda x, y: (x * 2 + y).transpose(0, 1), "host_of_tests::doubled",
                          lambda x, y: x.new_empty(x.shape[1], x.shape[0]))  # fmt: skip
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(doubled(x, y), (x * 2 + y).T)
    same = as_operator(lambda x: x, "host_of_tests::same")
    assert same(x).data_ptr() != x.data_ptr()
    torch.testing.assert_close(same(x), x)


@pytest.mark.parametrize("name", ["attention", "a::b::c", "::attention", "my ext::attention"])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ValueError, match="NAMESPACE::OPERATOR"):
        as_operator(lambda x: x, name)
