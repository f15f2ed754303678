from __future__ import annotations

import json
from pathlib import Path

import pytest
from compiled_graphs.baking.workflow import WorkflowError, ancestors, to_prompt

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
SEED = ["INT", {"default": 0, "control_after_generate": True}]
TYPES = {
    "Load": {"input": {"required": {"name": [["a", "b"]]}}, "output": ["MODEL", "VAE"]},
    "Change": {"input": {"required": {"model": ["MODEL"], "by": ["FLOAT", {}]}}, "output": ["MODEL"]},
    "Sample": {
        "input": {
            "required": {"seed": SEED, "model": ["MODEL"], "steps": ["INT", {}]},
            "optional": {"scale": ["FLOAT", {"forceInput": True}], "way": ["COMBO", {"options": ["x"]}]},
        },
        "output": ["LATENT"],
    },
}


def node(name, kind, links=None, values=(), mode=0, outputs=("MODEL", "VAE")):
    inputs = [{"name": key, "type": key.upper(), "link": link} for key, link in (links or {}).items()]
    shown = [{"name": kind, "type": kind} for kind in outputs]
    given = {"inputs": inputs, "outputs": shown, "widgets_values": list(values)}
    return {"id": name, "type": kind, "mode": mode, **given}


def saved(nodes, links, **more):
    return {"nodes": nodes, "links": [[*link, "MODEL"] for link in links], **more}


LOAD = node(1, "Load", values=["b"])
SAMPLE = node(3, "Sample", {"model": 2}, [7, "randomize", 20, "x"])
SAMPLED = {"seed": 7, "steps": 20, "way": "x"}


def test_widgets_are_named_and_the_one_after_a_seed_is_left_out():
    prompt = to_prompt(saved([LOAD, node(3, "Sample", {"model": 2}, [7, "fixed", 20, "x"])], [[2, 1, 0, 3, 0]]), TYPES)
    assert prompt == {
        "1": {"class_type": "Load", "inputs": {"name": "b"}},
        "3": {"class_type": "Sample", "inputs": {**SAMPLED, "model": ["1", 0]}},
    }


@pytest.mark.parametrize(
    ("middle", "expected"),
    [
        (node(2, "Change", {"model": 1}, [0.5], outputs=["MODEL"]), ["2", 0]),
        (node(2, "Change", {"model": 1}, [0.5], mode=4, outputs=["MODEL"]), ["1", 0]),
        (node(2, "Reroute", {"model": 1}, outputs=["MODEL"]), ["1", 0]),
        (node(2, "Change", {"model": 1}, [0.5], mode=2, outputs=["MODEL"]), None),
        (node(2, "PrimitiveNode", values=[3]), 3),
    ],
    ids=["a node", "bypassed", "a reroute", "muted", "a value"],
)
def test_what_stands_between_two_nodes_passes_on_what_the_frontend_says(middle, expected):
    links = [[1, 1, 0, 2, 0], [2, 2, 0, 3, 0]]
    prompt = to_prompt(saved([LOAD, middle, SAMPLE], links), TYPES)
    assert prompt["3"]["inputs"].get("model") == expected


def test_a_subgraph_is_opened():
    inner = {
        "id": "sub",
        "nodes": [node(5, "Change", {"model": 10, "by": 11}, [0.1], outputs=["MODEL"])],
        "links": [
            {"id": 10, "origin_id": -10, "origin_slot": 0, "target_id": 5, "target_slot": 0, "type": "MODEL"},
            {"id": 11, "origin_id": -10, "origin_slot": 1, "target_id": 5, "target_slot": 1, "type": "FLOAT"},
            {"id": 12, "origin_id": 5, "origin_slot": 0, "target_id": -20, "target_slot": 0, "type": "MODEL"},
        ],
        "outputNode": {"id": -20},
    }
    use = node(2, "sub", {"model": 1, "by": None}, [0.9], outputs=["MODEL"])
    use["inputs"][1]["widget"] = {"name": "by"}
    links = [[1, 1, 0, 2, 0], [2, 2, 0, 3, 0]]
    prompt = to_prompt(saved([LOAD, use, SAMPLE], links, definitions={"subgraphs": [inner]}), TYPES)
    assert prompt["2:5"] == {"class_type": "Change", "inputs": {"by": 0.9, "model": ["1", 0]}}
    assert prompt["3"]["inputs"]["model"] == ["2:5", 0]


def test_a_subgraph_in_itself_is_refused():
    inner = {"id": "sub", "nodes": [node(5, "sub")], "links": [], "outputNode": {"id": -20}}
    with pytest.raises(WorkflowError, match="contains itself"):
        to_prompt(saved([node(2, "sub")], [], definitions={"subgraphs": [inner]}), TYPES)


def test_only_what_leads_to_an_end_is_kept():
    prompt = to_prompt(saved([LOAD, SAMPLE, node(4, "Load", values=["a"])], [[2, 1, 0, 3, 0]]), TYPES)
    assert ancestors(prompt, ["3"]).keys() == {"1", "3"}


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"a": 1}', '{"nodes": 1}', '{"nodes": [{}]}', '{"nodes": [1], "links": [2]}']
)
def test_what_is_no_workflow_is_one_sentence(text):
    with pytest.raises(WorkflowError) as refused:
        to_prompt(json.loads(text), TYPES)
    assert "\n" not in str(refused.value)


def test_the_examples_are_the_prompts_that_the_frontend_makes_of_them(server):
    """Each example exists in both forms; the frontend wrote the prompts."""
    types = server.get("/object_info")
    compared = 0
    for path in sorted(WORKFLOWS.glob("*.json")):
        wanted = json.loads((WORKFLOWS / "api" / f"{path.stem[3:].lower().replace(' ', '_')}.json").read_text())
        if all(each["class_type"] in types for each in wanted.values()):
            made = to_prompt(json.loads(path.read_text(encoding="utf-8")), types)
            assert {name: _essence(each, types) for name, each in made.items()} == {
                name: _essence(each, types) for name, each in wanted.items()
            }
            compared += 1
    assert compared > 4


def _essence(each, types):
    """Return a node with the inputs that its class has. A prompt may leave out what has a default."""
    described = types[each["class_type"]]["input"].get("required", {})
    return each["class_type"], {key: value for key, value in each["inputs"].items() if key in described}
