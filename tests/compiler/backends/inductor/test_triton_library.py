"""The library that Triton builds with a C compiler, in artifacts; Triton is a double, as on a machine without a GPU."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from compiled_graphs.compiler.backends.inductor import Artifact, artifacts, triton_library
from compiled_graphs.compiler.backends.inductor.triton_library import TritonLibrary, built_library

NAME = f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"


class SavedArtifact:
    def save(self, path, **how):
        assert how == {"format": "binary"}
        with open(path, "wb") as file:
            file.write(b"kernels")


class Loader:
    loaded: ClassVar[list[bytes]] = []

    @classmethod
    def load(cls, path, **_how):
        with open(path, "rb") as file:
            cls.loaded.append(file.read())
        return SavedArtifact()


class Machine:
    """A machine's Triton: what it builds its library from, its cache, and whether it has a C compiler."""

    def __init__(self, folder, system="x86_64,Linux,64bit,ELF", code="int load_binary;", compiler=True):
        self.folder, self.system, self.code, self.compiler = folder, system, code, compiler
        self.built = 0

    @property
    def place(self):
        """As triton.runtime.build has it."""
        return self.folder / "cache" / sha256((self.code + self.system).encode()).hexdigest() / NAME

    @property
    def utils(self):
        if not self.place.exists():
            if not self.compiler:
                raise RuntimeError("Failed to find C compiler.")
            self.built += 1
            self.place.parent.mkdir(parents=True, exist_ok=True)
            self.place.write_bytes(f"library of {self.code}".encode())
        return self.place.read_bytes().decode()

    def use(self, monkeypatch):
        nvidia = self.folder / "nvidia"
        nvidia.mkdir(parents=True, exist_ok=True)
        (nvidia / "driver.c").write_text(self.code)
        modules = {
            "triton": {},
            "triton.runtime": {"driver": SimpleNamespace(active=self)},
            "triton.runtime.build": {"platform_key": lambda: self.system},
            "triton.runtime.cache": {"get_cache_manager": lambda key: Cache(self.folder / "cache" / key)},
            "triton.backends": {},
            "triton.backends.nvidia": {"driver": SimpleNamespace(__file__=str(nvidia / "driver.py"))},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        built_library.cache_clear()


class Cache:
    def __init__(self, folder):
        self.folder = folder

    def get_file(self, name):
        return str(self.folder / name) if (self.folder / name).exists() else None

    def put(self, data, name, binary):
        assert binary
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def _doubles(monkeypatch):
    monkeypatch.setattr(artifacts, "CompiledArtifact", SimpleNamespace(get=lambda: Loader))
    Loader.loaded.clear()
    yield
    built_library.cache_clear()


@pytest.fixture
def maker(tmp_path, monkeypatch):
    """The machine that makes the artifact, in use."""
    machine = Machine(tmp_path / "maker")
    machine.use(monkeypatch)
    return machine


def load(data):
    return Artifact.load(data, torch.device("cuda"))


# Where the command `file` is missing, Python does not know what programs look like.
@pytest.mark.parametrize("system", ["x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,"])
def test_a_machine_without_a_compiler_runs_with_its_makers_library(maker, tmp_path, monkeypatch, system):
    data = Artifact(SavedArtifact()).to_bytes()
    other = Machine(tmp_path / "other", system, compiler=False)
    other.use(monkeypatch)
    loaded = load(data)
    assert other.utils == maker.utils
    assert Loader.loaded == [b"kernels"]
    assert loaded.to_bytes() == data


def test_a_library_that_is_there_stays(maker):
    data = Artifact(SavedArtifact()).to_bytes()
    maker.place.write_bytes(b"newer")
    load(data)
    assert maker.utils == "newer"


def test_another_triton_builds_its_own(maker, tmp_path, monkeypatch):
    data = Artifact(SavedArtifact()).to_bytes()
    other = Machine(tmp_path / "other", code="int load_other_binary;")
    other.use(monkeypatch)
    load(data)
    assert not other.place.exists()
    assert other.utils != maker.utils
    assert Loader.loaded == [b"kernels"]


def test_a_library_for_another_python_is_not_put(maker):
    library = built_library()
    maker.place.unlink()
    replace(library, name="cuda_utils.cpython-399-x86_64-linux-gnu.so").put()
    replace(library, name=f"../{NAME}").put()
    assert list(maker.folder.rglob("*.so")) == []


def test_an_artifact_of_a_machine_without_a_library_loads(tmp_path, monkeypatch, caplog):
    Machine(tmp_path, compiler=False).use(monkeypatch)
    with caplog.at_level("INFO", logger=triton_library.log.name):
        load(Artifact(SavedArtifact()).to_bytes())
    assert Loader.loaded == [b"kernels"]
    assert "Failed to find C compiler" in caplog.text


def test_a_cache_that_cannot_be_written_leaves_triton_to_build_its_own(maker, monkeypatch, caplog):
    def full(*_arguments, **_named):
        raise OSError("No space left on device")

    library = built_library()
    maker.place.unlink()
    monkeypatch.setattr(Cache, "put", full)
    with caplog.at_level("INFO", logger=triton_library.log.name):
        TritonLibrary(library.source, library.name, library.data).put()
    assert "No space left" in caplog.text
    assert maker.utils
