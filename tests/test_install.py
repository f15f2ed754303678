"""Tests of what people install: metadata, the archive, portable file names, and an import without side effects."""

from __future__ import annotations

import contextlib
import io
import json
import ntpath
import os
import posixpath
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PureWindowsPath

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).resolve().parents[1]
COMFYUI = os.environ.get("COMFYUI_PATH", "")
sys.path.insert(0, str(ROOT / "scripts"))

import release  # noqa: E402
from release import ReleaseError  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, COMFY = PYPROJECT["project"], PYPROJECT["tool"]["comfy"]

git = pytest.mark.skipif(
    not (shutil.which("git") and (ROOT / ".git").exists()), reason="not a git checkout: which files are tracked?"
)


# Metadata


def test_the_name_is_one_that_the_registry_takes():
    assert re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9]){1,98}", PROJECT["name"])
    assert "comfyui" not in PROJECT["name"]


def test_versions_are_semantic_and_agree():
    import compiled_graphs

    assert release.version() == compiled_graphs.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", release.version())


def test_differing_versions_are_named_with_their_files(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "__init__.py", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## [{PROJECT['version']}]", "## [9.9.9]"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(ReleaseError, match=r"CHANGELOG.md says 9\.9\.9"):
        release.version()


def test_requirements_are_the_same_for_comfyui_and_for_pip():
    assert (ROOT / "requirements.txt").read_text().split() == PROJECT["dependencies"]


def test_every_package_is_installed_by_pip():
    folders = {
        path.parent.relative_to(ROOT)
        for room in ("baking", "nodes", "web_server", "compiler")
        for path in (ROOT / room).rglob("*.py")
    }
    packages = {".".join(["compiled_graphs", *folder.parts]) for folder in folders}
    assert packages | {"compiled_graphs"} == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_unknown_fields_are_absent_or_placeholders():
    told = " ".join(release.missing_to_publish())
    assert ("PublisherId" in told) == ("placeholder" in COMFY["PublisherId"])
    assert ("Repository" in told) == ("urls" not in PROJECT)
    assert all(COMFY.get(field, "https://").startswith("https://") for field in ("Icon", "Banner"))
    assert "web" not in COMFY  # WEB_DIRECTORY is set as well, and ComfyUI would load the modules twice


def test_comfy_cli_reads_the_metadata_without_a_warning(capsys):
    registry = pytest.importorskip("comfy_cli.registry", reason="comfy-cli is not installed")
    config = registry.extract_node_configuration(str(ROOT / "pyproject.toml"))
    assert "arning" not in "".join(capsys.readouterr())
    assert (config.project.name, config.project.version) == (PROJECT["name"], PROJECT["version"])
    assert config.project.supported_os == ["Microsoft :: Windows", "POSIX :: Linux", "MacOS"]
    assert config.project.supported_accelerators == ["GPU :: NVIDIA CUDA"]
    assert config.project.supported_comfyui_version == COMFY["requires-comfyui"]
    assert config.project.license.text == "Apache-2.0"
    assert config.tool_comfy.publisher_id
    assert config.tool_comfy.display_name


def test_fields_have_the_form_that_comfy_cli_asks_for():
    systems = [name for name in PROJECT["classifiers"] if name.startswith("Operating System :: ")]
    assert [name.split(" :: ")[1] for name in systems] == ["Microsoft", "POSIX", "MacOS"]
    accelerators = [name for name in PROJECT["classifiers"] if name.startswith("Environment :: ")]
    assert accelerators == ["Environment :: GPU :: NVIDIA CUDA"]
    assert re.fullmatch(r"(?:[<>=!~]=?)\d+\.\d+\.\d+", COMFY["requires-comfyui"])
    assert PROJECT["license"] == "Apache-2.0"
    assert COMFY["PublisherId"]
    assert COMFY["DisplayName"]


# The archive


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return release.build(tmp_path_factory.mktemp("dist"))


@git
def test_archive_holds_only_what_the_nodes_need(archive):
    names = set(zipfile.ZipFile(archive).namelist())
    assert archive.name == f"{PROJECT['name']}-{PROJECT['version']}.zip"
    assert {"__init__.py", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"} <= names
    assert {"nodes/__init__.py", "web_server/routes.py", "web/compiled_graphs.js"} <= names
    assert "compiler/runtime/compiled_model.py" in names
    assert "workflows/01 Text to image.json" in names
    assert not [name for name in names if name.startswith(("tests/", ".ci/", "benchmarks/")) and name.endswith(".py")]
    assert not [name for name in names if "__pycache__" in name or name.startswith(".")]


@git
def test_the_archive_is_the_same_for_the_same_files(archive, tmp_path):
    assert release.build(tmp_path).read_bytes() == archive.read_bytes()


@git
def test_no_link_of_the_readme_leads_out_of_the_archive(archive):
    names = set(zipfile.ZipFile(archive).namelist())
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if posixpath.normpath(link) not in names] == []


@git
def test_comfy_cli_would_pack_the_same_files(archive, tmp_path, monkeypatch):
    packer = pytest.importorskip("comfy_cli.file_utils", reason="comfy-cli is not installed")
    if release._git("ls-files", "--others", "--exclude-standard"):
        pytest.skip("comfy-cli packs what is tracked, and something here is not yet")
    monkeypatch.chdir(ROOT)
    packer.zip_files(str(tmp_path / "node.zip"), includes=COMFY["includes"])
    assert sorted(zipfile.ZipFile(tmp_path / "node.zip").namelist()) == zipfile.ZipFile(archive).namelist()


@git
def test_the_security_check_of_comfy_cli_finds_nothing():
    """`comfy node validate` looks at every file here, tests too, whatever .comfyignore leaves out of the archive."""
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    names = [name for name in release._git("ls-files", "-z", "*.py").split("\0") if (ROOT / name).is_file()]
    command = [ruff, "check", "-q", "--isolated", "--select", "S102,S307,E702", "--output-format", "json"]
    found = json.loads(subprocess.run([*command, *names], cwd=ROOT, capture_output=True, check=False).stdout)
    assert [(line["filename"], line["code"], line["location"]["row"]) for line in found] == []


@git
def test_a_tree_with_changes_is_not_released(tmp_path, monkeypatch, capsys):
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("pyproject.toml", "__init__.py", "CHANGELOG.md", ".comfyignore"):
        shutil.copy(ROOT / name, repository)
    run = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*run, *command], check=True)
    monkeypatch.setattr(release, "ROOT", repository)
    assert release.main(["--out", str(tmp_path / "dist")]) == 0
    assert "3 files" in capsys.readouterr().out
    (repository / "__init__.py").write_text("changed")
    assert release.main(["--out", str(tmp_path / "dist")]) == 1
    assert "__init__.py: commit first" in capsys.readouterr().err


