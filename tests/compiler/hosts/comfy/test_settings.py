"""What people chose in ComfyUI's settings dialog, read off its file."""

from __future__ import annotations

import json

import pytest
from compiled_graphs.compiler.hosts.comfy.settings import STORE_LIMIT, store_limit


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch):
    monkeypatch.delenv("COMPILED_GRAPHS_STORE_LIMIT", raising=False)


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


def test_the_environment_variable_wins(tmp_path, monkeypatch):
    (tmp_path / "default").mkdir()
    (tmp_path / "default" / "comfy.settings.json").write_text(json.dumps({STORE_LIMIT: 3}))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE_LIMIT", "5")
    assert store_limit(tmp_path) is None
