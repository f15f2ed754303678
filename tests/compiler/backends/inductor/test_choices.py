"""Choices of kernels that travel with an artifact; torch's own object (AutotuneCache) keeps them and finds them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from artifact_doubles import Bundle, Graph, Kernel, Launcher, artifact, graph_in
from compiled_graphs.compiler.backends.inductor import Artifact, artifacts, choices
from compiled_graphs.compiler.backends.inductor.float8 import Float8Executable
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.common.torch_compat import MissingName

autotune_cache = pytest.importorskip("torch._inductor.runtime.autotune_cache")
DEVICE = torch.device("cuda")
SOUND = json.dumps({"XBLOCK": 64, "num_warps": 4, "num_stages": 1, "configs_hash": "forms"})

pytestmark = pytest.mark.skipif(
    bool(torch_compat.missing(torch_compat.BytesReader, torch_compat.BytesWriter)), reason="artifacts of an older torch"
)


class Saved:
    """An artifact that torch has loaded, as far as it is used here. Its kernels may run."""

    def __init__(self, data):
        self.data = data

    def save(self, path, **_how):
        Path(path).write_bytes(self.data)


class Loader:
    """Looks for a choice of each kernel while it loads, as torch does."""

    @staticmethod
    def load(path, **_how):
        saved = Saved(Path(path).read_bytes())
        saved.found = [found_by(kernel) for kernel in kernels_in(saved.data)]
        return saved


@pytest.fixture(autouse=True)
def _torch_and_triton(monkeypatch):
    monkeypatch.setattr(artifacts, "CompiledArtifact", SimpleNamespace(get=lambda: Loader))
    monkeypatch.setattr(artifacts, "built_library", lambda: None)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Become a machine with a folder of its own. Returns that folder."""

    def machine(name):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    return machine


def form(size):
    return SimpleNamespace(kwargs={"XBLOCK": size}, num_warps=4, num_stages=1, extra_options={})


FORMS = [form(64), form(128)]


def kernel_of(folder, name="cabc", forms=2):
    """A kernel as torch compiles it in a folder."""
    filename = str(folder / name[1:3] / f"{name}.py")
    keeper = autotune_cache.AutotuneCache.create({}, filename, "forms")
    return Kernel(compile_results=[SimpleNamespace()] * forms, filename=filename, save_cache_hook=keeper.save)


def artifact_of(*kernels):
    bundle = Bundle([], [Launcher(f"key{i}", kernel) for i, kernel in enumerate(kernels)])
    return Saved(artifact(Graph(source_code="", _triton_bundle=bundle)))


def kernels_in(data):
    return [launcher.kernel for launcher in graph_in(data)._triton_bundle.static_autotuners]


def choose(saved, size=64, which=0):
    """Have a kernel make its choice, as its first call does."""
    kernels_in(saved.data)[which].save_cache_hook(form(size), 10**6)


def found_by(kernel, forms="forms"):
    """Return the size of the form that torch finds chosen in the kernel's folder, or None if it would time them."""
    found = autotune_cache.AutotuneCache.create({}, kernel.filename, forms).read_best({}, FORMS)
    return found and found.kwargs["XBLOCK"]


