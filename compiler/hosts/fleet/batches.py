"""Batches over a cluster: prompts over pipelines of diffusers, and workflows over ComfyUI servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import ray_workers
from .ray_workers import PipelineActor, Recipe, ServerActor
from .servers import Launch, servers_at
from .spread import OnProgress, Outcome, Progress, Spread, Worker, log_progress

Prompt = str | Mapping[str, Any]
"""A prompt, or all arguments of a pipeline's call, and a `seed` besides."""


def run_prompt(pipe: Any, prompt: Prompt) -> Any:
    """Call a pipeline; return its images, or its frames.

    A `seed` makes the same image on every worker: its numbers are drawn on the CPU.
    """
    arguments = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    if (seed := arguments.pop("seed", None)) is not None:
        arguments["generator"] = torch.Generator().manual_seed(seed)
    made = pipe(**arguments)
    return getattr(made, "images", None) if hasattr(made, "images") else getattr(made, "frames", made)


def map_prompts(
    make_pipe: Callable[[], Any],
    prompts: Iterable[Prompt],
    *,
    store: str,
    trust: str = "",
    workers: int | None = None,
    call: Callable[[Any, Prompt], Any] = run_prompt,
    backend: str = "auto",
    limit: float | None = None,
    on_progress: OnProgress = log_progress,
) -> Iterator[Outcome]:
    """Map prompts over the workers of a Ray cluster; return an iterator over their outcomes, in order.

    Each worker is a process with the pipeline that `make_pipe` returns, compiled, on a GPU of its own, or on the CPU of
    a cluster without GPUs. `store` is a folder that all machines see, or a URL: over the whole cluster each graph is
    compiled once. `trust` is the folder with the key that the machines share, by default each machine's own
    (`docs/fleet.md`). `call` gets the pipeline and a prompt. What a worker is lost with, or has not done after `limit`
    seconds, another one does. An outcome has the result or why there is none.

    Raises ImportError without Ray, DifferentVersions if machines of the cluster have different versions of torch, CUDA,
    Triton or Python, and Lost if a worker does not start.
    """
    environment = {"COMPILED_GRAPHS_STORE": store} | ({"COMPILED_GRAPHS_TRUST": trust} if trust else {})
    recipe = Recipe(PipelineActor, (make_pipe, call, backend), environment, ray_workers.gpus_each(), limit)
    return _outcomes(prompts, ray_workers.start(recipe, workers), on_progress)


def map_workflows(
    workflows: Iterable[Mapping[str, Any]],
    servers: Sequence[str] = (),
    *,
    launch: Launch | None = None,
    workers: int | None = None,
    limit: float | None = None,
    on_progress: OnProgress = log_progress,
) -> Iterator[Outcome]:
    """Map workflows in API format over ComfyUI servers; return an iterator over their outcomes, in order.

    `servers` are addresses such as "http://10.0.0.5:8188". With `launch`, Ray starts servers, one for each GPU of its
    cluster or as many as `workers` says, and they end with this. Each server has this extension, and one that has not
    is not used. A workflow that a server refuses or loses, or has not done after `limit` seconds, is tried on another
    one. The result of an outcome is a `WorkflowResult`.

    Raises ValueError if there is no server to ask, Lost if none can be used, and what `map_prompts` raises for Ray.
    """
    if not servers and launch is None:
        raise ValueError("there is no server: pass addresses, or how to start one (launch=Launch(...))")
    found: list[Worker] = [*servers_at(servers, limit, lambda said: on_progress(Progress(0, 0, 0, 0.0, said)))]
    if launch is not None:
        recipe = Recipe(ServerActor, (launch, limit), dict(launch.environment), ray_workers.gpus_each(), None)
        found += ray_workers.start(recipe, workers)
    return _outcomes(workflows, found, on_progress)


def _outcomes(items: Iterable[Any], workers: Sequence[Worker], on_progress: OnProgress) -> Iterator[Outcome]:
    spread = Spread(items, workers, on_progress)
    try:
        yield from spread
    finally:
        for worker in spread.workers():
            worker.close()
