"""Weights that ComfyUI brings to the device when a layer runs: dynamic VRAM (0.18 on), and its low-VRAM modes.

`streamed_weights.py` is the page to read first. A region's weights come

- from their pages (`vbar_places.py`), if those are filled;
- from a copy that stays for the sampling (`kept_weights.py`);
- through a ring of GPU memory (`staging_ring.py`);
- by ComfyUI's own functions (`casts.py`).

`prefetcher.py` has those of the next regions brought meanwhile. `kept_tensors.py` sees to the addresses of what has
arrived, `channels_last.py` to its layout. `pins.py` and `hidden_errors.py` know what ComfyUI does with pinned memory,
and with errors, that would make an image wrong.
"""
