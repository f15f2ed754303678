"""What a ComfyUI process has once: its registry of graphs, and what is warmed up for its first compile."""

from __future__ import annotations

import logging
import os
import threading
from functools import lru_cache, partial
from pathlib import Path

from ...backends import AUTO, DEFAULT, choose_backend
from ...backends.base import Backend, GiveWay, at_once
from ...backends.cuda_warmup import load_libraries
from ...compile_cache.graph_cache import GraphCache
from ...compile_cache.worker_pool import WorkerError, Workers
from ...registry.registry import Registry
from ...storage.store import StoreError, open_store
from ...tracing.operators import register_operators
from . import comfy_compat, worker_setup
from .rules.host import HOST

log = logging.getLogger(__name__)

_registry_lock = threading.Lock()
_WARMED: set[str] = set()


def registry() -> Registry:
    """Return this ComfyUI's registry, with graphs kept in its user folder.

    The environment variable COMPILED_GRAPHS_STORE names another folder, or an fsspec URL.
    """
    with _registry_lock:  # a node and a request over HTTP may both be the first to ask
        return _only_registry()


@lru_cache(maxsize=1)
def _only_registry() -> Registry:
    try:
        store = open_store(os.environ.get("COMPILED_GRAPHS_STORE") or _default_folder())
    except StoreError as error:
        log.warning("Compiled graphs go to ComfyUI's user folder, not where COMPILED_GRAPHS_STORE says: %s", error)
        store = open_store(_default_folder())
    return Registry(GraphCache(store, workers=Workers(worker_setup.setup, HOST)))


def _default_folder() -> str:
    if user := comfy_compat.user_directory():
        return os.path.join(user, "compiled_graphs")
    models = comfy_compat.models_directory() or str(Path.home())
    return os.path.join(models, "compiled_graphs", "store")


def warm_up(backend: str = "auto", loads: bool = False) -> None:
    """Begin, in a thread, what the first compile, load and step of this process need to have in it: 2 to 6 seconds.

    `loads` says that graphs of a file are loaded soon.
    """
    backend = DEFAULT if backend == AUTO else backend
    if backend not in _WARMED:
        _WARMED.add(backend)
        work = partial(_warm_up, backend, loads=loads)
        threading.Thread(target=work, name=f"warm up {backend}", daemon=True).start()


ORDERS = 20.0
"""The warm-up waits at most this many seconds for the first order."""


def prepare_workers() -> None:
    """Have a process beside this one import what compiling for a GPU needs. Compiling for a CPU needs less."""
    workers, device = registry().cache.workers, comfy_compat.torch_device()
    if workers is not None and device.type == "cuda":
        # Whether it can compile is not asked: the answer imports for seconds, in the process that makes images.
        workers.start_template(DEFAULT, device)


def warm_up_as_before(give_way: GiveWay) -> bool:
    """Warm up the backends of the graphs that were used last, and load these graphs. Takes seconds.

    It calls `give_way` between pieces of work. Return whether there are such graphs.
    """
    cache, device = registry().cache, comfy_compat.torch_device()
    cache.renewals.give_way = give_way
    recent = cache.recent()
    for name in {graph.backend for graph in recent}:
        backend = _warm_up(name, give_way)
        _WARMED.add(name)
        if backend is not None:
            cache.preload(recent, backend, device, HOST, give_way)
    return bool(recent)


def _warm_up(name: str, give_way: GiveWay = at_once, loads: bool = False) -> Backend | None:
    """Return the backend with this name once it is warm; None if there is none here.

    Where nothing was ever compiled, workers will compile. They are started first, and this process imports when they
    have their orders. If it imported at once, the node would take 11 s instead of 6 to send them.
    """
    device = comfy_compat.torch_device()
    chosen, only_loads = choose_backend(name, device, only_loads=True)
    if chosen is None:
        return None
    workers, store = registry().cache.workers, registry().cache.store
    if workers is not None and workers.count > 1 and store is not None and not only_loads and not store.keys():
        try:
            workers.start(chosen.name, device)
        except WorkerError as error:
            log.info("No process was started ahead to compile: %s", error)
        else:
            if not loads:
                workers.has_begun.wait(ORDERS)
    register_operators()
    chosen.warm_up(give_way)
    give_way()
    load_libraries(device)
    return chosen
