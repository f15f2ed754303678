"""What a worker process is told about this ComfyUI."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys

import pytest
import torch
from compiled_graphs.compiler.hosts.comfy import worker_setup


@pytest.fixture
def extension(tmp_path):
    """An extension's package, loaded as `nodes.load_custom_node` does it: under its path as a name."""
    folder = tmp_path / "my-layers.v2"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import layers\n")
    (folder / "layers.py").write_text("from .sizes import WIDTH\nclass Layer:\n    width = WIDTH\n")
    (folder / "sizes.py").write_text("WIDTH = 8\n")
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    yield package
    forget(name)


def forget(name):
    for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[module]


def test_classes_of_extensions_are_found_by_their_names(extension):
    sent = pickle.dumps(extension.layers.Layer)
    given = pickle.loads(worker_setup.setup("eager", torch.device("cpu")).arguments)
    forget(extension.__name__)
    with pytest.raises(ModuleNotFoundError):
        pickle.loads(sent)
    worker_setup.adopt(given.packages)
    assert pickle.loads(sent).width == 8


def test_a_package_that_is_there_is_left_alone(extension):
    worker_setup.adopt({extension.__name__: ["elsewhere"]})
    assert sys.modules[extension.__name__] is extension


def test_a_worker_imports_no_text_encoders():
    """Asking for the format of a UNet's block imported the model patcher: 6 s for each of eight processes."""
    code = (
        "import pickle, sys; path, given = pickle.loads(sys.stdin.buffer.read()); sys.path[:] = path\n"
        "from compiled_graphs.compiler.hosts.comfy import worker_setup\n"
        "host = worker_setup.make_host(pickle.loads(given))\n"
        "import comfy.ops\n"
        "from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock\n"
        "from compiled_graphs.compiler.identity.fingerprint import fingerprint\n"
        "fingerprint(ResBlock(32, 32, 0.0, operations=comfy.ops.disable_weight_init), host)\n"
        "sys.exit('imported' if 'comfy.model_patcher' in sys.modules else 0)\n"
    )
    sent = pickle.dumps((sys.path, worker_setup.setup("eager", torch.device("cpu")).arguments))
    subprocess.run([sys.executable, "-c", code], input=sent, check=True, timeout=300)
