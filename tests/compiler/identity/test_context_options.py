"""Options that record what a block reads from them."""

from __future__ import annotations

import pytest
import torch
from compiled_graphs.compiler.common.reason import Unsupported
from compiled_graphs.compiler.identity.context_options import TracedOptions, Unknown, decode_writes, encode_writes

KEY = "strength"


class Asker:
    key = "strength"

    def ask(self, options):
        return options.get(self.key)


@pytest.mark.parametrize(
    "ask",
    [
        lambda o: o.get(KEY),
        lambda o: o.get("strength", 1),
        lambda o: KEY in o,
        lambda o: Asker().ask(o),
        lambda o: o.get(f"{'str'}ength"),
        lambda o: o.copy().get("strength"),
        lambda o: o.setdefault("strength", None),
        lambda o: o.pop("strength", None),
        lambda o: [v for k, v in o.items() if k == "strength"],
        lambda o: [o[k] for k in o if k in ("strength", "block")],
        lambda o: (o | {"own": 1}).get("strength"),
    ],
    ids=["constant", "get", "in", "attribute", "f-string", "copy", "setdefault", "pop", "items", "iteration", "or"],
)
def test_every_kind_of_read_is_recorded(ask):
    options = TracedOptions({"known": 1}, ["block"])
    ask(options)
    assert options.reads == {"strength"}


def test_reads_of_present_options_are_not_recorded():
    options = TracedOptions({"known": 1}, ["block"])
    assert options["known"] == 1
    assert isinstance(options.get("block")[0], Unknown)
    assert options.reads == set()


@pytest.mark.parametrize(
    "depend",
    [
        lambda b: b == ("input", 1),
        lambda b: b[0] == "input",
        lambda b: b[1] > 2,
        lambda b: b in {("input", 1): 2},
        lambda b: f"{b[0]}",
        lambda b: torch.ones(1) * b[1],
        lambda b: 1 if b[1] else 2,
        lambda b: [*b],
        lambda b: int(b[1]),
        lambda b: (b[0], b[1], 0) in {("input", 1, 0)},
    ],
)
def test_code_that_depends_on_its_place_cannot_be_traced(depend):
    with pytest.raises((Unsupported, TypeError)):
        depend(TracedOptions({}, ["block"])["block"])


@pytest.mark.parametrize("look", [lambda o: [k for k in o if k.startswith("my_")], len, lambda o: [k[0] for k in o]])
def test_search_through_all_options_cannot_be_traced(look):
    with pytest.raises(Unsupported):
        look(TracedOptions({}, ["block"]))


def test_all_options_may_be_passed_on():
    options = TracedOptions({"known": 1}, ["block"])
    extra = {k: options[k] for k in options if k != "known"}
    assert isinstance(extra["block"], Unknown)
    assert options.reads == set()


def test_writes_are_decoded_with_the_sizes_of_the_call():
    options = TracedOptions({}, ["block_index"])
    options["activations_shape"] = [2, 320, 8, 8]
    options["block_index"] = 3
    text = encode_writes(options.writes(), lambda size: size)
    assert decode_writes(text, {}) == {"activations_shape": [2, 320, 8, 8], "block_index": 3}


def test_a_tensor_left_in_options_cannot_be_traced():
    options = TracedOptions({})
    options["mask"] = torch.ones(1)
    with pytest.raises(Unsupported, match="leaves a Tensor in the transformer option mask"):
        encode_writes(options.writes(), int)


def test_an_option_taken_out_cannot_be_traced():
    options = TracedOptions({"known": 1})
    del options["known"]
    with pytest.raises(Unsupported, match="removes the transformer option known"):
        options.writes()
