"""The command line: `python -m compiled_graphs trust FILE`.

Where the extension is not installed as a package, run `python -m FOLDER trust FILE` in `custom_nodes`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .compiler.graph_file import GraphFileError, read_manifest
from .compiler.trust import Trust


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="compiled_graphs")
    commands = parser.add_subparsers(required=True, dest="command")
    trust = commands.add_parser("trust", help="let this machine run the graphs of a file that another one made")
    trust.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        data = options.file.read_bytes()
        count = len(read_manifest(data))
    except (OSError, GraphFileError) as error:
        print(f"{options.file} cannot be trusted: {error}", file=sys.stderr)
        return 1
    print(f"{options.file.name}, {count} graphs, is trusted by its SHA-256 {Trust().add(data)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
