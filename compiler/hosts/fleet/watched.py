"""A program of its own: runs a command, and ends it when whoever started this has gone, however it went.

Its standard input is a pipe from that process, which the operating system closes. It imports nothing of this package.
"""

import os
import subprocess
import sys
import threading

LIMIT = 30.0
"""Seconds that the command has to end by itself."""


def main() -> int:
    """Run the command, and return what it returned."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(process,), daemon=True).start()
    return process.wait()


def _end_with_parent(process: subprocess.Popen) -> None:
    while os.read(0, 1):  # not by `sys.stdin`: Python cannot end while a thread reads from that
        pass
    process.terminate()
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
