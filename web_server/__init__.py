"""What the extension adds to ComfyUI's server: routes, events, and what is done when a prompt is queued.

The folder is not called `server`, because that is the name of ComfyUI's own module.
"""
