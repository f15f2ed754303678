"""The prompts of benchmarks/soak_streamed.py and its count of faults. A double stands for the server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def soak():
    kept = [*sys.path]
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("soak_streamed", BENCHMARKS / "soak_streamed.py")
    module = sys.modules["soak_streamed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = kept
    yield module
    for name in ("soak_streamed", "server", "server_models", "comfy_server"):
        sys.modules.pop(name, None)


class Server:
    """Writes a latent for each prompt, as BenchKeep does. The one of prompt number `wrong` is another one."""

    def __init__(self, wrong=None, failing=None, error=None, retired=0):
        self.prompts, self.wrong, self.failing, self.error, self.retired = [], wrong, failing, error, retired

    def end_of_log(self):
        return "its last words"

    def lines_with(self, text):
        return [f"{text}lora some.weight no room"] * 2

    def queue(self, prompt):
        self.prompts.append(prompt)
        return len(self.prompts) - 1

    def wait(self, number):
        if number == self.failing:
            raise self.error("it broke")
        torch.save(torch.ones(4) * (2 if number == self.wrong else 1), self.prompts[number]["8"]["inputs"]["path"])
        return {"outputs": {"8": {"bench": [{"used": 5.0, "pinned": 0}]}}}

    def run(self, prompt):
        return self.wait(self.queue(prompt))["outputs"]

    def get(self, path):
        names = ("compiles", "recordings", "replays", "calls")
        return {"totals": {"reasons": {}, "retired": self.retired, **dict.fromkeys(names, 1)}}


def run(soak, tmp_path, capsys, server):
    options = argparse.Namespace(
        home=tmp_path, prompts=10, end=math.inf, steps=2, seed=0, models=soak.MODELS, sizes=soak.SIZES
    )
    status = soak.soak(options, server)
    return status, json.loads(capsys.readouterr().out)


def test_each_prompt_is_compared_with_its_own_reference(soak, tmp_path, capsys):
    server = Server()
    status, report = run(soak, tmp_path, capsys, server)
    references = len(soak.MODELS) * len(soak.LORAS) * len(soak.SIZES)
    assert (status, report["faults"], report["prompts"]) == (0, [], 10)
    assert report["errors that ComfyUI logged"] == {"ERROR lora some.weight no room": 2}
    assert len(server.prompts) == references + len(soak.MODELS) + 10
    assert len({json.dumps(prompt) for prompt in server.prompts}) == len(server.prompts)  # nothing is handed back
    ways = ["CG_CompileModel" in json.dumps(prompt) for prompt in server.prompts]
    assert ways == [False] * references + [True] * 12


def test_a_server_that_ends_is_a_fault_with_its_log(soak, tmp_path, capsys):
    run(soak, tmp_path, capsys, Server())
    status, report = run(soak, tmp_path, capsys, Server(failing=7, error=ConnectionRefusedError))
    assert (status, report["prompts"], report["compiles"]) == (1, 5, None)
    assert report["faults"] == ["the server ended: it broke\nits last words"]


def test_references_stay_for_the_next_run(soak, tmp_path, capsys):
    run(soak, tmp_path, capsys, Server())
    again = Server()
    assert run(soak, tmp_path, capsys, again)[0] == 0
    assert len(again.prompts) == len(soak.MODELS) + 10
    assert not [*tmp_path.glob("soak-ours-*")]


def test_a_wrong_latent_and_a_failed_prompt_are_faults(soak, tmp_path, capsys):
    run(soak, tmp_path, capsys, Server())
    status, report = run(soak, tmp_path, capsys, Server(wrong=5, failing=7, error=soak.PromptFailed))
    assert (status, report["prompts"]) == (1, 9)
    uneven = [case for case, (_, most) in report["differs, least and most"].items() if most > 0]
    assert report["faults"] == [
        "a latent differs by 1.0e+00",
        f"some latents differ by more than others: {uneven}",
        "prompts failed: {'it broke': 1}",
    ]
    assert max(most for _, most in report["differs, least and most"].values()) == 1.0
    assert [path.name for path in tmp_path.glob("soak-ours-*")] == ["soak-ours-3.pt"]


def test_a_graph_that_failed_a_check_is_a_fault(soak, tmp_path, capsys):
    assert run(soak, tmp_path, capsys, Server(retired=1))[1]["faults"] == ["1 graphs failed a check"]


def test_a_latent_that_differs_more_than_others_of_its_case_is_a_fault(soak):
    found = soak.Found({"even": [0.004, 0.005], "uneven": [0.0056, 0.0056, 0.0103], "as good as equal": [0.0, 0.001]})
    assert found.uneven() == ["uneven"]
    assert found.faults(0, 0) == ["some latents differ by more than others: ['uneven']"]