def members(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def with_choices(data, content):
    """Return an artifact's bytes with other choices, as somebody who may sign could write them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("artifact", members(data)["artifact"])
        archive.writestr("choices", content)
    return buffer.getvalue()


def test_a_machine_with_an_empty_folder_finds_the_choices_that_another_has_made(machine):
    saved = artifact_of(kernel_of(machine("one")), kernel_of(machine("one"), "cxyz"))
    choose(saved, 64, 0)
    choose(saved, 128, 1)
    data = Artifact(saved).to_bytes()
    assert len(json.loads(members(data)["choices"])) == 2
    machine("other")
    loaded = Artifact.load(data, DEVICE)
    assert loaded._artifact.found == [64, 128]
    assert not loaded.has_grown(data)
    machine("third")
    assert Artifact.load(loaded.to_bytes(), DEVICE)._artifact.found == [64, 128]


def test_bytes_are_out_of_date_once_a_kernel_has_chosen(machine):
    saved = artifact_of(kernel_of(machine("one")))
    compiled = Artifact(saved)
    before = compiled.to_bytes()
    assert list(members(before)) == ["artifact"]
    assert not compiled.has_grown(before)
    choose(saved)
    assert compiled.has_grown(before)
    assert compiled.has_grown()
    assert not compiled.has_grown(compiled.to_bytes())
    assert not Artifact.load(compiled.to_bytes(), DEVICE).has_grown()
    assert Artifact.load(before, DEVICE).has_grown()
    rounded = Float8Executable(compiled, is_rounded=True)
    assert rounded.has_grown()
    assert rounded.has_grown(b"\1" + before)
    assert not rounded.has_grown(rounded.to_bytes())


def test_kernels_of_one_form_choose_nothing(machine):
    saved = artifact_of(kernel_of(machine("one"), forms=1))
    choose(saved)
    assert list(members(Artifact(saved).to_bytes())) == ["artifact"]


def test_a_choice_that_is_there_stays_and_machines_do_not_replace_each_others(machine):
    saved = artifact_of(kernel_of(machine("one")))
    choose(saved, 64)
    data = Artifact(saved).to_bytes()
    machine("other")
    choose(Artifact.load(data, DEVICE)._artifact, 128)
    loaded = Artifact.load(data, DEVICE)
    assert loaded._artifact.found == [128]
    assert not loaded.has_grown(data)
    assert members(loaded.to_bytes())["choices"] == members(data)["choices"]


def test_a_choice_among_other_forms_is_none(machine):
    saved = artifact_of(kernel_of(machine("one")))
    choose(saved)
    data = Artifact(saved).to_bytes()
    machine("other")
    (kernel,) = kernels_in(Artifact.load(data, DEVICE)._artifact.data)
    assert (found_by(kernel), found_by(kernel, "other forms")) == (64, None)


@pytest.mark.parametrize("name", ["../ab/x.best_config", "ab/../../x.best_config", "/ab/x.best_config", "ab/x.py"])
@pytest.mark.parametrize("where", ["", "ab\\"])
def test_no_name_leads_anywhere_else(name, where, machine):
    data = Artifact(artifact_of(kernel_of(machine("one")))).to_bytes()
    content = json.dumps({where + name: SOUND})
    folder = machine("other") / "deep"
    machine("other/deep")
    Artifact.load(with_choices(data, content), DEVICE)
    assert not [path for path in folder.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", SOUND.replace("4", '"4"'), SOUND.replace("forms", "\\ud800") + " " * 3000, "[" * 900],
)
def test_a_choice_that_torch_could_not_read_is_not_put_there(text, machine):
    saved = artifact_of(kernel_of(machine("one")))
    (name,) = choices.names_of(saved.data)
    data = Artifact(saved).to_bytes()
    folder = machine("other")
    loaded = Artifact.load(with_choices(data, json.dumps({name: text, "ab/other.best_config": SOUND})), DEVICE)
    assert loaded._artifact.found == [None]
    assert [path.name for path in folder.rglob("*.best_config")] == ["other.best_config"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"ab/x.best_config": 1}', b"\xff", " " * (choices.MAX_BYTES + 1)])
def test_choices_that_are_none_are_left_out(content, machine):
    data = Artifact(artifact_of(kernel_of(machine("one")))).to_bytes()
    folder = machine("other")
    assert Artifact.load(with_choices(data, content), DEVICE)._artifact.found == [None]
    assert not list(folder.rglob("*.best_config"))


def test_a_folder_that_cannot_be_written_to_costs_a_timing(machine, caplog):
    saved = artifact_of(kernel_of(machine("one")))
    choose(saved)
    data = Artifact(saved).to_bytes()
    machine("other").write_text("a file has the folder's name")
    with caplog.at_level("INFO"):
        choices.put(choices.from_bytes(members(data)["choices"]))
    assert "were not put into Inductor's folder" in caplog.text


@pytest.mark.parametrize("name", ["write_atomic", "cache_dir"])
def test_a_torch_without_a_name_times_its_kernels(name, machine, take_away):
    saved = artifact_of(kernel_of(machine("one")))
    choose(saved)
    data = Artifact(saved).to_bytes()
    machine("other")
    take_away(getattr(torch_compat, name).path)
    assert Artifact.load(data, DEVICE)._artifact.found == [None] or name == "cache_dir"


def test_what_is_not_understood_has_no_choices(machine, caplog):
    machine("one")
    with caplog.at_level("INFO"):
        assert list(members(Artifact(Saved(b"of an older torch")).to_bytes())) == ["artifact"]
    assert "goes without its kernels' choices" in caplog.text


def test_a_check_at_sizes_of_nobodys_keeps_no_choice(machine):
    folder = machine("one")
    saved = artifact_of(kernel_of(folder))
    with choices.kept_by_nobody():
        choose(saved, 128)
    assert not list(folder.rglob("*.best_config"))
    choose(saved, 64)
    assert found_by(kernels_in(saved.data)[0]) == 64


def test_a_torch_without_that_name_is_checked_all_the_same(machine, take_away):
    saved = artifact_of(kernel_of(machine("one")))
    take_away(torch_compat.LocalAutotuneCache.path)
    with pytest.raises(MissingName):
        torch_compat.LocalAutotuneCache.get()
    with choices.kept_by_nobody():
        choose(saved)