def test_without_git_the_script_says_so_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.main([]) == 1
    assert "which files are tracked" in capsys.readouterr().err


# Names and files on Windows, Linux and macOS

DEVICES = {"con", "prn", "aux", "nul", "conin$", "conout$"}
DEVICES |= {f"{port}{digit}" for port in ("com", "lpt") for digit in "123456789¹²³"}
MAX_PATH = 260
"""Characters of a path on Windows without long paths, including the final NUL."""


def windows_refuses(name):
    """Whether Windows refuses a file of this name, by the rules of Python 3.13's ntpath.isreserved."""
    device = name.split(".")[0].rstrip(" ").lower()
    bad = any(character in '<>:"/\\|?*' or ord(character) < 32 for character in name)
    return bad or name[-1:] in (".", " ") or device in DEVICES


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("graphs_00001_.graph.safetensors", False),
        ("con.graph.safetensors", True),
        ("Aux", True),
        ("COM1.lock", True),
        ("com10.lock", False),
        ("a:b", True),
        ("trailing.", True),
        ("trailing ", True),
        ("a\\b", True),
        (".abcd.partial", False),
    ],
)
def test_the_rule_for_windows_names(name, refused):
    assert windows_refuses(name) == refused
    if hasattr(ntpath, "isreserved") and ntpath.basename(name) == name:  # isreserved takes paths, not just names
        assert windows_refuses(name) == ntpath.isreserved(name)


