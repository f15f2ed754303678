"""What a worker process is told about this ComfyUI."""

from __future__ import annotations

import importlib.util
import pickle
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
