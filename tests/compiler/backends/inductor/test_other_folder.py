"""Artifacts of another machine, whose kernels keep their choices in this machine's folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from artifact_doubles import Bundle, Graph, Kernel, Launcher, artifact, graph_in
from compiled_graphs.compiler.backends.inductor import other_folder
from compiled_graphs.compiler.backends.inductor.other_folder import in_this_folder
from compiled_graphs.compiler.common import torch_compat

autotune_cache = pytest.importorskip("torch._inductor.runtime.autotune_cache")
CHOICE = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=4, num_stages=1, extra_options={})

pytestmark = pytest.mark.skipif(
    bool(torch_compat.missing(torch_compat.BytesReader, torch_compat.BytesWriter)), reason="artifacts of an older torch"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """This machine's folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    return tmp_path / "here"


@pytest.fixture
def forbidden(tmp_path):
    """A folder of another machine that cannot be made: a file has its name."""
    (tmp_path / "there").write_text("")
    return tmp_path / "there"


def kernel_of(folder, forms=2):
    """A kernel as torch would have compiled it in a folder, with torch's own object that keeps its choice."""
    filename = str(folder / "ab" / "cabc.py")
    keeper = autotune_cache.AutotuneCache.create({}, filename, "configs")
    return Kernel(compile_results=[SimpleNamespace()] * forms, filename=filename, save_cache_hook=keeper.save)


def data_of(*kernels):
    bundle = Bundle([], [Launcher(f"key{i}", kernel) for i, kernel in enumerate(kernels)])
    return artifact(Graph(source_code="", _triton_bundle=bundle))


def kernels_in(data):
    return [launcher.kernel for launcher in graph_in(data)._triton_bundle.static_autotuners]


def test_a_choice_is_kept_where_this_machine_looks_for_it(folder, forbidden):
    data = data_of(kernel_of(forbidden))
    with pytest.raises(OSError, match="there"):
        kernels_in(data)[0].save_cache_hook(CHOICE, 10**6)
    (kernel,) = kernels_in(in_this_folder(data))
    kernel.save_cache_hook(CHOICE, 10**6)
    assert kernel.filename == str(folder / "ab" / "cabc.py")
    (kept,) = Path(folder, "ab").glob("*.best_config")
    found = autotune_cache.AutotuneCache.create({}, kernel.filename, "configs")._read()
    assert found["XBLOCK"] == 64
    assert kept.name.removesuffix(".best_config") in kernel.save_cache_hook.__self__.local_cache[1]


def test_a_folder_of_another_system_is_named_anew(folder):
    path = other_folder._path_in(str(folder), r"C:\Users\somebody\torchinductor\ab\cabc.py")
    assert path == str(folder / "ab" / "cabc.py")


def test_what_was_compiled_here_and_what_has_one_form_stays_as_it_is(folder, forbidden):
    for data in (data_of(kernel_of(folder)), data_of(kernel_of(forbidden, forms=1)), artifact(Graph())):
        assert in_this_folder(data) is data


@pytest.mark.parametrize("what", ["nothing to read", "other fields"])
def test_what_is_not_understood_stays_as_it_is(what, folder, forbidden, caplog):
    kernel = kernel_of(forbidden)
    kernel.save_cache_hook = print
    data = b"bytes" if what == "nothing to read" else data_of(kernel)
    with caplog.at_level("INFO"):
        assert in_this_folder(data) is data
    assert "where they were compiled" in caplog.text
