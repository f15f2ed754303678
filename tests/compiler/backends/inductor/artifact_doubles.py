"""Doubles of what Inductor has in an artifact for a GPU, as far as it is read here, in bytes of torch's format."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from compiled_graphs.compiler.common import torch_compat

KERNEL = """
import triton
@triton_heuristics.pointwise(
    triton_meta={'signature': {'in_ptr0': '*fp32'}, 'device': DeviceProperties(type='cuda', index=0, cc=90), 'constants': {}},
)
@triton.jit
def triton_poi_fused_add_0(in_ptr0, xnumel):
    xindex = tl.arange(0, 16)
"""  # noqa: E501
SOURCE = f"""
# %x : Tensor "f32[s77, 8][8, 1]cuda:0" = PlaceHolder[target=x]
kernel = async_compile.triton('triton_poi_fused_add_0', '''{KERNEL}''', device_str='cuda')

def call(args):
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((s77, 8), (8, 1), torch.float32)
        stream0 = get_raw_stream(0)
        kernel.run(arg0_1, buf0, 8*s77, stream=stream0)
        buf1 = torch.ops.aten.full.default([8], 1, device=device(type='cuda', index=0))
"""


class Properties(NamedTuple):
    type: str
    index: int


@dataclass
class Kernel:
    triton_meta: dict = field(default_factory=lambda: {"device": 0})
    device_props: Properties = field(default_factory=lambda: Properties("cuda", 0))
    compile_results: list = field(default_factory=lambda: [SimpleNamespace(compile_meta={"device": 0})])
    filename: str | None = None
    save_cache_hook: Callable | None = None


@dataclass(frozen=True)
class Launcher:
    cache_key: str
    kernel: Kernel


@dataclass(frozen=True)
class KernelFiles:
    device: int


@dataclass(frozen=True)
class Bundle:
    kernel_artifacts: list
    static_autotuners: list


@dataclass
class Graph:
    """What Inductor has in an artifact, as far as it is read here."""

    source_code: str = SOURCE
    cache_key: str = "cabc"
    device_idxs: set = field(default_factory=lambda: {0})
    constants: dict = field(default_factory=dict)
    _triton_bundle: Bundle | None = None


@dataclass
class Result:
    compiled_fw: SimpleNamespace


def artifact(graph):
    writer = torch_compat.BytesWriter.get()()
    content = Result(SimpleNamespace(result=graph)), {}, {}
    for part in (b"AOTCompiledArtifact", b"version", pickle.dumps(content)):
        writer.write_bytes(part)
    return writer.to_bytes()


def graph_in(data):
    reader = torch_compat.BytesReader.get()(data)
    header, version = reader.read_bytes(), reader.read_bytes()
    assert (header, version) == (b"AOTCompiledArtifact", b"version")
    return pickle.loads(reader.read_bytes())[0].compiled_fw.result
