"""The registry over HTTP and the websocket: the data of the panel, and the actions of its buttons."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ID = "0d1f7a52-5a0e-4a51-9b1e-c0a11ed67a9b"
ROLE = "2:base UNet"
SEEDS = itertools.count(1)
"""Each prompt gets a new seed, because ComfyUI does not repeat an equal prompt."""


@pytest.fixture(scope="module")
def shared_server(make_home, start_server):
    home = make_home("tiny_sd15")
    (home / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "nodes" / "disturbing_nodes.py", home / "custom_nodes")
    with start_server(home) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """A server that has no graphs in memory."""
    for name in report(shared_server)["workflows"]:
        assert post(shared_server, "drop", {"workflow": name})[0] == 200
    assert report(shared_server)["memory"]["graphs"] == 0
    return shared_server


def post(server, action, body, content_type="application/json"):
    """Return the status and the sentence of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": content_type}
    request = urllib.request.Request(f"{server.address}/compiled_graphs/{action}", data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)["text"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def report(server):
    return server.get("/compiled_graphs/registry")


def saved(server):
    return sorted(server.home.rglob("*_.graph.safetensors"))


def graphs(server):
    return report(server)["workflows"][ID]["roles"][ROLE]["graphs"]


NAMED = {"workflow": ID, "role": ROLE, "name": "graphs"}
REFUSED = {
    "no JSON": ("drop", b"{", 400, "JSON object"),
    "nested too deep": ("drop", b"[" * 50_000, 400, "JSON object"),
    "no UTF-8": ("drop", b'{"workflow": "\xff\xfe"}', 400, "JSON object in UTF-8"),
    "UTF-16": ("drop", json.dumps({"workflow": "a"}).encode("utf-16"), 400, "JSON object in UTF-8"),
    "a mark of the order of bytes": ("drop", b"\xef\xbb\xbf{}", 400, "JSON object in UTF-8"),
    "a number of many digits": ("drop", b'{"workflow": ' + b"1" * 60_000 + b"}", 400, "JSON object"),
    "no number": ("drop", b'{"workflow": NaN}', 400, "JSON object"),
    "half a character": ("drop", b'{"workflow": "\\ud800"}', 404, "no workflow"),
    "a giant": ("save", b" " * (2**16 + 1), 413, "more than 65536 bytes"),
    "nothing": ("save", b"", 400, "JSON object"),
    "a list": ("save", [], 400, "JSON object"),
    "no workflow": ("drop", {}, 400, "lacks 'workflow'"),
    "a number for a workflow": ("drop", {"workflow": 3}, 400, "lacks 'workflow'"),
    "an unknown workflow": ("drop", {"workflow": "nowhere"}, 404, "no workflow 'nowhere'"),
    "no role": ("save", {"workflow": ID}, 400, "lacks 'role'"),
    "an unknown role": ("save", NAMED | {"role": "9:VAE"}, 404, "No '9:VAE'"),
    "a role of an unknown workflow": ("save", NAMED | {"workflow": "nowhere"}, 404, "Queue the workflow first"),
    "no name": ("save", NAMED | {"name": ""}, 400, "lacks 'name'"),
    **{
        f"the name {name}": ("save", NAMED | {"name": name}, 400, "letters, digits")
        for name in ("../escape", "/tmp/graphs", "a\\b", "C:graphs", ".hidden", "%date%", "a\n", "x" * 101)
    },
}


def test_bad_requests_are_refused_in_one_sentence(server, workflow):
    server.run(workflow(seed=next(SEEDS)), {"id": ID})
    files = saved(server)
    for name, (action, body, status, words) in REFUSED.items():
        found, sentence = post(server, action, body)
        assert (found, words in sentence, sentence.endswith(".")) == (status, True, True), (name, found, sentence)
    assert post(server, "drop", {"workflow": ID}, "text/plain")[0] == 400, "another site's page can post that"
    for charset in ("utf-16", "nonsense", "idna", '"'):
        status, sentence = post(server, "drop", {"workflow": "nowhere"}, f"application/json; charset={charset}")
        assert (status, "no workflow 'nowhere'" in sentence) == (404, True), "JSON is UTF-8, whatever a header says"
    assert len(graphs(server)) == 3
    assert saved(server) == files


def test_graphs_are_saved_dropped_and_loaded_again(server, workflow):
    server.run(workflow(seed=next(SEEDS)), {"id": ID})
    assert {row["state"] for row in graphs(server)} == {"compiled"}
    assert all(row["timing"]["eager"] > 0 for row in graphs(server))

    status, text = post(server, "save", NAMED | {"name": "my unet"})
    assert (status, text.startswith("3 graphs saved to my unet_00001_.graph.safetensors")) == (200, True)
    assert post(server, "save", NAMED | {"name": "my unet"}) == (
        200,
        "3 graphs are in my unet_00001_.graph.safetensors already",
    )

    status, text = post(server, "drop", {"workflow": ID})
    assert (status, text.startswith("3 graphs freed.")) == (200, True)
    dropped = report(server)
    assert (dropped["workflows"], dropped["memory"]["graphs"], dropped["disk"]["graphs"]) == ({}, 0, 3)
    assert post(server, "drop", {"workflow": ID})[0] == 404

    before = dropped["totals"]
    server.run(workflow(seed=next(SEEDS)), {"id": ID})
    after = report(server)["totals"]
    assert {name: after[name] - before[name] for name in ("compiles", "from_disk")} == {"compiles": 0, "from_disk": 3}
    assert after["reasons"] == before["reasons"]
    assert {row["source"] for row in graphs(server)} == {"disk"}


@pytest.fixture
def hold(tmp_path):
    """A file. While it exists, prompts with `held` do not end."""
    file = tmp_path / "hold"
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def held(prompt, file):
    prompt["9"] = {"class_type": "HoldStep", "inputs": {"model": ["2", 0], "file": str(file)}}
    prompt["6"]["inputs"]["model"] = ["9", 0]
    return prompt


def test_save_works_and_drop_fails_while_a_prompt_runs(server, workflow, pixels, hold):
    server.run(workflow(seed=next(SEEDS)), {"id": ID})
    options = {"seed": next(SEEDS), "steps": 6}
    expected = pixels(server, server.run(workflow(compiled=False, **options)))[0]
    running = server.queue(held(workflow(**options), hold), {"id": ID})
    calls = report(server)["totals"]["calls"]
    while report(server)["totals"]["calls"] == calls:
        time.sleep(0.01)
    assert post(server, "drop", {"workflow": ID}) == (409, "A prompt is running. Free the graphs when it has ended.")
    assert post(server, "save", NAMED)[0] == 200
    hold.unlink()
    ours = pixels(server, server.wait(running)["outputs"])[0]
    assert abs(ours - expected).max() <= 1
    assert len(graphs(server)) == 3


def test_reasons_are_explained(server, workflow):
    prompt = workflow(seed=next(SEEDS), steps=1)
    prompt["9"] = {
        "class_type": "HyperTile",
        "inputs": {"model": ["2", 0], "tile_size": 32, "swap_size": 2, "max_depth": 0, "scale_depth": False},
    }
    prompt["6"]["inputs"]["model"] = ["9", 0]
    server.run(prompt, {"id": ID})
    found = report(server)
    assert "patch attn1_patch" in found["workflows"][ID]["roles"][ROLE]["reasons"]
    assert "HyperTile" in found["explained"]["patch attn1_patch"]
    chinese = server.get("/compiled_graphs/registry?language=zh")
    assert "有节点改变了注意力的输入" in chinese["explained"]["patch attn1_patch"]


async def _listen(server, seconds, begin):
    """Return the times of the registry's events. Stop after this many seconds without one."""
    import aiohttp

    moments = []
    async with aiohttp.ClientSession() as session, session.ws_connect(server.address + "/ws") as socket:
        await asyncio.to_thread(begin)
        while True:
            try:
                message = await asyncio.wait_for(socket.receive(), seconds)
            except asyncio.TimeoutError:
                return moments
            text = message.data if message.type == aiohttp.WSMsgType.TEXT else "{}"
            if json.loads(text).get("type") == "compiled_graphs.registry":
                moments.append(time.monotonic())


def test_changes_are_announced_at_a_bounded_rate(server, workflow):
    server.run(workflow(seed=next(SEEDS), steps=1), {"id": ID})
    changed = workflow(seed=next(SEEDS), steps=1)
    changed["2"]["inputs"]["verify"] = False
    begin = time.monotonic()
    moments = asyncio.run(_listen(server, 3, lambda: server.run(changed, {"id": "another"})))
    assert 0 < len(moments) <= 1 + (moments[-1] - begin) / 0.2
    assert "another" in report(server)["workflows"]

    dropped = asyncio.run(_listen(server, 2, lambda: post(server, "drop", {"workflow": "another"})))
    assert len(dropped) == 1
    assert asyncio.run(_listen(server, 1, lambda: report(server))) == [], "reading is no change"


def test_metrics_say_what_the_registry_says(server, workflow):
    server.run(workflow(seed=next(SEEDS)))
    with urllib.request.urlopen(f"{server.address}/compiled_graphs/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    found = report(server)
    assert float(values["compiled_graphs_compiles_total"]) == found["totals"]["compiles"] > 0
    assert float(values["compiled_graphs_block_calls_total"]) == found["totals"]["calls"] > 0
    assert float(values["compiled_graphs_memory_bytes"]) == found["memory"]["bytes"] > 0
