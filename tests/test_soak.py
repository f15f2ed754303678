"""The prompts of benchmarks/soak.py and its count of faults. No server starts here."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import numpy
import pytest

pytest.importorskip("psutil", reason="memory is measured with psutil, which ComfyUI brings")
PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "soak.py"
NUMBERS = range(1, 200)


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", PATH)
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    kept = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = kept
    yield module
    del sys.modules["soak"]


@pytest.fixture(scope="module")
def known(soak):
    """Return the nodes of a ComfyUI that has every node of the rows."""
    return {name for row in soak.ROWS for name in (row.name, *row.needs)}


@pytest.fixture(scope="module")
def prompts(soak, known):
    return [soak.random_prompt(number, 0, known, "eager") for number in NUMBERS]


def classes(nodes):
    return {node["class_type"] for node in nodes.values()}


def links(nodes):
    return [value[0] for node in nodes.values() for value in node["inputs"].values() if isinstance(value, list)]


def test_prompts_are_made_by_seed_and_number(soak, known, prompts):
    assert [soak.random_prompt(number, 0, sorted(known), "eager") for number in NUMBERS] == prompts
    assert soak.random_prompt(7, 1, known, "eager") != soak.random_prompt(7, 0, known, "eager")
    assert len({str(prompt.nodes) for prompt in prompts}) == len(prompts)


def test_every_link_ends_at_a_node_and_every_node_is_used(soak, prompts):
    for prompt in prompts:
        for nodes in (prompt.nodes, soak.plain(prompt.nodes)):
            assert {*links(nodes)} == {*nodes} - {soak.IMAGES}


def test_plain_prompts_have_all_nodes_but_ours(soak, prompts):
    for prompt in prompts:
        rest = soak.plain(prompt.nodes)
        assert not any(name.startswith("CG_") for name in classes(rest))
        assert rest.keys() == {key for key, node in prompt.nodes.items() if node["class_type"] not in soak.OURS}
        assert "CG_CompileModel" in classes(prompt.nodes)
        assert ("CG_VAESpeedup" in classes(prompt.nodes)) == ("VAE Speedup" in prompt.structure)


def test_each_row_comes_in_each_of_its_places(soak, prompts):
    places = {row.name: (" before", " after") if row.socket == "model" else ("",) for row in soak.ROWS}
    wanted = {name + place for name, ends in places.items() for place in ends}
    assert {row for prompt in prompts for row in prompt.structure} == wanted | {"VAE Speedup"}


def test_row_placed_before_feeds_compile_model(soak, prompts):
    def feeds(nodes, key):
        source = nodes[key]["inputs"].get("model", nodes[key]["inputs"].get("model1"))
        return [] if source is None else [nodes[source[0]]["class_type"], *feeds(nodes, source[0])]

    for prompt in prompts:
        before, after = feeds(prompt.nodes, soak.COMPILE), feeds(prompt.nodes, soak.SAMPLER)
        after = after[: after.index("CG_CompileModel")]
        placed = [f"{name} before" for name in before[:-1]] + [f"{name} after" for name in after]
        assert sorted(placed) == [row for row in prompt.structure if row.endswith((" before", " after"))]


def test_nodes_that_comfyui_lacks_are_not_used(soak):
    chosen = [soak.random_prompt(number, 0, {"FreeU", "SetLatentNoiseMask"}, "eager").nodes for number in NUMBERS]
    rows = {row.name for row in soak.ROWS}
    assert {name for nodes in chosen for name in classes(nodes) & rows} == {"FreeU"}, "a mask needs other nodes"


class Server:
    """Answers as the registry of a server does."""

    def __init__(self):
        self.compiles = 0

    def get(self, path):
        return {"totals": {"compiles": self.compiles, "calls": 1, "retired": 0, "reasons": {"a patch": 1}}}


@pytest.fixture
def run(soak, known, monkeypatch):
    """Return a function that runs one prompt twice, each with its comparison, on a server that acts as `turns` says."""

    def start(turns):
        def answer(server, nodes):
            server.compiles += turns["compiles"].pop(0)
            if turns.get("fails"):
                raise soak.PromptFailed("no")
            return [numpy.full((8, 8, 3), turns["pixels"].pop(0), "int16")], 0.0, {}

        monkeypatch.setattr(soak, "run", answer)
        monkeypatch.setattr(soak, "resident_mebibytes", lambda server: 100.0)
        same = soak.random_prompt(1, 0, known, "eager")
        monkeypatch.setattr(soak, "random_prompt", lambda *arguments: same)
        options = argparse.Namespace(prompts=2, minutes=1, check=1, backend="eager", seed=0)
        made = soak.Soak(Server(), known, options)
        made.run()
        return made

    return start


def test_a_good_run_has_no_faults(run):
    good = run({"compiles": [3, 0, 0, 0], "pixels": [5, 6, 7, 7]})
    assert (good.faults(), good.checked, good.largest, good.compiles, good.last_compile) == (0, 2, 1, 3, 1)
    assert "0 faults" in good.summary()


@pytest.mark.parametrize("compiles", [[3, 1, 0, 0], [3, 0, 1, 0]])
def test_a_compile_where_there_should_be_none_is_a_fault(run, capsys, compiles):
    assert run({"compiles": compiles, "pixels": [5, 5, 5, 5]}).faults() == 1
    assert "FAULT: prompt 1" in capsys.readouterr().out


def test_an_image_that_differs_is_a_fault(run):
    bad = run({"compiles": [3, 0, 0, 0], "pixels": [5, 5, 5, 9]})
    assert (bad.mismatches, bad.largest) == (1, 4)


def test_a_prompt_that_fails_is_a_fault(run, capsys):
    assert run({"compiles": [0] * 4, "fails": True}).failures == 2
    assert "without our nodes too" in capsys.readouterr().out


def test_memory_that_grows_is_a_fault(soak):
    run = soak.Soak(None, (), None)
    run.resident = [100.0] * 120
    assert run.memory() is None, "there are too few prompts to tell"
    run.resident += [104.0] * 60
    assert (run.memory(), run.faults()) == ((100.0, 104.0), 0)
    run.resident += [106.0] * 60
    assert run.faults() == 1
