"""The folders are the architecture: which module may import which is read off them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = (
    *("baking", "nodes", "web_server", "hosts", "registry", "runtime", "compile_cache"),
    *("storage", "backends", "tracing", "identity", "common"),
)
"""A module imports from its own folder and from those to its right. Entry points import anything."""
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "nodes", "server"}
COMPAT = "compiler/common/torch_compat/__init__"
PUBLIC = {"torch", "torch.nn", "torch.ops"}
"""Modules that are everybody's, though they have names in them that are not."""
WITHOUT_TORCH = [f"compiler/backends/oneflow/{name}" for name in ("operators", "instances", "serve", "version")]


@cache
def modules() -> dict[str, Path]:
    """Return every module that is not empty, by its path without .py."""
    inside = [
        path for folder in ("baking", "nodes", "web_server", "compiler") for path in (ROOT / folder).rglob("*.py")
    ]
    paths = [path for path in (*ROOT.glob("*.py"), *inside) if path.read_text(encoding="utf-8").strip()]
    return {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(paths)}


def floor(module: str) -> int:
    """Return the place of a module's folder in FLOORS; -1 for an entry point."""
    folders = module.removeprefix("compiler/").split("/")[:-1]
    return FLOORS.index(folders[0]) if folders else -1


@cache
def imports(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules that a module imports, and the full names of the other modules that it imports."""
    near, far = set(), set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            far |= {alias.name for alias in node.names}
        elif not node.level:
            far.add(node.module)
        else:
            parts = module.split("/")[: -node.level] + (node.module.split(".") if node.module else [])
            near |= {found for alias in node.names if (found := module_of([*parts, alias.name]))}
    return frozenset(near - {module}), frozenset(far)


def module_of(parts: list[str]) -> str | None:
    """Return the module that `from PARTS import NAME` reaches: that name, or the one that defines it."""
    for path in ("/".join(parts), "/".join(parts[:-1])):
        for name in (path, f"{path}/__init__".lstrip("/")):
            if name in modules():
                return name
    return None


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module):
    wrong = sorted(target for target in imports(module)[0] if floor(target) < floor(module))
    assert not wrong, f"{module} imports {wrong}: imports go from left to right in {FLOORS}"


def test_the_compiler_has_folders_only():
    assert [path.name for path in (ROOT / "compiler").glob("*.py") if path.read_text(encoding="utf-8").strip()] == []
    folders = {path.name for path in (ROOT / "compiler").iterdir() if any(path.glob("*.py"))}
    assert folders == set(FLOORS) - {"baking", "nodes", "web_server"}


def test_modules_do_not_import_each_other_in_a_circle():
    waiting, done = {module: set(imports(module)[0]) for module in modules()}, set()
    while free := {module for module, targets in waiting.items() if targets <= done}:
        done |= free
        waiting = {module: targets for module, targets in waiting.items() if module not in free}
    assert waiting == {}


def test_tests_mirror_the_folders():
    """Tests of a folder are in the folder of the same name, so that its path runs them."""
    here = ROOT / "tests"
    folders = {path.parent.relative_to(here) for path in here.rglob("test_*.py")} - {Path(".")}
    assert [folder.as_posix() for folder in folders if not any((ROOT / folder).glob("*.py"))] == []


def test_the_page_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    made = re.compile(r"\..*|__pycache__|build|dist|.*\.egg-info")
    folders = [path.name for path in ROOT.iterdir() if not made.fullmatch(path.name) and _has_files(path)]
    assert [name for name in sorted({*folders, *FLOORS}) if f"{name}/" not in text] == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_on_the_page_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|js|md|sh))`", text) if "/" in name}
    assert named
    assert [name for name in sorted(named) if not any((ROOT / at / name).exists() for at in ("", "compiler"))] == []


def _has_files(path: Path) -> bool:
    """Whether a folder has files. A ComfyUI of 2024 makes an empty folder for pictures wherever it is started."""
    return path.is_dir() and any(each.is_file() for each in path.rglob("*"))


def first(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", sorted(modules()))
def test_the_rules_of_imports(module):
    _, far = imports(module)
    assert "compiled_graphs" not in first(far)
    assert "diffusers" not in first(far)
    if not module.startswith(("nodes/", "web_server/", "compiler/hosts/comfy/")):
        assert first(far) & COMFYUI == set()
    if module.startswith(("nodes/", "web_server/")):
        assert COMPAT not in imports(module)[0]
    if module in WITHOUT_TORCH:
        assert "torch" not in first(far)


@cache
def names_of_torchs_own() -> tuple[frozenset[str], frozenset[str]]:
    """Return the modules that torch_compat.py takes names from, and the attributes with a leading underscore."""
    paths = re.findall(r'"(torch[\w.]*):([\w.()]*)"', modules()[COMPAT].read_text(encoding="utf-8"))
    attributes = {part.removesuffix("()") for _, path in paths for part in path.split(".")}
    return (
        frozenset(module for module, _ in paths) - PUBLIC,
        frozenset(name for name in attributes if name.startswith("_")) - {"_C"},
    )


def torchs_own(tree: ast.AST) -> Iterator[str]:
    """Yield what a module mentions of torch's own: imports, attributes, and names in strings that are no docstrings."""
    modules, attributes = names_of_torchs_own()
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            found = [ast.unparse(node)]
            if node.attr in attributes:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            found = [node.value]
            if node.value in attributes:
                yield node.value
        yield from (name for name in found if name in modules or re.match(r"torch\.([a-z]\w*\.)*_[a-zA-Z]", name))


@pytest.mark.parametrize("module", sorted(set(modules()) - {COMPAT}))
def test_one_file_mentions_what_torch_calls_its_own(module):
    found = sorted(set(torchs_own(ast.parse(modules()[module].read_text(encoding="utf-8")))))
    assert found == [], f"take {found} from {COMPAT}.py, which has a guard for each name"


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor",
        "from torch.utils import _pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "torch._C._cuda_releasePool(device, pool)",
        "tensor._version",
        'getattr(module, "_compiled_call_impl", None)',
        'import_module("torch._inductor.compile_fx")',
        "torch.ops.aten._to_copy",
    ],
)
def test_each_way_to_mention_it_is_seen(line):
    assert list(torchs_own(ast.parse(line)))
    assert not list(torchs_own(ast.parse(repr(f"of {line}"))))


def test_imports_are_read_correctly():
    """Test the reader itself: each form of an import is found in a module that uses it."""
    assert imports("__init__")[0] == {"nodes/__init__"}
    assert {"compiler/hosts/comfy/graph_folder", "compiler/hosts/comfy/compile"} <= imports("nodes/graph_files")[0]
    assert "compiler/hosts/comfy/request" in imports("nodes/compile_model")[0]  # for types alone
    assert "compiler/common/jobs" in imports("compiler/backends/oneflow/worker_process")[0]
    assert "folder_paths" in imports("compiler/hosts/comfy/doctor_facts")[1]
