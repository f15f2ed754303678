"""What an error says, for people."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return text that cannot steer a terminal nor break what prints it, as names in a foreign file could."""
    return "".join(character if character.isprintable() else "?" for character in text)
