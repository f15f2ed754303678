"""Graphs made before anybody asks for them: `bake`, and bundles.

`bake` starts a ComfyUI of its own and has it run the part of each workflow that ends in a compiled model. So the graphs
have the keys that a server asks for later.
"""
