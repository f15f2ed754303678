"""Instances in a Python that has OneFlow but no torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from compiled_graphs.compiler.backends.oneflow import backend

pytestmark = pytest.mark.oneflow
BEGIN = """
import gc, json, os, sys, types
package = sys.modules["side"] = types.ModuleType("side")
package.__path__ = [sys.argv[1]]
import oneflow as flow
from side import instances
from side.instances import Instances, NoRoom, pack

CONVOLUTION = pack(json.dumps({
    "inputs": ["w", "x"], "weights": [["float32", [64, 64, 3, 3]]],
    "nodes": [["h", "aten.convolution.default",
               [{"node": "x"}, {"node": "w"}, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1], {}],
              ["s", "aten.silu.default", [{"node": "h"}], {}]],
    "results": [{"node": "s"}]}).encode())
weight = flow.randn(64, 64, 3, 3)
image = lambda number: flow.randn(2, 64, 48 + number, 48)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
tell = lambda **facts: print(json.dumps(facts))
"""


def run(code):
    environment = os.environ | {"GLOG_minloglevel": "2", "PYTHONPATH": ""}
    command = [backend._python(), "-c", BEGIN + code, str(Path(backend.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SIZES = """
all_of_them = Instances("cpu", memory=int(sys.argv[2]))
all_of_them.add("a", CONVOLUTION)
begin, most = resident(), 0
for number in range(60):
    (result,) = all_of_them.run("a", [weight, image(number)])
    assert result.shape == (2, 64, 48 + number, 48)
    most = max(most, resident())
tell(grown=most - begin, built=all_of_them.built, resets=all_of_them.resets)
"""


def test_memory_stays_bounded_over_many_sizes():
    bounded, free = (run(SIZES.replace("sys.argv[2]", str(limit))) for limit in (256 * 2**20, 2**40))
    assert bounded["built"] == free["built"] == 60
    assert free["resets"] == 0
    assert 3 <= bounded["resets"] < 30
    assert bounded["grown"] < 512 < 768 < free["grown"]


def test_reset_keeps_the_jobs_used_last():
    told = run("""
few = Instances("cpu", most=4)
few.add("a", CONVOLUTION)
images = [image(number) for number in range(5)]
results = [few.run("a", [weight, x])[0].numpy() for x in images]
reset, built = few.resets, few.built
same = [bool((few.run("a", [weight, x])[0].numpy() == r).all()) for x, r in zip(images[3:], results[3:])]
after_recent = few.built
few.run("a", [weight, images[0]])
tell(reset=reset, built=built, same=same, after_recent=after_recent, after_oldest=few.built)
""")
    assert told == {"reset": 1, "built": 5, "same": [True, True], "after_recent": 5, "after_oldest": 6}


def test_instances_that_do_not_fit_are_given_up():
    told = run("""
small = Instances("cpu", memory=2**20)
small.add("a", CONVOLUTION)
images, done = [image(0), image(1)], 0
try:
    while done < 100:
        small.run("a", [weight, images[done % 2]])
        done += 1
except NoRoom as error:
    tell(done=done, said=str(error))
""")
    assert told["done"] <= 6
    assert "do not fit into 0.0 GiB: COMPILED_GRAPHS_ONEFLOW_MEMORY" in told["said"]


def test_weights_are_copied_unless_in_place():
    told = run("""
one = Instances("cpu")
one.add("a", CONVOLUTION)
x = image(0)
first = one.run("a", [weight, x])[0].numpy()
doubled = one.run("a", [weight * 2, x])[0].numpy()
weight.zero_()
last = one.run("a", [weight, x])[0].numpy()
tell(changed=float(abs(doubled - first).max()), gone=float(abs(last).max()), built=one.built)
""")
    assert told["changed"] > 1
    assert told["gone"] == 0
    assert told["built"] == 1


def test_reset_spares_graphs_of_other_code():
    told = run("""
class Other(flow.nn.Graph):
    def build(self, x):
        return x + 1

other = Other()
other(flow.ones(2))
few = Instances("cpu", most=1)
few.add("a", CONVOLUTION)
for number in range(2):
    few.run("a", [weight, image(number)])
try:
    few.run("a", [weight, image(2)])
except NoRoom as error:
    said = str(error)
few.run("a", [weight, image(0)])
tell(resets=few.resets, said=said, other=other(flow.ones(2)).numpy().tolist())
del other
""")
    assert "while other code uses it" in told.pop("said")
    assert told == {"resets": 0, "other": [2.0, 2.0]}


TINY = """
small = Instances("cpu")
small.add("a", pack(json.dumps({
    "inputs": ["x"], "weights": [], "nodes": [["y", "aten.exp.default", [{"node": "x"}], {}]],
    "results": [{"node": "y"}]}).encode()))
for number in range(100):
    small.run("a", [flow.ones(number + 1)])
    (result,) = small.run("a", [flow.ones(number // 2 + 1)])
tell(built=small.built, shape=list(result.shape))
"""


def test_tiny_graphs_neither_hang_nor_crash():
    """Without the pause, two of three processes hang or crash here.

    With it, one process did so once, on a busy machine. So one failure is allowed, but the next two runs must pass.
    """
    try:
        told = run(TINY)
    except (AssertionError, subprocess.TimeoutExpired):
        told, again = run(TINY), run(TINY)
        assert again == told
    assert told == {"built": 100, "shape": [50]}


def test_the_process_ends_well_with_graphs_in_use():
    told = run("""
everything = Instances("cpu")
everything.add("a", CONVOLUTION)
everything.run("a", [weight, image(0)])
tell(built=everything.built)
""")
    assert told == {"built": 1}


@pytest.mark.parametrize("text", [b"", b"{}", b"\x80\x04N."])
def test_bytes_without_a_program_are_refused(text):
    told = run(f"""
try:
    Instances("cpu").add("a", pack({text!r}))
except (KeyError, ValueError) as error:
    tell(refused=True)
""")
    assert told == {"refused": True}


def test_this_python_needs_no_torch():
    assert run("tell(torch='torch' in sys.modules)") == {"torch": False}
