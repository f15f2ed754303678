"""Prompts over a real Ray cluster of this machine: two processes, each with a pipeline of diffusers' own classes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install compiled-graphs[ray]")
pytest.importorskip("diffusers")

import ray
from compiled_graphs.compiler.hosts.fleet.ray_workers import RayWorker, Recipe
from compiled_graphs.fleet import DifferentVersions, Lost, map_prompts

ROOT = Path(__file__).resolve().parents[4]
EXAMPLES = str(ROOT / "diffusers_examples")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    paths = os.pathsep.join([str(ROOT.parent), EXAMPLES, os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("driver"))  # Ray's workers import from the driver's folder
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment}
    )
    yield
    ray.shutdown()
    os.chdir(folder)
    os.environ.pop("RAY_USAGE_STATS_ENABLED") if before is None else os.environ.update(RAY_USAGE_STATS_ENABLED=before)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store and a key, which are cold for the first test only."""
    return {"store": str(tmp_path_factory.mktemp("store")), "trust": str(tmp_path_factory.mktemp("trust"))}


@pytest.fixture
def told():
    return []


def make():
    """Return what makes the pipeline in a worker. A function inside of another one travels by its code."""

    def make_pipe():
        import pipelines
        import torch

        torch.set_num_threads(1)
        pipe = pipelines.sd15()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make_pipe


def calling(kill_at=None, mark="", fail_at=None):
    """Return a call that gives the image, and what its process has compiled and loaded.

    The first process that comes to the item `kill_at` ends there, and the item `fail_at` always fails.
    """

    def call(pipe, item):
        import os

        import torch
        from compiled_graphs.compiler.common.counters import totals

        if item == kill_at and not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(1)
        if item == fail_at:
            raise ValueError("no such size")
        embeds = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(item))
        made = pipe(prompt_embeds=embeds, negative_prompt_embeds=embeds, height=64, width=64, num_inference_steps=1,
                    output_type="pt", generator=torch.Generator().manual_seed(item))  # fmt: skip
        return made.images, os.getpid(), totals.compiles, totals.from_disk, dict(totals.eager_calls)

    return call


def mapped(items, shared, told, call, **options):
    outcomes = map_prompts(make(), items, call=call, backend="eager", on_progress=told.append, workers=2,
                           **shared, **options)  # fmt: skip
    return list(outcomes)


def results(outcomes):
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    assert [outcome.index for outcome in outcomes] == list(range(len(outcomes)))
    return [outcome.result for outcome in outcomes]


def expected(items):
    sys.path.insert(0, EXAMPLES)
    try:
        pipe = make()()
    finally:
        sys.path.remove(EXAMPLES)
    return [calling()(pipe, item)[0] for item in items]


def most(found, place):
    """Return the last count of each process, in sum."""
    by_process = {}
    for result in found:
        by_process[result[1]] = max(by_process.get(result[1], 0), result[place])
    return sum(by_process.values())


def test_over_the_cluster_each_graph_is_compiled_once_and_results_are_right(shared, told):
    found = results(mapped(range(6), shared, told, calling()))
    graphs = len(list(Path(shared["store"]).glob("*.graph.safetensors")))
    assert len({result[1] for result in found}) == 2
    assert most(found, 2) == graphs > 0
    assert not any(result[4] for result in found)
    for image, right in zip([result[0] for result in found], expected(range(6)), strict=True):
        assert (image - right).norm() <= 1e-4 * right.norm()
    assert "6 of 6 done, 2 working" in str(told[-1])


def test_a_killed_workers_prompt_is_done_by_another_with_graphs_from_the_store(shared, told, tmp_path):
    mark = tmp_path / "killed"
    outcomes = mapped(range(5), shared, told, calling(kill_at=1, mark=str(mark), fail_at=3))
    failed = outcomes.pop(3)
    assert "no such size" in failed.error  # its own: nobody else tries it
    assert not failed.attempts
    assert [outcome.error for outcome in outcomes] == [""] * 4
    found = [outcome.result for outcome in outcomes]
    assert most(found, 2) == 0
    assert all(result[3] > 0 for result in found)
    assert "its process ended" in outcomes[1].attempts[0]
    said = [str(progress) for progress in told]
    assert any("is lost: its process ended" in line and "Item 2 is tried elsewhere" in line for line in said)


class Sleeper:
    """Stands for an actor that never answers."""

    def __init__(self):
        pass

    def open(self):
        import types

        return types.SimpleNamespace(host="here")

    def run(self, item):
        import time

        time.sleep(3600)

    def close(self):
        pass


def test_a_worker_that_takes_too_long_is_given_up():
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        worker = RayWorker(Recipe(Sleeper, (), {}, gpus=0.0, limit=1.0), place=0)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    worker.wait()
    assert worker.name == "worker 1 on here"
    with pytest.raises(Lost, match="it took more than 1 s"):
        worker.run(0)
    with pytest.raises(Lost, match="its process ended"):
        worker.run(0)
    worker.close()


def test_two_versions_of_torch_in_one_cluster_are_refused_by_name(shared, told, tmp_path):
    mark = tmp_path / "first"
    make_pipe = make()

    def with_another_torch():
        import torch

        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # whoever comes first
        except FileExistsError:
            torch.__version__ = "2.8.0"
        return make_pipe()

    with pytest.raises(DifferentVersions, match=r"worker \d on .+ has torch .* instead of"):
        map_prompts(with_another_torch, [0], workers=2, backend="eager", **shared)
