from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS
from compiled_graphs.compiler.hosts.comfy import doctor_facts
from compiled_graphs.compiler.hosts.comfy.doctor_facts import on_disk
from compiled_graphs.compiler.identity.graph_spec import GraphSpec
from compiled_graphs.compiler.registry import doctor
from compiled_graphs.compiler.registry.doctor import Fact, Surroundings, examine, in_words
from compiled_graphs.compiler.storage.graph_file import StoredGraph
from compiled_graphs.compiler.storage.store import FolderStore
from compiled_graphs.compiler.storage.trust import Trust
from torch._inductor import cpp_builder

POSIX = pytest.mark.skipif(os.name == "nt", reason="shell scripts and permission bits")


@pytest.fixture
def around(tmp_path, monkeypatch):
    """Make this machine look like one on which nothing is wrong. Each test breaks one thing."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "g++", "exit 0")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path / "include")})
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in BACKENDS:
        monkeypatch.setattr(type(BACKENDS[name]), "available", lambda self, device: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "trust"))
    monkeypatch.delenv("CC", raising=False)
    return Surroundings(torch.device("cpu"), str(tmp_path / "store"))


@pytest.fixture
def on_gpu(around, monkeypatch):
    """Make this machine look like one with an H200, and with a Triton that compiles its kernel launchers."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with_triton(monkeypatch, compile_module_from_src=print)
    script(Path(os.environ["PATH"], "gcc"), "exit 0")
    script(Path(os.environ["PATH"], "nvidia-smi"), "echo 570.86.15; echo 570.86.15")
    return dataclasses.replace(around, device=torch.device("cuda"))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def with_triton(monkeypatch, **driver):
    names = ("triton", "triton.backends", "triton.backends.nvidia", "triton.backends.nvidia.driver")
    modules = {name: ModuleType(name) for name in names}
    modules["triton"].__version__ = "3.4.0"
    modules["triton.backends.nvidia.driver"].__dict__.update(driver)
    modules["triton.backends.nvidia"].driver = modules["triton.backends.nvidia.driver"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def fact(around, name):
    (found,) = [fact for fact in examine(around) if fact.name == name]
    return found


def bad(around):
    """Return the names of the facts that are not ok. Each of them must have a remedy."""
    facts = [fact for fact in examine(around) if not fact.ok]
    assert all(fact.remedy.endswith(".") for fact in facts)
    return [fact.name for fact in facts]


def test_facts_are_told_in_chinese(around):
    facts = [in_words(fact, "zh") for fact in examine(around)]
    told = {fact.name: fact.text for fact in facts}
    assert told["Triton"] == "没有显卡，不需要"
    assert told["inductor"] == "可在 cpu 上使用"
    assert {"编译器", "存储位置", "密钥文件"} <= told.keys()
    assert [in_words(fact, "en") for fact in examine(around)] == examine(around)


def test_good_machine_gives_one_line_per_fact(around):
    facts = examine(around)
    names = ["torch", "GPU", "Triton", "compiler", "Python headers", "ComfyUI", "store", "key file", *BACKENDS]
    assert [fact.name for fact in facts] == names
    assert all(fact.ok and fact.text and not fact.remedy and "\n" not in fact.text for fact in facts)
    assert [fact.name for fact in facts if not fact.present] == ["GPU", "Triton", "ComfyUI", "key file"]


def test_looking_changes_nothing(around, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    examine(around)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_old_torch(around, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    assert bad(around) == ["torch"]
    assert "2.8" in fact(around, "torch").remedy


def test_no_cpp_compiler(around, monkeypatch):
    def fail():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    assert bad(around) == ["compiler"]
    assert "CXX" in fact(around, "compiler").remedy


def test_no_python_headers(around, tmp_path):
    (tmp_path / "include" / "Python.h").unlink()
    assert bad(around) == ["Python headers"]


@POSIX
def test_a_gpu_that_torch_was_not_built_for(around, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert bad(around) == ["GPU"]
    assert "NVIDIA H200" in fact(around, "GPU").text
    assert "pytorch.org" in fact(around, "GPU").remedy


@POSIX
def test_a_driver_that_is_too_old_for_torch(around, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in fact(around, "GPU").remedy


@POSIX
def test_gpu_that_comfyui_must_not_use_is_no_fault(around, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bad(around) == []
    assert "not used" in fact(around, "GPU").text


@POSIX
def test_a_driver_that_fails_counts_as_none(around, tmp_path):
    script(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    assert fact(around, "GPU") == Fact("GPU", "none; models are compiled for the CPU", present=False)


@POSIX
def test_a_gpu_is_described(on_gpu):
    assert bad(on_gpu) == []
    assert fact(on_gpu, "GPU").text == "NVIDIA H200, 140 GiB, compute capability 9.0, driver 570.86.15"
    assert fact(on_gpu, "torch").text == f"{torch.__version__}, with CUDA 12.8"
    assert fact(on_gpu, "Triton").text == "3.4.0"


@POSIX
def test_a_gpu_without_triton(on_gpu, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert bad(on_gpu) == ["Triton"]
    assert "pip install triton" in fact(on_gpu, "Triton").remedy


@POSIX
def test_triton_needs_a_compiler_and_headers(on_gpu, tmp_path, monkeypatch):
    (tmp_path / "bin" / "gcc").unlink()
    (tmp_path / "include" / "Python.h").unlink()
    assert bad(on_gpu) == ["compiler", "Python headers"]
    script(tmp_path / "bin" / "clang", "exit 0")
    assert bad(on_gpu) == ["Python headers"]
    monkeypatch.setenv("CC", "no-such-compiler")
    assert bad(on_gpu) == ["compiler", "Python headers"]
    assert "no-such-compiler" in fact(on_gpu, "compiler").text


@POSIX
def test_triton_that_compiles_nothing_needs_neither(on_gpu, tmp_path, monkeypatch):
    (tmp_path / "bin" / "gcc").unlink()
    (tmp_path / "include" / "Python.h").unlink()
    with_triton(monkeypatch)
    assert bad(on_gpu) == []


def test_a_device_without_graphs(around):
    assert bad(dataclasses.replace(around, device=torch.device("mps"))) == ["GPU"]


def test_inductor_is_needed_and_says_what_it_lacks(around, monkeypatch):
    monkeypatch.setattr(type(BACKENDS["inductor"]), "available", lambda self, device: "Make room.")
    assert bad(around) == ["inductor"]
    assert fact(around, "inductor").remedy == "Make room."


def test_oneflow_may_be_missing(around, monkeypatch):
    monkeypatch.setattr(type(BACKENDS["oneflow"]), "available", lambda self, device: "OneFlow is not there.")
    assert bad(around) == []
    assert fact(around, "oneflow") == Fact("oneflow", "OneFlow is not there", present=False)


def test_float8_on_a_device_without_it_is_not_called_present(around, monkeypatch):
    monkeypatch.setattr(type(BACKENDS["inductor_fp8"]), "available", lambda self, device: "It needs Ada.")
    assert fact(around, "inductor_fp8") == Fact("inductor_fp8", "It needs Ada", present=False)
    assert fact(around, "inductor").present


def test_failing_check_hides_no_other_fact(on_gpu, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: unknown error\nand more")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert bad(on_gpu) == ["GPU"]
    assert fact(on_gpu, "GPU").text == "could not be examined (RuntimeError: CUDA error: unknown error)"


def test_the_store_says_its_place_size_and_limit(around, monkeypatch):
    spec = GraphSpec("Block", "cpu", (), (), (), (), (True,), "[1, {}]")
    FolderStore(around.store).put(StoredGraph("c" * 64, "ab", "[]", "eager", {}, spec, os.urandom(12_000_000)))
    monkeypatch.setenv("COMPILED_GRAPHS_STORE_LIMIT", "2.5")
    assert fact(around, "store").text == f"{around.store}, 1 graphs, 0.01 of 2.5 GB"


@pytest.mark.parametrize("place", ["{}/file", "{}/file/store", "nonsense://place"])
def test_a_place_that_cannot_be_a_store(around, tmp_path, place):
    (tmp_path / "file").touch()
    assert bad(dataclasses.replace(around, store=place.format(tmp_path))) == ["store"]


def test_a_store_that_cannot_be_written(around, tmp_path, monkeypatch):
    Trust().sign(b"")
    read_only(monkeypatch, tmp_path)
    assert bad(around) == ["store"]
    assert "Read-only file system" in fact(around, "store").text
    assert "COMPILED_GRAPHS_STORE" in fact(around, "store").remedy


def test_a_store_that_cannot_be_listed(around, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FolderStore, "_list", denied)
    assert bad(around) == ["store"]


def read_only(monkeypatch, folder):
    """Make a folder read-only. Permissions would not stop a root user who runs the tests."""
    original = tempfile.TemporaryFile

    def refuse(**options):
        if Path(options["dir"]).is_relative_to(folder):
            raise OSError(30, "Read-only file system")
        return original(**options)

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)


def test_key_fact_counts_trusted_files(around):
    Trust().sign(b"")
    Trust().add(io.BytesIO(b"somebody else's file"))
    assert fact(around, "key file") == Fact("key file", f"{Trust().folder / 'key'}, 1 trusted files")


@POSIX
def test_a_key_that_others_can_read(around):
    Trust().sign(b"")
    (Trust().folder / "key").chmod(0o644)
    assert bad(around) == ["key file"]
    assert "0644" in fact(around, "key file").text
    command = fact(around, "key file").remedy.split(",")[0]
    subprocess.run(command, shell=True, env={"PATH": os.defpath}, check=True)
    assert bad(around) == []


def test_a_key_of_another_length(around):
    Trust().folder.mkdir()
    (Trust().folder / "key").write_bytes(b"short")
    (Trust().folder / "key").chmod(0o600)
    assert bad(around) == ["key file"]


def test_a_key_that_cannot_be_made(around, tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPILED_GRAPHS_TRUST", str(tmp_path / "file" / "trust"))
    assert bad(around) == ["key file"]
    assert "COMPILED_GRAPHS_TRUST" in fact(around, "key file").remedy


def test_a_folder_in_the_place_of_the_key(around):
    (Trust().folder / "key").mkdir(parents=True)
    assert bad(around) == ["key file"]


@pytest.fixture
def comfyui(tmp_path, monkeypatch):
    """Make a ComfyUI on disk with this package in it. Return the package's folder."""
    package = tmp_path / "ComfyUI" / "custom_nodes" / "compiled-graphs"
    package.mkdir(parents=True)
    monkeypatch.delenv("COMPILED_GRAPHS_STORE", raising=False)
    return package


def test_comfyui_on_disk_says_its_version_and_store(comfyui):
    (comfyui.parents[1] / "comfyui_version.py").write_text('# made by a release\n__version__ = "0.3.64"\n')
    found = on_disk(comfyui)
    assert found.host == f"0.3.64, in {comfyui.parents[1]}"
    assert found.store == str(comfyui.parents[1] / "user" / "compiled_graphs")


def test_comfyui_of_2024_has_its_version_in_pyproject(comfyui):
    (comfyui.parents[1] / "pyproject.toml").write_text('[project]\nname = "ComfyUI"\nversion = "0.2.3"\n')
    assert on_disk(comfyui).host.startswith("0.2.3, ")


@pytest.fixture
def apart(comfyui, tmp_path):
    """Put ComfyUI's code elsewhere than the folders that --base-directory names. Return the code's folder."""
    code = tmp_path / "code"
    (code / "custom_nodes").mkdir(parents=True)
    (code / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    return code


def test_code_that_is_not_beside_its_folders_is_not_guessed_at(around, comfyui, apart, tmp_path, monkeypatch):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_facts, "_installed", str)
    found = on_disk(comfyui)
    told = fact(dataclasses.replace(around, host=found.host, host_known=found.host_known), "ComfyUI")
    assert told.ok
    assert not told.present
    assert str(comfyui.parents[1]) in told.text
    assert "--comfyui" in told.text
    assert "version" not in told.text


@pytest.mark.parametrize("way", ["named", "variable", "folder", "path", "link"])
def test_code_apart_from_its_folders_is_found(comfyui, apart, tmp_path, monkeypatch, way):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.chdir(apart if way == "folder" else tmp_path)
    monkeypatch.setattr(sys, "path", [str(apart)] if way == "path" else [])
    if way == "variable":
        monkeypatch.setenv("COMFYUI_PATH", str(apart))
    if way == "link":
        (apart / "custom_nodes" / comfyui.name).mkdir()
        comfyui.rmdir()
        comfyui.symlink_to(apart / "custom_nodes" / comfyui.name)
    found = on_disk(comfyui, apart if way == "named" else None)
    assert found.host == f"0.33.0, in {apart}, with its folders in {comfyui.parents[1]}"
    assert found.host_known
    assert found.store == str(comfyui.parents[1] / "user" / "compiled_graphs")


def test_the_folders_of_a_package_outside_of_custom_nodes_can_be_named(tmp_path, apart, monkeypatch):
    found = on_disk(tmp_path / "site-packages" / "compiled_graphs", apart, tmp_path / "base", tmp_path / "users")
    assert found.store == str(tmp_path / "users" / "compiled_graphs")
    assert found.extensions == ()


def test_the_environment_names_the_store(comfyui, monkeypatch):
    monkeypatch.setenv("COMPILED_GRAPHS_STORE", "memory://graphs")
    assert on_disk(comfyui).store == "memory://graphs"


def test_store_without_comfyui_is_that_of_pipelines(tmp_path, monkeypatch):
    from compiled_graphs.compiler.hosts.diffusers import pipeline

    monkeypatch.delenv("COMPILED_GRAPHS_STORE", raising=False)
    found = on_disk(tmp_path / "site-packages" / "compiled_graphs")
    assert found.store == pipeline.registry().cache.store.place
    assert found.extensions == ()


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("comfyui-kjnodes", "KJNodes"),
        ("ComfyUI-KJNodes", "KJNodes"),
        ("Comfy-WaveSpeed", "WaveSpeed"),
        ("onediff_comfy_nodes", "OneDiff"),
        ("ComfyUI_TensorRT", "TensorRT"),
        ("ComfyUI_stable_fast", "stable-fast"),
    ],
)
def test_compiling_extensions_are_known_by_folder(around, comfyui, folder, name):
    (comfyui.parent / folder).mkdir()
    found = fact(dataclasses.replace(around, extensions=on_disk(comfyui).extensions), name)
    assert found.ok
    assert found.text.startswith(f"{folder}: ")


def test_disabled_extensions_and_files_do_not_count(around, comfyui):
    (comfyui.parent / "comfyui-kjnodes.disabled").mkdir()
    (comfyui.parent / ".onediff").mkdir()
    (comfyui.parent / "tensorrt.py").touch()
    found = fact(dataclasses.replace(around, extensions=on_disk(comfyui).extensions), "other compilers")
    assert found.text == "none known among 1 extensions"
