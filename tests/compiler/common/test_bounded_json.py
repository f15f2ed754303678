from __future__ import annotations

import json
import random

import pytest
from compiled_graphs.compiler.common.bounded_json import MAX_CONTAINERS, MAX_DEPTH, parse

MEGABYTES = 8 * 2**20


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5, "text", 'a "quoted" \\" back\\slash\\\\', [], {}, {"a": [1, {"b": "[[{"}]}, "é", "😀"],
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_json_is_read_as_python_reads_it(value, is_ascii):
    assert parse(json.dumps([value, value], ensure_ascii=is_ascii).encode()) == [value, value]


def nested(depth, inside="0"):
    return ("[" * depth + inside + "]" * depth).encode()


def test_depth_ignores_brackets_in_strings():
    parse(nested(MAX_DEPTH))
    parse(nested(MAX_DEPTH, json.dumps('[[\\"[{')))
    for text in (nested(MAX_DEPTH + 1), nested(1_000_000), b'["a]]]]",' + nested(MAX_DEPTH) + b"]", b'{"":' * 17):
        with pytest.raises(ValueError, match=r"nested deeper|more lists"):
            parse(text)


def test_depth_bounds_what_the_parser_reaches():
    """Python's parser recurses as deep as the brackets before its first error. No text may get it below MAX_DEPTH."""
    chance = random.Random(7)
    reached = []
    for _ in range(3_000):
        text = bytearray(nested(chance.randrange(10, 24), json.dumps(["[[", '"{\\\\"', "a"])))
        for _ in range(chance.randrange(3)):
            text.insert(chance.randrange(len(text)), chance.choice(b'[]{}"\\,'))
        try:
            parse(bytes(text))
        except ValueError as error:
            if "nested" in str(error):
                continue
        reached.append(deepest_reached(bytes(text)))
    assert max(reached) == MAX_DEPTH


def deepest_reached(text):
    """Return the deepest nesting before the first error, found without recursion."""
    try:
        json.loads(text)
        end = len(text)
    except ValueError as error:
        end = error.pos
    depth = deepest = 0
    inside = escaped = False
    for character in text[:end].decode():
        if inside:
            inside = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            inside = True
        else:
            depth += (character in "[{") - (character in "]}")
            deepest = max(deepest, depth)
    return deepest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"nope", "not JSON"),
        (b"\xff\xfe[\0]\0", "not JSON"),
        (json.dumps("é").encode("utf-16"), "not JSON"),
        (b"\xef\xbb\xbf[]", "not JSON"),
        (b'["\xed\xa0\x80"]', "not JSON"),
        (b"[NaN]", "not JSON"),
        (b"[-Infinity]", "not JSON"),
        (b"[" + b"1" * 21 + b"]", "not JSON"),
        (b"[" + b"1" * MEGABYTES + b"]", "not JSON"),
        (b"[1." + b"1" * MEGABYTES + b"]", "not JSON"),
        (b"[" + b"[]," * (MEGABYTES // 3) + b"0]", "more values"),
        (b"[" + b'"",' * (MEGABYTES // 3) + b"0]", "more values"),
        (b"[" + b"[0]\n" * (MAX_CONTAINERS + 1) + b"]", "more lists"),
        (b"[" * MEGABYTES, "more lists"),
        (b'"' * MEGABYTES, "not JSON"),
        (b"\\" * MEGABYTES, "not JSON"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_costly_or_invalid_json_is_refused(text, words):
    with pytest.raises(ValueError, match=words) as error:
        parse(text)
    assert len(str(error.value)) < 100


def test_long_string_is_one_value():
    for text in ("a" * MEGABYTES, '"' * (MEGABYTES // 2), "\\" * (MEGABYTES // 2), "é" * 1000):
        assert parse(json.dumps([text]).encode()) == [text]
