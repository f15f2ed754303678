"""The parts of a graph's key besides its region and its call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_graphs.compiler import compile_cache
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.compile_cache import key
from compiled_graphs.compiler.hosts.comfy.rules.host import HOST as COMFY
from compiled_graphs.compiler.hosts.diffusers.rules.host import HOST as DIFFUSERS

CPU = torch.device("cpu")
EAGER = BACKENDS["eager"]
COMPILER = Path(compile_cache.__file__).resolve().parents[1]
FOLDERS = {
    "identity": "identity",
    "tracing": "tracing",
    "torch_compat": "common/torch_compat",
    "compiling": "backends/eager",
    "host": "hosts/comfy/rules",
}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the folders that a key digests. The key reads it instead of the real ones."""
    for folder in FOLDERS.values():
        target = tmp_path / folder
        target.mkdir(parents=True)
        for path in (COMPILER / folder).glob("*.py"):
            (target / path.name).write_bytes(path.read_bytes())

    monkeypatch.setattr(key, "_COMPILER", tmp_path)
    monkeypatch.setattr(key.inspect, "getfile", lambda cls: str(tmp_path / "backends" / "eager" / "backend.py"))
    monkeypatch.setattr(COMFY, "folder", tmp_path / "hosts" / "comfy", raising=False)
    key.code_version.cache_clear()
    yield tmp_path
    key.code_version.cache_clear()


def fields():
    key.code_version.cache_clear()
    return key.environment(EAGER, CPU, COMFY)


def differences(before, after):
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize("field", FOLDERS)
def test_each_file_of_a_folder_changes_its_field(field, copied):
    folder = copied / FOLDERS[field]
    files = [path for path in folder.glob("*.py") if path.read_bytes()]
    assert files
    for path in files:
        before = fields()
        path.write_bytes(path.read_bytes() + b"# corrected\n")
        assert differences(before, fields()) == {field}
    before = fields()
    (folder / "added.py").write_text("")
    assert differences(before, fields()) == {field}


def test_line_ends_change_nothing(copied):
    path = next(path for path in (copied / "tracing").glob("*.py") if path.read_bytes())
    before = fields()
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert fields() == before


def test_backends_and_hosts_count_by_themselves():
    versions = {name: key.environment(backend, CPU, COMFY)["compiling"] for name, backend in BACKENDS.items()}
    assert versions["inductor"] == versions["inductor_fp8"]
    assert len(set(versions.values())) == 3
    hosts = {key.environment(EAGER, CPU, host)["host"] for host in (COMFY, DIFFUSERS)}
    assert len(hosts) == 2
    assert key.environment(EAGER, CPU, Host())["host"] == ""


def test_the_backends_own_fields_are_kept():
    assert EAGER.environment(CPU).items() <= key.environment(EAGER, CPU, COMFY).items()


def test_how_calls_are_made_up_is_no_part_of_the_key(copied):
    path = copied / "hosts" / "comfy" / "synthetic_calls.py"
    before, requests_before = fields(), key.request_version(COMFY)
    path.write_text("# another call\n")
    assert fields() == before
    assert key.request_version(COMFY) != requests_before
