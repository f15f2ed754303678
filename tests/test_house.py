"""docs/house.md shows the house as it is: every room, and no import against the arrows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "house.md"
COMFYUI = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "nodes", "server"}
WITHOUT_TORCH = [f"compiler/backends/oneflow/{name}" for name in ("operators", "instances", "serve", "version")]


@cache
def rooms() -> dict[str, Path]:
    """Return every module that has something in it, by its path without .py."""
    inside = [path for folder in ("nodes", "compiler") for path in (ROOT / folder).rglob("*.py")]
    paths = [path for path in (*ROOT.glob("*.py"), *inside) if path.read_text(encoding="utf-8").strip()]
    return {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(paths)}


@cache
def page() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the box of each room in the page's diagram, and the arrows."""
    diagram = re.search(r"```mermaid\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    boxes, arrows, folder = {}, [], ""
    for line in map(str.strip, diagram.splitlines()):
        if subgraph := re.fullmatch(r'subgraph \w+\["(.+)/"\]', line):
            folder = "" if subgraph[1] == "." else f"{subgraph[1]}/"
        elif box := re.fullmatch(r'(\w+)\["<b>.+?</b>(.+)"\]', line):
            boxes |= {folder + name: box[1] for name in re.findall(r"[\w/]+", box[2].replace("<br/>", " "))}
        elif "-->" in line:
            names = [name.strip() for name in line.split("-->")]
            arrows += pairwise(names)
    return boxes, arrows


def statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a module, those in functions too, but not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from statements(node)


@cache
def imports(room: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the rooms that a room imports, and the full names of what it imports from elsewhere."""
    near, far = set(), set()
    for node in statements(ast.parse(rooms()[room].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            far |= {alias.name for alias in node.names}
        elif not node.level:
            far.add(node.module)
        else:
            parts = room.split("/")[: -node.level] + (node.module.split(".") if node.module else [])
            near |= {found for alias in node.names if (found := room_of([*parts, alias.name]))}
    return frozenset(near - {room}), frozenset(far)


def room_of(parts: list[str]) -> str | None:
    """Return the room of `from PARTS import NAME`: a module, a package, or the one that has the name in it."""
    for path in ("/".join(parts), "/".join(parts[:-1])):
        for name in (path, f"{path}/__init__".lstrip("/")):
            if name in rooms():
                return name
    return None


def reach(box: str, arrows: list[tuple[str, str]]) -> set[str]:
    """Return a box and all that arrows lead to from it."""
    found = {box}
    while more := {target for source, target in arrows if source in found} - found:
        found |= more
    return found


def test_every_room_is_on_the_page():
    boxes, _ = page()
    missing = sorted(rooms().keys() - boxes.keys())
    assert not missing, f"docs/house.md does not name {missing}: put each into the box where it belongs"


def test_every_name_on_the_page_is_a_room():
    boxes, _ = page()
    assert sorted(boxes.keys() - rooms().keys()) == []


@pytest.mark.parametrize("room", sorted(rooms()))
def test_no_import_points_against_the_arrows(room):
    boxes, arrows = page()
    if room not in boxes:
        pytest.skip("not on the page, which another test says")
    allowed = reach(boxes[room], arrows)
    wrong = sorted(target for target in imports(room)[0] if boxes.get(target, boxes[room]) not in allowed)
    assert not wrong, f"{room} imports {wrong}, and no arrow of docs/house.md leads there"


def test_arrows_do_not_run_in_a_circle():
    _, arrows = page()
    assert [(source, target) for source, target in arrows if source in reach(target, arrows)] == []


def test_every_arrow_is_there_for_an_import():
    boxes, arrows = page()
    used = {(boxes[room], boxes.get(target)) for room in boxes.keys() & rooms().keys() for target in imports(room)[0]}
    assert sorted(set(arrows) - used) == []


def _has_files(path: Path) -> bool:
    """Unlike the folder for pictures that a ComfyUI of 2024 makes wherever it is started."""
    return path.is_dir() and any(each.is_file() for each in path.rglob("*"))


def test_every_folder_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    made = re.compile(r"\..*|__pycache__|build|dist|.*\.egg-info")
    folders = [path.name for path in ROOT.iterdir() if not made.fullmatch(path.name) and _has_files(path)]
    assert [name for name in sorted(folders) if f"{name}/" not in text] == []


def first(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("room", sorted(rooms()))
def test_the_rules_of_imports(room):
    _, far = imports(room)
    assert "compiled_graphs" not in first(far)
    assert "diffusers" not in first(far)
    if not room.startswith(("nodes/", "compiler/hosts/comfy/")):
        assert first(far) & COMFYUI == set()
    if room.startswith("nodes/"):
        assert [name for name in far if name.startswith("torch._")] == []
    if room in WITHOUT_TORCH:
        assert "torch" not in first(far)


def test_what_is_read_is_what_is_there():
    """The reader itself: each way to write an import, on rooms that have it."""
    assert imports("__init__")[0] == {"nodes/__init__"}
    assert {"compiler/backends/__init__", "compiler/hosts/comfy/compile"} <= imports("nodes/graph_files")[0]
    assert {"compiler/hosts/comfy/synthetic_calls", "compiler/model"} <= imports("compiler/hosts/comfy/compile")[0]
    assert "compiler/model" not in imports("compiler/registry")[0]  # for types alone
    assert "compiler/jobs" in imports("compiler/backends/oneflow/worker_process")[0]
    assert "torch._inductor" in imports("compiler/backends/inductor")[1]
    assert "folder_paths" in imports("compiler/hosts/comfy/doctor_facts")[1]
