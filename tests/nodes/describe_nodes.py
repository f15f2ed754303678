"""Print as JSON what ComfyUI reads from each node's class, and what the validators start.

This script needs its own process: it imports the nodes without ComfyUI, with a stand-in for `folder_paths`.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import make_locales

FIELDS = (
    *("CATEGORY", "FUNCTION", "RETURN_TYPES", "RETURN_NAMES", "OUTPUT_NODE", "DEPRECATED"),
    *("OUTPUT_TOOLTIPS", "DESCRIPTION", "SEARCH_ALIASES"),
)


def describe(node, title):
    """Return a node's definition, with its inputs in order, because saved workflows identify values by their order."""
    inputs = {group: list(fields.items()) for group, fields in node.INPUT_TYPES().items()}
    return {"title": title, "inputs": inputs, **{name: getattr(node, name) for name in FIELDS if hasattr(node, name)}}


def started_by_validators(nodes):
    """Call each node's validator. Return the threads that it started and the modules that it loaded."""
    before, loaded = set(threading.enumerate()), set(sys.modules)
    for node in nodes.values():
        if validate := getattr(node, "VALIDATE_INPUTS", None):
            count = validate.__code__.co_argcount
            names = validate.__code__.co_varnames[1:count]
            assert validate(**{name: "auto" if name == "backend" else "x" for name in names}) is True
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread not in before],
        "loaded": [name for name in sys.modules if name not in loaded and "compiled_graphs" in name],
    }


def left_to_validator(node):
    """Return the inputs that ComfyUI does not check itself: those that the node's validator takes."""
    validate = getattr(node, "VALIDATE_INPUTS", None)
    return list(inspect.signature(validate).parameters) if validate else []


if __name__ == "__main__":
    nodes, titles = make_locales._nodes()
    definitions = {name: describe(node, titles[name]) for name, node in nodes.items()}
    left = {name: left_to_validator(node) for name, node in nodes.items()}
    validators = started_by_validators(nodes)
    print(json.dumps({"definitions": definitions, "validators": validators, "left_to_validator": left}))
