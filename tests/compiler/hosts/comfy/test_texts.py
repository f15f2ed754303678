"""What a node says of a compiled model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from compiled_graphs.compiler.common.reason import Reason, ReasonCode
from compiled_graphs.compiler.common.timing import Gain
from compiled_graphs.compiler.common.words import translations
from compiled_graphs.compiler.hosts.comfy.texts import counts_text, duration, gain_text, in_words, status_text
from compiled_graphs.compiler.runtime.summary import Summary

FRESH = Summary(
    **{"regions": 14, "compiled": 14, "variants": 14, "eager": 0, "waiting": 0, "from_memory": 0, "from_disk": 0},
    **{"from_file": 0, "compiles": 14, "seconds": 55.2, "reasons": (), "loaded": 0, "compiled_here": ("ResBlock",)},
)
LOADED = replace(FRESH, compiles=0, from_disk=14, seconds=1.23)
HOOK = Reason(ReasonCode.HOOK)
PARTIAL = replace(
    FRESH, compiled=12, eager=2, reasons=(HOOK,), regions_by_reason={HOOK: ("ResBlock", "SpatialTransformer")}
)
FASTER = Gain(1.62, True)


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        (FRESH, "Ready: 14 of 14 block types compiled (55 s, once per model type)."),
        (LOADED, "Ready (loaded from disk, 1.2 s)."),
        (replace(LOADED, from_disk=0, from_memory=14, seconds=0.0), "Ready (loaded from memory, 0.1 s)."),
        (
            replace(FRESH, compiles=4, from_disk=10),
            "Ready: 14 of 14 block types compiled (10 loaded from disk; 55 s, once per model type).",
        ),
        (replace(FRESH, compiled=0, waiting=14), "Compiled when the model first runs: 14 block types."),
        (
            replace(FRESH, compiled=0, waiting=14, calls_blocks=False),
            "Not compiled: this model runs the parts of its blocks one by one, and never a whole block.",
        ),
        (
            PARTIAL,
            "Ready: 12 of 14 block types compiled (55 s, once per model type). 2 block types run at normal speed:\n"
            "Not compiled: res block, spatial transformer. Another extension has changed these blocks, so its version "
            "of them runs. (a hook on a module inside the region)",
        ),
    ],
)
def test_how_a_model_stands(summary, text):
    assert status_text(summary) == text


def test_a_file_is_named_with_what_it_lacks():
    assert (
        status_text(replace(FRESH, compiles=0, loaded=14, compiled_here=()), "sdxl")
        == "Ready: 14 of 14 block types loaded from sdxl (55 s)."
    )
    assert status_text(replace(FRESH, compiles=1, loaded=13), "sdxl").splitlines() == [
        "Ready: 13 of 14 block types loaded from sdxl, 1 compiled here (55 s).",
        "Not in the file, compiled here: res block.",
    ]


def test_what_compiles_in_the_background_says_how_far_it_is():
    text = status_text(replace(FRESH, compiled=3, waiting=11), is_busy=True)
    assert text.startswith("Compiling in the background: 3 of 14 block types done. The model runs at normal speed")


@pytest.mark.parametrize(
    ("gain", "samples", "text"),
    [
        (Gain(1.62, True), True, "About 1.6x faster per step."),
        (Gain(2.3, True), False, "About 2.3x faster."),
        (Gain(0.8, True), True, "About 1.2x slower per step."),
        (Gain(0.5, True), False, "About 2.0x slower."),
        (Gain(1.9, False), True, "The compiled blocks run about 1.9x faster."),
        (Gain(0.5, False), True, "The compiled blocks run about 2.0x slower."),
        (Gain(1.01, True), True, "About as fast as without this node."),
    ],
)
def test_a_gain_is_said_and_so_is_a_loss(gain, samples, text):
    assert gain_text(gain, samples) == text


def test_only_a_gain_that_was_measured_is_said():
    assert "faster" not in status_text(FRESH, samples=True)
    assert status_text(replace(FRESH, gain=FASTER), samples=True).endswith("). About 1.6x faster per step.")


@pytest.mark.parametrize("summary", [FRESH, LOADED, PARTIAL, replace(FRESH, gain=FASTER)])
def test_the_chinese_has_no_english_but_names(summary):
    chinese = translations(status_text(summary, samples=True))["zh"]
    named = ("res block", "spatial transformer")
    assert re.findall("[A-Za-z]{3,}", re.sub("|".join(named), "", chinese)) == []


def test_counts_are_for_the_log():
    assert counts_text(replace(FRESH, from_memory=3)) == (
        "14 regions, 14 compiled (14 graphs, 3 from memory), 0 eager, 0 waiting, 55.2 s"
    )


@pytest.mark.parametrize(("seconds", "text"), [(0.01, "0.1 s"), (1.23, "1.2 s"), (55.2, "55 s"), (200, "3 min")])
def test_a_duration_has_no_more_digits_than_needed(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("SpatialTransformer (input_blocks.4.1)", "spatial transformer"),
        ("ResBlock (middle_block.0)", "res block"),
        ("AutoencoderKL", "autoencoder kl"),
        ("UNetMidBlock3D (decoder.up_blocks.0)", "unet mid block 3d"),
    ],
)
def test_regions_in_words(label, words):
    assert in_words(label) == words
