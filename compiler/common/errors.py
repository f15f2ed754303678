"""Turning errors and foreign text into one line for people."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return text without control characters: a foreign file's names could steer a terminal or break its lines."""
    return "".join(character if character.isprintable() else "?" for character in text)
