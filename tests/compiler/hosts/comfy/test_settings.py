"""What people chose in ComfyUI's settings dialog, read off its file."""

from __future__ import annotations

import json

import pytest
from compiled_graphs.compiler.hosts.comfy.settings import STORE_LIMIT, store_limit


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch):
    for name in ("COMPILED_GRAPHS_STORE_LIMIT", "COMPILED_GRAPHS_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        (None, 10),
        ("{}", 10),
        (f'{{"{STORE_LIMIT}": null}}', 10),
        (f'{{"{STORE_LIMIT}": 3}}', 3),
        (f'{{"{STORE_LIMIT}": 0.5}}', 0.5),
        (f'{{"{STORE_LIMIT}": -1}}', 10),
        (f'{{"{STORE_LIMIT}": "much"}}', 10),
        (f'{{"{STORE_LIMIT}": tru', None),
        ("", None),
        ("[]", None),
    ],
)
def test_the_size_is_read_where_comfyui_keeps_it(tmp_path, text, gigabytes):
    if text is not None:
        (tmp_path / "default").mkdir()
        (tmp_path / "default" / "comfy.settings.json").write_text(text)
    assert store_limit(tmp_path) == (None if gigabytes is None else gigabytes * 10**9)


@pytest.mark.parametrize(
    ("name", "value"), [("COMPILED_GRAPHS_STORE_LIMIT", "5"), ("COMPILED_GRAPHS_STORE", "/shared/graphs")]
)
def test_the_environment_comes_before_the_dialog(tmp_path, monkeypatch, name, value):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "comfy.settings.json").write_text(json.dumps({STORE_LIMIT: 3}))
    assert store_limit(tmp_path) == 3 * 10**9
    monkeypatch.setenv(name, value)
    assert store_limit(tmp_path) is None
