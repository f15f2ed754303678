"""`benchmarks/fleet.py`: processes that share a store and start at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "fleet.py"


def fleet(*options):
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(report):
    assert report["compiled in all"] == report["graphs"]
    assert report["loaded"] == report["graphs"] * (report["servers"] - 1)
    assert (report["a later server"]["compiled"], report["a later server"]["disk"]) == (0, report["graphs"])


def test_servers_compile_each_graph_once_and_one_that_is_killed_keeps_nothing_locked():
    check(fleet("--servers", "3", "--killed", "1", "--kinds", "2", "--least", "0.2"))


def test_servers_on_s3_compile_each_graph_once():
    for module in ("moto.server", "s3fs", "boto3"):
        pytest.importorskip(module)
    check(fleet("--place", "s3", "--servers", "3", "--kinds", "2", "--least", "0.2"))
