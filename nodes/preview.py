"""Pictures that a node shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import folder_paths

if TYPE_CHECKING:
    from PIL import Image


def save_preview(picture: Image.Image, prefix: str) -> dict[str, str]:
    """Save a picture among ComfyUI's temporary ones; return the reference by which the frontend finds it."""
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        prefix, folder_paths.get_temp_directory(), picture.width, picture.height
    )
    file = f"{name}_{counter:05}_.png"
    picture.save(os.path.join(folder, file))
    return {"filename": file, "subfolder": subfolder, "type": "temp"}
