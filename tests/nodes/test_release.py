"""The registry's archive, unpacked into a real ComfyUI's custom_nodes."""

from __future__ import annotations

import shutil
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import comfy_server  # noqa: E402
import release  # noqa: E402


@pytest.fixture
def unpacked(tmp_path):
    """The extension's folder, unpacked from the registry's archive."""
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("not a git checkout, so the tracked files are unknown")
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(release.build(tmp_path / "dist")) as archive:
        archive.extractall(folder)
    return folder


def test_a_server_loads_the_unpacked_archive(unpacked, tmp_path, start_server, monkeypatch):
    monkeypatch.setattr(comfy_server, "EXTENSION", unpacked)
    with start_server(tmp_path / "home") as server:
        nodes = server.get("/object_info")
        facts = server.get("/compiled_graphs/doctor")
        script = next(path for path in server.get("/extensions") if path.endswith("/compiled_graphs.js"))
        with urllib.request.urlopen(server.address + script, timeout=60) as answer:
            assert answer.read() == (ROOT / "web" / "compiled_graphs.js").read_bytes()
    assert {name for name in nodes if name.startswith("CG_")} >= {"CG_CompileModel", "CG_VAESpeedup", "CG_LoadGraph"}
    assert (tmp_path / "home" / "custom_nodes" / "compiled-graphs").resolve() == unpacked.resolve()
    by_name = {fact["name"]: fact for fact in facts}
    assert by_name.keys() >= {"torch", "GPU", "Triton", "compiler", "ComfyUI", "store", "key file", "inductor"}
    assert all(set(fact) == {"name", "text", "ok", "remedy", "present"} for fact in facts)
    assert by_name["store"]["text"].startswith(str(tmp_path / "home" / "graphs"))
    assert by_name["ComfyUI"]["text"].split(",")[0].count(".") == 2
    assert by_name["other compilers"]["text"] == "none known among 1 extensions"
