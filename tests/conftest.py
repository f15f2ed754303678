"""Tests of OneFlow, which has packages for older Pythons only: skipped where it is missing, and that is said."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "oneflow: runs graphs with OneFlow, on the CPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("oneflow")]
    reason = _missing() if marked else None
    for item in marked if reason else []:
        item.add_marker(pytest.mark.skip(reason=f"OneFlow: {reason}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests ran OneFlow."""
    outcomes = {name: terminalreporter.getreports(name) for name in ("passed", "failed", "skipped")}
    marked = {name: [r for r in reports if "oneflow" in r.keywords] for name, reports in outcomes.items()}
    if missing := [r for r in marked["skipped"] if "Skipped: OneFlow: " in str(r.longrepr)]:
        terminalreporter.write_line(f"OneFlow: {len(missing)} tests skipped. {missing[0].longrepr[2][18:]}")
    elif any(marked.values()):
        terminalreporter.write_line(f"OneFlow: {len(marked['passed']) + len(marked['failed'])} tests ran")


def _missing() -> str | None:
    import torch
    from compiled_graphs.compiler.backends.oneflow import OneFlowBackend

    if torch.cuda.is_available():
        return "OneFlow 0.9.0 and this torch see different GPUs, so its tests are for machines without one."
    return OneFlowBackend().available(torch.device("cpu"))