@git
def test_every_file_can_be_checked_out_on_windows_and_macos():
    names = [name for name in release._git("ls-files", "-z").split("\0") if name]
    assert [name for name in names if any(map(windows_refuses, name.split("/")))] == []
    assert len({name.lower() for name in names}) == len(names)


@pytest.fixture
def store(tmp_path):
    from compiled_graphs.compiler.storage.store import FolderStore
    from compiled_graphs.compiler.storage.trust import Trust

    return FolderStore(tmp_path / "store", Trust(tmp_path / "trust"))


def graph(number, size=1000):
    from compiled_graphs.compiler.identity.call_signature import CallSignature, graph_key
    from compiled_graphs.compiler.identity.graph_spec import GraphSpec
    from compiled_graphs.compiler.storage.graph_file import StoredGraph

    spec = GraphSpec("Block", "cpu", (), (), (), (), (True,), "[1, {}]")
    key = graph_key("fingerprint", CallSignature("[]", None, (), ()), [[number]], {})
    return StoredGraph(key, "fingerprint", "[]", "eager", {}, spec, os.urandom(size))


def test_written_names_work_on_windows_and_differ_beyond_case(store, tmp_path, monkeypatch):
    from compiled_graphs.compiler.common import files

    written = set()

    def noted(source, target):
        written.update((Path(source).name, Path(target).name))
        return os.rename(source, target)

    monkeypatch.setattr(files.os, "replace", noted)
    for number in range(50):
        stored = graph(number)
        with store.exclusive(stored.key):
            assert store.put(stored)
    store._trust.add(io.BytesIO(b"a file"))
    written |= {path.name for path in tmp_path.rglob("*")}
    assert len([name for name in written if name.endswith(".partial")]) == 50
    assert {"key", "trusted", "compiled_graphs.locks"} < written
    assert [name for name in written if windows_refuses(name)] == []
    assert len({name.lower() for name in written}) == len(written)


def test_store_path_fits_into_windows_limit():
    place = PureWindowsPath(r"C:\Users\somebody with a long name\Documents\ComfyUI_windows_portable\ComfyUI\user")
    assert len(str(place / "compiled_graphs" / f"{graph(1).key}.graph.safetensors")) < MAX_PATH


@pytest.fixture
def windows_files(monkeypatch):
    """Apply a rule of Windows on Linux: an open file can be neither replaced, removed nor renamed."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to find open files")
    moved = []

    def watch(name):
        original = getattr(os, name)

        def watched(*paths, **options):
            for path in paths:
                if os.path.realpath(path) in open_files():
                    raise PermissionError(13, "The process cannot access the file because it is being used", path)
            moved.append(name)
            return original(*paths, **options)

        monkeypatch.setattr(os, name, watched)

    for name in ("replace", "rename", "link", "unlink", "remove"):
        watch(name)
    return moved


def open_files():
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def test_the_rule_refuses_what_windows_would(windows_files, tmp_path):
    path = tmp_path / "file"
    with path.open("wb"), pytest.raises(PermissionError):
        os.replace(path, tmp_path / "other")
    with path.open("rb"), pytest.raises(PermissionError):
        path.unlink()
    path.unlink()


def test_a_store_closes_what_it_replaces_and_removes(store, windows_files):
    stored = graph(1)
    assert store.put(stored)
    assert store.get(stored.key) == stored
    assert store.put(stored)
    assert [entry.name for entry in store.shrink(0)] == [f"{stored.key}.graph.safetensors"]
    assert store.put(stored)
    assert len(store.clear()) == 1
    assert windows_files.count("replace") == 3
    assert windows_files.count("link") == 1  # the key


@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_graph_open_elsewhere_stays_and_leaves_no_partial_file(store, windows_files, step):
    stored = graph(1)
    store.put(stored)
    path = store.folder / f"{stored.key}.graph.safetensors"
    before = path.read_bytes()
    with path.open("rb"):
        if step == "replace":
            assert not store.put(stored)
        else:
            assert store.shrink(0) == []
    assert path.read_bytes() == before
    assert [path.name for path in store.folder.iterdir() if path.is_file()] == [path.name]
    assert store.get(stored.key) == stored


# Import

_PRELUDE = """
import json, os, sys, threading, time
sys.argv = ["comfyui"]
if comfyui:
    sys.path.insert(0, comfyui)
