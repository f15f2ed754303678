"""What an error says, for people."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
