"""OneFlow over HTTP: a whole prompt, and a file of its graphs after a restart."""

from __future__ import annotations

import copy
import re

import pytest

pytestmark = pytest.mark.oneflow


def totals(server):
    return server.get("/compiled_graphs/registry")["totals"]


@pytest.fixture
def speedy(workflow):
    """A text-to-image workflow that runs and saves model and VAE with OneFlow, or is uncompiled."""

    def make(*size, compiled=True, **sampler):
        prompt = workflow(*size, compiled=compiled, **sampler)
        if compiled:
            prompt["2"]["inputs"]["backend"] = "oneflow"
            prompt["20"] = {"class_type": "CG_VAESpeedup", "inputs": {"vae": ["1", 2], "backend": "oneflow"}}
            prompt[decode(prompt)]["inputs"]["vae"] = ["20", 0]
            inputs = {"model": ["2", 0], "vae": ["20", 0], "filename_prefix": "oneflow", "after": [decode(prompt), 0]}
            prompt["9"] = {"class_type": "CG_SaveGraph", "inputs": inputs}
        return prompt

    return make


def decode(prompt):
    return next(number for number, node in prompt.items() if node["class_type"] == "VAEDecode")


def test_oneflow_matches_eager_and_its_file_loads(home, start_server, speedy, pixels):
    with start_server() as server:
        saved = [
            "saved to oneflow_00001_",
            "saved to oneflow_00002_",
            "are in oneflow_00002_",
        ]  # the second size adds a job, so a new file is written
        for number, size in enumerate([(64, 64), (96, 64, 2), (64, 64)]):
            outputs = server.run(speedy(*size, seed=31 + number))
            theirs = pixels(server, server.run(speedy(*size, seed=31 + number, compiled=False)))
            ours = pixels(server, outputs)
            assert max(abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) <= 1
            assert saved[number] in outputs["9"]["text"][0]
            if not number:
                assert "normal speed" not in outputs["2"]["text"][0]
                assert totals(server)["compiles"] == 4
        assert totals(server)["compiles"] == 4
        assert (totals(server)["retired"], totals(server)["reasons"]) == (0, {})
        (name,) = {found for node in outputs.values() for found in re.findall(r"oneflow_\d{5}_\.graph\.\w+", str(node))}
    with start_server() as server:
        prompt = copy.deepcopy(speedy(64, 64, seed=33))
        load = {"model": ["1", 0], "vae": ["1", 2], "graph": name}
        prompt["2"] = {"class_type": "CG_LoadGraph", "inputs": load}
        del prompt["20"], prompt["9"]
        prompt[decode(prompt)]["inputs"]["vae"] = ["2", 1]
        outputs = server.run(prompt)
        assert "3 of 3 block types loaded" in outputs["2"]["text"][0]
        assert totals(server)["compiles"] == 0
        assert totals(server)["reasons"] == {}
        again = pixels(server, outputs)
        assert max(abs(a - b).max() for a, b in zip(again, ours, strict=True)) <= 1
