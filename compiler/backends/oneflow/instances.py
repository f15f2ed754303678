"""Exported programs as OneFlow graphs: one graph for each set of sizes, within a memory limit.

OneFlow compiles for fixed sizes and fixed weights, so a program has one instance for every set of sizes that it met.
All instances read the same buffers. Before each call the weights of the called region are copied into them: a program
serves many regions, and nobody tells it when weights change.

OneFlow 0.9.0 frees the memory of a graph only when its whole session is reset, not when the graph is deleted. So once
the instances exceed their limit, the session is reset and the least recently used instances are dropped. The others
are opened again from their compiled jobs at their next call. This module imports no torch (see `operators`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import time
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .operators import OPERATORS, flow

MOST = 256
"""Instances at a time. SDXL's UNet has some twenty for each image size and batch size."""
SHARE = 4
"""By default, instances may take this fraction of the memory: a quarter of it."""
MOST_BUILDS, SECONDS = 3, 60.0
"""An instance may be made three times in 60 seconds. If that is not enough, those in use do not fit at once."""

PAUSE = 512
"""Width of an extra matrix product in every graph on a CPU: some milliseconds of work. OneFlow 0.9.0 records that a
graph runs only after starting it. If the graph ends before that, OneFlow's queue is corrupted and it hangs or crashes.
"""

_PROGRAM, _INDEX = "program.json", "jobs.json"
_ENDS = ("inputs", "weights", "outputs", "results")


class NoRoom(Exception):
    """The instances in use at once take more memory than they may."""


class Program:
    """An exported graph as plain data (`program.portable` writes it)."""

    def __init__(self, text: bytes) -> None:
        fields = json.loads(text)
        self.text = text
        self.weights: int = len(fields["weights"])
        """How many inputs are weights. They come first."""
        self.state: list[Any] | None = None
        """The buffers of the weights. None while the program has no instances."""
        self._inputs: list[str] = fields["inputs"]
        self._nodes: list[list[Any]] = fields["nodes"]
        self._results: list[Any] = fields["results"]
        self.results = len(self._results)

    def run(self, tensors: list[Any], device: str) -> tuple[Any, ...]:
        """Apply OneFlow's operators to OneFlow's tensors. Raises KeyError with the name of a missing operator."""
        values = dict(zip(self._inputs, tensors))
        for name, target, args, kwargs in self._nodes:
            arguments = [_decode(value, values, device) for value in args]
            values[name] = OPERATORS[target](
                *arguments, **{key: _decode(value, values, device) for key, value in kwargs.items()}
            )
        seen = list(tensors)
        results = []
        for reference in self._results:
            value = _decode(reference, values, device)
            # OneFlow requires that a graph's results are new tensors, each of them only once.
            results.append(flow._C.identity(value) if any(value is other for other in seen) else value)
            seen.append(value)
        return tuple(results)