import aiohttp, numpy, safetensors.numpy, torch
import comfy.cli_args
comfy.cli_args.args.cpu = not torch.cuda.is_available()
if not comfyui:
    comfy.cli_args.args.cwd = home
if comfyui:
    import utils.extra_config
    import folder_paths, nodes, server
else:
    from comfy.cmd import execution, folder_paths, server
    import comfy.nodes.base_nodes
    sys.modules.update(folder_paths=folder_paths, server=server)
"""
_IMPORT = """
import importlib.util
before, threads, events = set(sys.modules), threading.active_count(), []
ACTIONS = ("os.mkdir", "os.rename", "os.remove", "os.link", "subprocess.Popen", "socket.connect", "socket.bind",
           "_thread.start_new_thread", "_thread.start_joinable_thread", "tempfile.mkstemp")

def hook(event, arguments):
    if event in ACTIONS or event == "open" and isinstance(arguments[2], int) and arguments[2] & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT
    ):
        events.append([event, *map(str, arguments)])

sys.addaudithook(hook)
calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count)
spec = importlib.util.spec_from_file_location("compiled-graphs", os.path.join(folder, "__init__.py"))
module = importlib.util.module_from_spec(spec)
sys.modules["compiled-graphs"] = module
spec.loader.exec_module(module)
assert hasattr(module, "NODE_CLASS_MAPPINGS") or hasattr(module, "comfy_entrypoint")
nodes = len(sys.modules["compiled-graphs.nodes"].NODE_CLASS_MAPPINGS)
sys.setprofile(None)
result = {
    "calls": calls, "nodes": nodes, "events": list(events),
    "threads": threading.active_count() - threads,
    "modules": sorted(set(sys.modules) - before),
}
open(os.devnull, "w").close()
print(json.dumps(result | {"is watched": len(events) > len(result["events"])}))
"""
HEAVY = ("torch._inductor", "torch._dynamo", "triton", "transformers", "diffusers", "oneflow")


def python(script, **names):
    """Run a script in its own process, which writes no bytecode. Return the JSON of its last line."""
    given = "".join(f"{name} = {str(value)!r}\n" for name, value in names.items())
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OTEL_SDK_DISABLED": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", given + script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def heavy(modules):
    return [name for name in modules if any(name == part or name.startswith(f"{part}.") for part in HEAVY)]


@pytest.mark.comfyui
def test_import_of_the_nodes_is_cheap_and_has_no_effects(tmp_path):
    result = python(_PRELUDE + _IMPORT, comfyui=COMFYUI, folder=ROOT, home=tmp_path)
    assert result["is watched"]
    assert result["nodes"] >= 5
    assert result["calls"] < 25_000  # the import makes 20,000 calls, and ComfyUI waits for them
    # The package index's ComfyUI makes each folder of models that an extension registers.
    assert [event for event in result["events"] if not event[1].startswith(str(tmp_path / "models"))] == []
    assert result["threads"] == 0
    assert heavy(result["modules"]) == []


def test_import_of_the_compiler_imports_no_inductor():
    script = """
import importlib, json, pkgutil, sys
sys.path[:0] = json.loads(paths)
import compiled_graphs.compiler as package
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if "hosts" not in module.name and "oneflow." not in module.name:
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
    modules = python(script, paths=json.dumps(sys.path))
    assert "compiled_graphs.compiler.tracing.export" in modules
    assert heavy(modules) == []
