"""Workers that are actors of a Ray cluster: a compiled pipeline, or a ComfyUI server, in a process of its own each.

Ray is an optional dependency, imported when it is asked for. Its actors hold what classes of this module make.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...common.errors import one_line
from .servers import Launch, Started, WorkflowResult
from .spread import Lost

START_LIMIT = 900.0
"""Seconds that a worker may take to be placed, and to load its model."""
CLOSE_LIMIT = 60.0


class DifferentVersions(ValueError):
    """Workers of one cluster whose graphs are not the same. The message names each."""


@dataclass(frozen=True)
class Facts:
    """What a worker runs on."""

    host: str
    torch: str
    cuda: str
    triton: str
    python: str

    @classmethod
    def here(cls) -> Facts:
        """Return those of this process."""
        try:
            import triton

            version = triton.__version__
        except ImportError:
            version = "none"
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(platform.node(), str(torch.__version__), torch.version.cuda or "none", version, python)

    def versions(self) -> dict[str, str]:
        """Return what must be the same in all workers, by name."""
        return {name: value for name, value in asdict(self).items() if name != "host"}


class PipelineActor:
    """A pipeline of diffusers with compiled blocks, in a process of its own."""

    def __init__(self, make_pipe: Callable[[], Any], call: Callable[[Any, Any], Any], backend: str) -> None:
        self._make, self._call, self._backend = make_pipe, call, backend
        self._pipe: Any = None

    def open(self) -> Facts:
        """Load the pipeline; return what this process runs on. Of what `__init__` raises, Ray tells little."""
        from ..diffusers.pipeline import compile_pipe

        pipe = self._make()
        if torch.cuda.is_available() and hasattr(pipe, "to"):
            pipe = pipe.to("cuda")
        self._pipe = compile_pipe(pipe, backend=self._backend)
        return Facts.here()

    def run(self, item: Any) -> Any:
        """Return what the call makes of an item."""
        return self._call(self._pipe, item)

    def close(self) -> None:
        """Nothing outlasts the process."""


class ServerActor:
    """A headless ComfyUI server, started beside this process on the same machine."""

    def __init__(self, launch: Launch, limit: float | None) -> None:
        self._launch, self._limit = launch, limit
        self._started: Started | None = None

    def open(self) -> Facts:
        """Start the server; return what this process runs on. The server may have a Python of its own."""
        self._started = Started(self._launch, self._limit)
        return Facts.here()

    def run(self, item: Mapping[str, Any]) -> WorkflowResult:
        """Run a workflow in API format. Raises Lost or Refused."""
        return self._started.run(item)

    def close(self) -> None:
        """End the server."""
        if self._started is not None:
            self._started.close()


@dataclass(frozen=True)
class Recipe:
    """How the actors of one kind are made."""

    cls: type
    arguments: tuple
    environment: Mapping[str, str]
    gpus: float
    limit: float | None
    """Seconds that an item may take."""


class RayWorker:
    """An actor of a Ray cluster. Satisfies `spread.Worker`."""

    def __init__(self, recipe: Recipe, place: int, turn: int = 0, like: Facts | None = None) -> None:
        """Ask for an actor; `like` is what the others run on. `wait` until it is there."""
        ray = _ray()
        self.name = f"worker {place + 1}" + (f".{turn}" if turn else "")
        self._recipe, self._place, self._turn, self._like = recipe, place, turn, like
        options = {"num_gpus": recipe.gpus} if recipe.gpus else {"num_cpus": 1}
        remote = ray.remote(max_restarts=0, runtime_env={"env_vars": dict(recipe.environment)}, **options)(recipe.cls)
        self._actor = remote.remote(*recipe.arguments)
        self._facts = self._actor.open.remote()

    def wait(self) -> Facts:
        """Return what it runs on once it is there. Raises Lost if it does not start."""
        facts = self._get(self._facts, START_LIMIT)
        self.name = f"{self.name.partition(' on ')[0]} on {facts.host}"
        return facts

    def use_with(self, like: Facts) -> None:
        """Say what the other workers run on: what takes this one's place must be like them."""
        self._like = like

    def run(self, item: Any) -> Any:
        """Have an item done. Raises Lost, Refused, or what the item raises."""
        return self._get(self._actor.run.remote(item), self._recipe.limit)

    def replaced(self) -> RayWorker:
        """Return another actor in its place, once it is there. Raises Lost if it cannot be."""
        found = RayWorker(self._recipe, self._place, self._turn + 1, self._like)
        facts = found.wait()
        if self._like is not None and facts.versions() != self._like.versions():
            found.close()
            raise Lost(f"{found.name} has {_difference(facts, self._like)}")
        return found

    def close(self) -> None:
        """End the actor."""
        ray = _ray()
        with suppress(Exception):  # it may have gone
            ray.get(self._actor.close.remote(), timeout=CLOSE_LIMIT)
        self._kill()

    def _kill(self) -> None:
        with suppress(Exception):
            _ray().kill(self._actor)

    def _get(self, reference: Any, limit: float | None) -> Any:
        ray = _ray()
        try:
            return ray.get(reference, timeout=limit)
        except ray.exceptions.GetTimeoutError:
            self._kill()
            raise Lost(f"it took more than {limit:g} s") from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, Lost):
                self._kill()
            raise cause from None
        except ray.exceptions.RayActorError as error:
            raise Lost(f"its process ended ({one_line(error)})") from None
        except ray.exceptions.RayError as error:
            self._kill()
            raise Lost(one_line(error)) from None


def start(recipe: Recipe, count: int | None) -> list[RayWorker]:
    """Start workers, by default one for each GPU of the cluster, or for each machine if it has none.

    Raises DifferentVersions if their graphs are not the same, and Lost if one does not start.
    """
    workers = [RayWorker(recipe, place) for place in range(_count(count))]
    try:
        facts = {worker: worker.wait() for worker in workers}
        first = facts[workers[0]]
        odd = [worker for worker in workers if facts[worker].versions() != first.versions()]
        if odd:
            named = "; ".join(f"{worker.name} has {_difference(facts[worker], first)}" for worker in odd)
            raise DifferentVersions(
                f"the workers do not make the same graphs: {named}; {workers[0].name} is the first. "
                "Install the same versions on all machines."
            )
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    for worker in workers:
        worker.use_with(first)
    return workers


def gpus_each() -> float:
    """Return how many GPUs a worker takes: one if the cluster has any."""
    return 1.0 if _resources().get("GPU", 0) >= 1 else 0.0


def _count(count: int | None) -> int:
    if count is not None:
        if count < 1:
            raise ValueError(f"{count} workers do nothing: ask for at least 1")
        return count
    machines = sum(node["Alive"] for node in _ray().nodes())
    return int(_resources().get("GPU", 0)) or machines


def _resources() -> Mapping[str, float]:
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    return ray.cluster_resources()


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ImportError("this needs Ray: pip install compiled-graphs[ray]") from None
    return ray


def _difference(facts: Facts, other: Facts) -> str:
    theirs, ours = facts.versions(), other.versions()
    return ", ".join(f"{name} {theirs[name]} instead of {ours[name]}" for name in theirs if theirs[name] != ours[name])