def _decode(value: Any, values: dict[str, Any], device: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, values, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return values[content]
    if kind == "dtype":
        return getattr(flow, content)
    return device if kind == "device" else float(content)


@dataclass(frozen=True)
class Job:
    """A graph that OneFlow has compiled, as bytes, with the names of its inputs, weights and outputs."""

    data: bytes
    inputs: list[str]
    weights: list[str]
    outputs: list[str]
    results: list[list[Any]]
    """Shape and dtype of each result."""


@dataclass
class _Instance:
    job: Job | None
    run: Callable[[list[Any]], list[Any]] | None = None
    """None before the first call, and after a reset until the next call."""
    size: int = 0
    """Bytes that OneFlow allocated for it."""


class Instances:
    """The instances of all programs on one device. Only one thread may use it at a time."""

    def __init__(
        self,
        device: str,
        memory: int | None = None,
        most: int = MOST,
        on_unused: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`memory` is the limit in bytes. Without it, the limit is a quarter of the machine's or the GPU's memory.

        `on_unused` is called with the name of a program whose weights no instance reads any more.
        """
        self._on_unused = on_unused
        self._device = device
        self._memory = memory or _all_memory(device) // SHARE
        self._most = most
        self._programs: dict[str, Program] = {}
        self._instances: OrderedDict[tuple, _Instance] = OrderedDict()
        """By program and sizes. The least recently used comes first."""
        self._made: dict[tuple, list[float]] = {}
        """Times at which instances were made, including those that have been dropped."""
        self.built = 0
        self.resets = 0
        _all_instances.add(self)
        importlib.import_module("oneflow")  # its own exit handler ends its session, and must run after ours
        atexit.register(_close_all)

    def add(self, name: str, data: bytes) -> None:
        """Add a program and the compiled jobs in `data` under a name."""
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self._programs[name] = Program(archive.read(_PROGRAM))
            for number, fields in enumerate(json.loads(archive.read(_INDEX))):
                sizes = tuple((dtype, tuple(shape)) for dtype, shape in fields.pop("sizes"))
                job = Job(archive.read(f"{number}.job"), **fields)
                self._instances.setdefault((name, sizes), _Instance(job))

    def knows(self, name: str) -> bool:
        """Whether there is a program of this name."""
        return name in self._programs

    def data(self, name: str) -> bytes:
        """Return a program and the jobs compiled for it so far, as `add` takes them."""
        jobs = [(sizes, i.job) for (program, sizes), i in self._instances.items() if program == name and i.job]
        return pack(self._programs[name].text, jobs)

    def run(self, name: str, tensors: list[Any], in_place: bool = False) -> list[Any]:
        """Compute the results for these weights and inputs. Each result has memory of its own.

        `in_place` says that the weights have the same addresses in every call. Then they serve as the buffers
        themselves. Raises NoRoom, and what OneFlow raises.
        """
        program = self._programs[name]
        weights, inputs = tensors[: program.weights], tensors[program.weights :]
        key = name, tuple((_dtype_name(t.dtype), tuple(t.shape)) for t in inputs)
        with flow.no_grad():
            if program.state is None:
                program.state = weights if in_place else [flow.empty_like(t, device=self._device) for t in weights]
                if self._device == "cpu":
                    program.state = [*program.state, flow.ones(PAUSE, PAUSE)]
            if not in_place:
                for buffer, weight in zip(program.state, weights):
                    buffer.copy_(weight)
            instance = self._instances.get(key)
            if instance is None or instance.run is None:
                instance = self._make(key, instance, program, inputs)
            results = instance.run(inputs)[: program.results]
        flow._oneflow_internal.eager.Sync()  # OneFlow works asynchronously, on a CPU too
        self._instances.move_to_end(key)
        self._forget_surplus()
        return results

    def _make(self, key: tuple, instance: _Instance | None, program: Program, inputs: list[Any]) -> _Instance:
        now = time.monotonic()
        recently = [made for made in self._made.get(key, []) if made > now - SECONDS]
        if len(recently) >= MOST_BUILDS:
            raise NoRoom(
                f"OneFlow's graphs do not fit into {self._memory / 2**30:.1f} GiB: "
                "COMPILED_GRAPHS_ONEFLOW_MEMORY sets how many they may take"
            )
        if self._is_full() and _others_use_oneflow():
            raise NoRoom("OneFlow's graphs have no room left, and OneFlow cannot free any while other code uses it")
        self._made[key] = [*recently, now]
        before = _used_memory(self._device)
        instance = instance or _Instance(None)
        if instance.job is not None:
            with suppress(Exception):  # another build made the job; the program can be compiled again
                instance.run = _open(instance.job, program.state, inputs, self._device)
        if instance.run is None:
            instance.run, instance.job = _build(program, inputs, self._device)
            self.built += 1
        instance.run(inputs)  # the system commits memory when it is first written
        flow._oneflow_internal.eager.Sync()
        instance.size = max(_used_memory(self._device) - before, _bytes_of(inputs))
        self._instances[key] = instance
        return instance

    def _is_full(self) -> bool:
        sizes = [instance.size for instance in self._instances.values() if instance.run is not None]
        return len(sizes) > self._most or sum(sizes) > self._memory

    def _forget_surplus(self) -> None:
        if not self._is_full() or _others_use_oneflow():
            return
        _reset()
        made = sorted(self._made.items(), key=lambda item: item[1][-1])[-2 * self._most :]
        self._made = dict(made)
        kept, size = 0, 0
        for instance in reversed(self._instances.values()):
            size += instance.size
            if kept and (size > self._memory // 2 or kept >= self._most // 2):
                break
            kept += 1
        while len(self._instances) > kept:
            self._instances.popitem(last=False)
        in_use = {name for name, _ in self._instances}
        for name, program in self._programs.items():
            if name not in in_use and program.state is not None:
                program.state = None
                self._on_unused(name)
        self.resets += 1

    def close(self) -> None:
        """Drop all graphs. A graph is opened again when it is called."""
        for instance in self._instances.values():
            instance.run = None


_all_instances: weakref.WeakSet[Instances] = weakref.WeakSet()


def _close_all() -> None:
    """Drop the graphs of all devices. OneFlow kills the process, or hangs, if its session ends while graphs exist."""
    for instances in _all_instances:
        instances.close()
    gc.collect()


def _reset() -> None:
    """Have OneFlow free the memory of all its graphs."""
    from oneflow.framework.session_context import GetDefaultSession

    _close_all()
    GetDefaultSession().Reset()
    with suppress(OSError, AttributeError):  # without glibc, the system gets freed memory back later
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def pack(program: bytes, jobs: list[tuple[tuple, Job]] = ()) -> bytes:
    """Return an archive of a program and its compiled jobs, each of which comes with its sizes."""
    jobs = sorted(jobs, key=lambda item: repr(item[0]))
    index = [{"sizes": sizes, **{f: getattr(job, f) for f in _ENDS}} for sizes, job in jobs]
    files = {_PROGRAM: program, _INDEX: json.dumps(index).encode()}
    files.update({f"{number}.job": job.data for number, (_, job) in enumerate(jobs)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():  # no time stamps: equal programs make equal bytes
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def memory_limit() -> int | None:
    """Return the bytes that COMPILED_GRAPHS_ONEFLOW_MEMORY (in GiB) allows, or None if it is not set to a number."""
    try:
        return int(float(os.environ["COMPILED_GRAPHS_ONEFLOW_MEMORY"]) * 2**30)
    except (KeyError, ValueError):
        return None


def _build(program: Program, inputs: list[Any], device: str) -> tuple[Callable, Job | None]:
    """Have OneFlow trace and compile a program for these inputs' sizes."""

    class Region(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, buffer in enumerate(program.state):
                self.register_buffer(f"w{number}", buffer)

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            weights = [getattr(self, f"w{number}") for number in range(len(program.state))]
            results = program.run([*weights[: program.weights], *tensors], device)
            pauses = weights[program.weights :]
            return (*results, *(flow.sum(flow.matmul(pause, pause)) for pause in pauses))

    class CompiledGraphs(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.region = Region().eval()

        def build(self, *tensors: Any) -> tuple[Any, ...]:
            return self.region(*tensors)

    graph = CompiledGraphs()
    results = graph(*inputs)
    flow._oneflow_internal.eager.Sync()
    with suppress(AttributeError):  # another OneFlow may keep its jobs elsewhere; then each process builds anew
        return lambda tensors: list(graph(*tensors)), _job(graph, results)
    return lambda tensors: list(graph(*tensors)), None


def _job(graph: Any, results: tuple[Any, ...]) -> Job:
    proto = graph._full_job_proto
    return Job(
        proto.SerializeToString(),
        _names(proto, "input_conf"),
        _names(proto, "variable_conf"),
        _names(proto, "output_conf"),
        [[list(t.shape), _dtype_name(t.dtype)] for t in results],
    )


def _names(job: Any, kind: str) -> list[str]:
    return [op.name for op in job.net.op if op.HasField(kind)]


def _open(job: Job, weights: list[Any], inputs: list[Any], device: str) -> Callable:
    """Return a function that runs a compiled job. It does what `oneflow.nn.Graph` does, but without tracing."""
    from oneflow.core.job import job_pb2
    from oneflow.framework import graph_build_util
    from oneflow.framework.session_context import GetDefaultSession
    from oneflow.framework.tensor_tuple_util import convert_to_tensor_tuple
    from oneflow.nn.graph.graph_config import GraphConfig

    internal = flow._oneflow_internal
    session, config, proto = GetDefaultSession(), GraphConfig(), job_pb2.Job()
    session.TryInit()
    _opened_jobs.append(None)
    config.proto.job_name = f"CompiledGraphsOpened_{len(_opened_jobs)}"
    proto.ParseFromString(job.data)
    proto.job_conf.job_name = config.proto.job_name
    with graph_build_util.graph_build_context(config.proto, session):
        scope = internal.GetCurrentScope().symbol_id
        for op in proto.net.op:
            if op.HasField("scope_symbol_id"):  # scopes are numbered anew in each process
                op.scope_symbol_id = scope
        number = internal.JobBuildAndInferCtx_GetCurrentJobId()
        graph = internal.nn.graph.CNNGraph(
            config.proto.job_name, proto.SerializeToString(), number, session._session_ctx
        )
    # The name of a variable ends with its index. Unused weights have no variable.
    state = convert_to_tensor_tuple([weights[int(name.rpartition(".w")[2])] for name in job.weights])
    buffers = convert_to_tensor_tuple(
        [flow.empty(tuple(shape), dtype=getattr(flow, dtype), device=device) for shape, dtype in job.results]
    )
    graph.register_input_op_names_and_tensors(job.inputs, convert_to_tensor_tuple(inputs))
    internal.nn.graph.SoftSyncNNGraphBuffers(buffers, graph)
    graph.register_output_op_names_and_tensors(job.outputs, buffers)
    graph.register_variable_op_names_and_tensors(job.weights, state)
    internal.FillVariableTensorMgr(job.weights, state)
    internal.eager.Sync()
    graph.complie_and_init_runtime()

    def run(tensors: list[Any]) -> list[Any]:
        contiguous = convert_to_tensor_tuple([t.contiguous() for t in tensors])
        internal.nn.graph.RunLazyNNGraph(contiguous, buffers, state, graph)
        results = [buffer.clone() for buffer in buffers]
        internal.nn.graph.SoftSyncNNGraphBuffers(buffers, graph)
        return results

    return run


_opened_jobs: list[None] = []
"""One entry per opened job: the count makes their names differ."""


def _others_use_oneflow() -> bool:
    """Whether other code has graphs in this process. A reset of the session would break them."""
    return any(not name.startswith("CompiledGraphs") for name in flow.nn.Graph._child_init_cnt)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def _bytes_of(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _used_memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(flow._oneflow_internal.GetCUDAMemoryUsed()) * 2**20
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _all_memory(device: str) -> int:
    if device.startswith("cuda"):
        return int(flow.cuda.get_device_properties(flow.device(device)).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
