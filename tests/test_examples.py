"""The examples run as a person runs them. Some run twice: the second run loads what the first one saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="the examples need diffusers, which comes with it in the test extra")
EXAMPLES = Path(__file__).resolve().parents[1] / "diffusers_examples"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs an example with the eager backend and a shared store, and returns its lines."""
    folder = tmp_path_factory.mktemp("examples")

    def start(command: str, graphs: Path) -> list[str]:
        name, *arguments = command.split()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "COMPILED_GRAPHS_STORE": str(folder / "store"),
            "COMPILED_GRAPHS_TRUST": str(folder / "trust"),
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, str(EXAMPLES / name), *arguments, "--graphs", str(graphs), "--backend", "eager"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return start


def images(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r": [\d.]+ s, \d+ compiled$", line)]


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("text_to_image.py sd15", 4),
        ("text_to_image.py sd3", 4),
        ("text_to_image.py flux", 4),
        ("image_to_image.py", 4),
        ("video.py", 2),
    ],
)
def test_graphs_saved_ahead_are_all_that_runs_need(run, tmp_path, command, number):
    lines = run(command, tmp_path / "graphs")
    assert lines[0].startswith("compiled and saved ")
    assert len(images(lines)) == number
    assert all(line.endswith(" 0 compiled") for line in images(lines)), lines


def test_a_batch_over_a_cluster_of_this_machine(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install compiled-graphs[ray]")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "COMPILED_GRAPHS_TRUST": str(tmp_path / "trust"),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",
    }
    line = [sys.executable, str(EXAMPLES / "batch.py"), "--store", "store", "--images", "3", "--workers", "1"]
    done = subprocess.run(
        [*line, "--backend", "eager"], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "3 images in images"
    assert "3 of 3 done, 1 working" in done.stderr
    assert len(list((tmp_path / "images").glob("*.png"))) == 3


@pytest.mark.parametrize(("command", "parts"), [("text_to_image.py sdxl", 1), ("base_and_refiner.py", 2)])
def test_next_process_compiles_nothing(run, tmp_path, command, parts):
    saving, loading = (run(command, tmp_path / "graphs") for _ in range(2))
    assert sum(line.startswith("compiled and saved") for line in saving) == parts
    assert sum(line.startswith("loaded") for line in loading) == parts
    for line in loading[:parts]:
        assert all(found == wanted for found, wanted in re.findall(r"(\d+) of (\d+)", line)), line
    assert len(images(loading)) == 4
    assert all(line.endswith(" 0 compiled") for line in images(loading)), loading
