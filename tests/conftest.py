"""Marks for what a test needs. `scripts/test.sh fast` and CI select tests by them."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

NEEDS = {
    "server": "starts a ComfyUI server: it has the fixture `start_server`",
    "compiler": "has Inductor compile: it has the fixture `cpp_compiler`",
    "comfyui": "runs ComfyUI, in a server or here: it has that fixture, or is in compiler/hosts/comfy",
    "oneflow": "runs graphs with OneFlow, on the CPU",
    "slow": "takes long, and is left out by CI: slow.txt lists it",
}
SLOW = tuple(
    line for line in Path(__file__).with_name("slow.txt").read_text("utf-8").splitlines() if not line.startswith("#")
)
COMPILERS = {"g++", "gcc", "c++", "cc", "clang", "clang++", "cl", "cl.exe"}
END = float(os.environ.get("COMPILED_GRAPHS_TESTS_END", "inf"))
"""When no further test begins, in seconds since 1970. CI sets it: a slow machine then runs fewer tests, and says so."""
TOO_LATE = "the time for tests is over"
_running: list[pytest.Item] = []
"""The test that is running, if any."""


def pytest_configure(config: pytest.Config) -> None:
    for name, reason in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {reason}")
    sys.addaudithook(_refuse_unmarked_compilers)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures and folders, so that nobody can forget a mark."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        in_here = Path(__file__).parent / "compiler" / "hosts" / "comfy" in item.path.parents
        needed = {
            "server": "start_server" in fixtures,
            "compiler": "cpp_compiler" in fixtures,
            "comfyui": "start_server" in fixtures or in_here,
            "slow": item.nodeid.startswith(SLOW),
        }
        for name in (name for name, is_needed in needed.items() if is_needed):
            item.add_marker(name)
    _skip_without_oneflow(items)
    _order_by_length(items)


SECONDS = {"server": 8.0, "compiler": 6.0, "oneflow": 3.0, "comfyui": 1.5}
"""What a test with such a mark takes, about. Any other takes OTHERS."""
STARTS_PROCESSES = {"test_fleet.py": 30.0, "test_ray.py": 30.0, "test_worker_pool.py": 5.0}
"""What a test in such a file takes, about."""
OTHERS = 0.2


def _order_by_length(items: list[pytest.Item]) -> None:
    """Put files that take long first: one that begins last would keep one core busy alone for minutes.

    With an end they come last: most files are run before it then.
    """
    lengths: Counter[Path] = Counter()
    for item in items:
        marked = [seconds for mark, seconds in SECONDS.items() if item.get_closest_marker(mark)]
        lengths[item.path] += max(*marked, OTHERS, STARTS_PROCESSES.get(item.path.name, OTHERS))
    items.sort(key=lambda item: lengths[item.path], reverse=math.isinf(END))


@pytest.fixture(scope="session")
def cpp_compiler() -> None:
    """Skip the test if Inductor has no C++ compiler that it can use."""
    import torch
    from compiled_graphs.compiler.backends.inductor import InductorBackend

    if reason := InductorBackend().available(torch.device("cpu")):
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > END:
        pytest.skip(TOO_LATE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def _refuse_unmarked_compilers(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail an unmarked test at the moment at which it starts a C++ compiler in this process."""
    if event != "subprocess.Popen" or not _running or _running[-1].get_closest_marker("compiler"):
        return
    line = arguments[1]
    program = Path(str(arguments[0] or (line[0] if isinstance(line, (list, tuple)) else line.split()[0]))).name
    if program in COMPILERS and "-c" in map(str, line if isinstance(line, (list, tuple)) else line.split()):
        raise AssertionError("this test has Inductor compile: give it the fixture cpp_compiler")


def _skip_without_oneflow(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("oneflow")]
    reason = _missing_oneflow() if marked else None
    for item in marked if reason else []:
        item.add_marker(pytest.mark.skip(reason=f"OneFlow: {reason}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests ran OneFlow, and how many there was no time for."""
    late = [r for r in terminalreporter.getreports("skipped") if TOO_LATE in str(r.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were not run: {TOO_LATE}.")
    outcomes = {name: terminalreporter.getreports(name) for name in ("passed", "failed", "skipped")}
    # A file that is skipped as a whole has a report without keywords.
    outcomes = {name: [r for r in reports if hasattr(r, "keywords")] for name, reports in outcomes.items()}
    marked = {name: [r for r in reports if "oneflow" in r.keywords] for name, reports in outcomes.items()}
    if missing := [r for r in marked["skipped"] if "Skipped: OneFlow: " in str(r.longrepr)]:
        terminalreporter.write_line(f"OneFlow: {len(missing)} tests skipped. {missing[0].longrepr[2][18:]}")
    elif any(marked.values()):
        terminalreporter.write_line(f"OneFlow: {len(marked['passed']) + len(marked['failed'])} tests ran")


def _missing_oneflow() -> str | None:
    import torch
    from compiled_graphs.compiler.backends.oneflow import OneFlowBackend

    if torch.cuda.is_available():
        return "OneFlow 0.9.0 and this torch see different GPUs, so these tests run only without a GPU."
    return OneFlowBackend().available(torch.device("cpu"))
