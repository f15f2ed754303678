"""A process that samples architectures uncompiled: what it gives is what ComfyUI gives without this extension.

It reads lines of JSON: the row of the table, the sizes, and the file that gets the images. It answers each with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


class PlainProcess:
    """Such a process, seen from the tests."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets the images."""
        self._folder = folder
        paths = [str(HERE), str(HERE.parents[3].parent), os.environ.get("COMFYUI_PATH", "")]
        path = os.pathsep.join(each for each in [*paths, os.environ.get("PYTHONPATH", "")] if each)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def sample(self, name: str, sizes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return the image of a row at each of these sizes (`architectures.At`)."""
        path = self._folder / "images.pt"
        self._process.stdin.write(json.dumps({"name": name, "sizes": sizes, "path": str(path)}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "done", answer or "the process that samples uncompiled has ended"
        return torch.load(path)

    def stop(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def main() -> None:
    """Sample what the lines ask for, until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # ComfyUI prints
    sys.argv = sys.argv[:1]  # ComfyUI parses the command line on import
    import comfy.cli_args

    comfy.cli_args.args.cpu = not torch.cuda.is_available()
    from architectures import TABLE, At

    rows = {row.name: row for row in TABLE}
    for line in sys.stdin:
        asked = json.loads(line)
        row = rows[asked["name"]]
        patcher = row.patcher()
        torch.save([row.sample(patcher, At(*at)) for at in asked["sizes"]], asked["path"])
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
