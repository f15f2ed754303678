"""The nodes a person drags. One module per family; what they do is in `compiler.hosts.comfy`."""

from . import routes
from .compile_model import CompileModel

NODE_CLASS_MAPPINGS = {"CG_CompileModel": CompileModel} if routes.register() else {}
NODE_DISPLAY_NAME_MAPPINGS = {"CG_CompileModel": "Compile Model"}
