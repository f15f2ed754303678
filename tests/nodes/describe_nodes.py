"""Print as JSON what ComfyUI reads off each node's class, and what calling the validators starts.

A process of its own runs this: the nodes are imported without ComfyUI, by means of a stand-in for `folder_paths`.
"""

from __future__ import annotations

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
    """Return a node's definition. The order of its inputs is part of it: a saved workflow has values by their order."""
    inputs = {group: list(fields.items()) for group, fields in node.INPUT_TYPES().items()}
    return {"title": title, "inputs": inputs, **{name: getattr(node, name) for name in FIELDS if hasattr(node, name)}}


def started_by_validators(nodes):
    """Return the threads that run, and the modules that are loaded, once each node has been validated."""
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


if __name__ == "__main__":
    nodes, titles = make_locales._nodes()
    definitions = {name: describe(node, titles[name]) for name, node in nodes.items()}
    print(json.dumps({"definitions": definitions, "validators": started_by_validators(nodes)}))
