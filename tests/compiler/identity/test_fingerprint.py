from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import functools
import importlib.util
import os
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from compiled_graphs.compiler.common.host import Host
from compiled_graphs.compiler.common.reason import ReasonCode
from compiled_graphs.compiler.identity.fingerprint import Describer, fingerprint, string_constants_of, tensor_attributes
from generated import run_text
from networks import ConvolutionNetwork, ResidualBlock, TableBlock, TransformerBlock
from torch import nn

SOURCE = '''
import functools

import torch
from torch import nn

SCALE = 2.0
LIMITS = {"low": 1, "high": 9}

def double(x):
    return x * 2

def widen(x):
    return double(x) + 1

def traced(function):
    @functools.wraps(function)
    def run(*args):
        return function(*args)
    return run

@traced
def shrink(x):
    return x / 4

@torch.no_grad()
def negate(x):
    return -x

def unrelated(x):
    return x - 5

class Base(nn.Module):
    def norm(self, x):
        return x / x.norm()

class Block(Base):
    """A block."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.eps = 1e-6

    def forward(self, x, options=None):
        x = self.norm(widen(self.linear(x)))  # widen first
        if "patch" in (options or {}):
            x = negate(shrink(x))
        return x * SCALE * LIMITS["high"]
'''


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that imports an edited version of `SOURCE`, as a restart after the edit would."""

    def run(*edits, name="edited_blocks"):
        text = SOURCE
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = folder / "edited_blocks.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return run


def of(module, host=None):
    return fingerprint(module, host or Host())


def with_attribute(value):
    block = TransformerBlock()
    block.setting = value
    return block


@pytest.mark.parametrize(
    "edit",
    [
        ("self.norm(widen(self.linear(x)))", "self.norm(self.linear(x))"),
        ("return double(x) + 1", "return double(x) + 2"),
        ("return x * 2", "return x * 3"),
        ("return x / 4", "return x / 5"),
        ("return -x", "return -x * 2"),
        ("return x / x.norm()", "return x"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ('"high": 9', '"high": 8'),
        ("self.eps = 1e-6", "self.eps = 1e-5"),
        ("return function(*args)", "return -function(*args)"),
    ],
    ids=[
        "forward",
        "helper",
        "helper of helper",
        "decorated helper",
        "torch-decorated helper",
        "base",
        "global",
        "table",
        "eps",
        "decorator",
    ],
)
def test_edit_of_used_code_changes_fingerprint(load, edit):
    assert of(load(edit).Block()) != of(load().Block())


@pytest.mark.parametrize(
    "edit",
    [
        ("# widen first", "# another remark"),
        ('"""A block."""', '"""A block, described at length."""'),
        ('    """A block."""\n', ""),
        ("return x - 5", "return x - 6"),
        ("import functools\n", "import functools\nimport math\n\n\n"),
        ("        self.eps = 1e-6", "        self.eps = 1e-3 / 1e3"),
    ],
    ids=["comment", "docstring", "no docstring", "unrelated function", "lines above", "constructor"],
)
def test_edit_of_anything_else_keeps_fingerprint(load, edit):
    assert of(load(edit).Block()) == of(load().Block())


def reading_a_table(load, table):
    module = load(("return x * SCALE", "return x * SCALE * TABLE[0]"))
    module.TABLE = table
    return module.Block()


def test_a_small_table_that_code_reads_is_described_by_its_content(load):
    levels = torch.tensor([1.0, 2.0])
    described = of(reading_a_table(load, levels))
    assert of(reading_a_table(load, levels.clone())) == described
    assert of(reading_a_table(load, levels * 2)) != described
    assert of(reading_a_table(load, levels.to(torch.bfloat16))) != described


def test_a_change_within_a_table_is_seen(load):
    levels = torch.tensor([1.0, 2.0])
    describer, block = Describer(Host()), reading_a_table(load, levels)
    assert describer.describe(block).obscure is None
    assert describer.watch.holds()
    levels[1] = 3.0
    assert not describer.watch.holds()


@pytest.mark.parametrize(
    "table", [torch.zeros(1000), torch.zeros(2, requires_grad=True), torch.zeros(2, device="meta")]
)
def test_any_other_tensor_that_code_reads_makes_it_obscure(load, table):
    assert "a tensor outside parameters" in str(Describer(Host()).describe(reading_a_table(load, table)).obscure)


class Options(dict):
    """Parsed options in the form that some ComfyUI builds use."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Options, argparse.Namespace])
def test_only_command_line_options_that_are_read_matter(load, kind):
    reading = ("return x * SCALE", "return x * SCALE * (2 if options_of_host.upcast else 1)")

    def block(**options):
        module = load(reading)
        module.options_of_host = kind(**options)
        return of(module.Block())

    assert block(upcast=True, port=8188) == block(upcast=True, port=9000)
    assert block(upcast=True, port=8188) != block(upcast=False, port=8188)


@pytest.mark.parametrize("line", ["seen[x.shape] = 1", "seen.setdefault('a', 1)", "global seen; seen = {}"])
def test_code_that_writes_to_a_global_is_obscure(load, line):
    module = load(("x = self.norm(widen(self.linear(x)))", f"{line}; x = self.norm(widen(self.linear(x)))"))
    module.seen = {}
    assert Describer(Host()).describe(module.Block()).obscure.code is ReasonCode.GLOBAL_STATE


@pytest.mark.parametrize("folder", ["/opt/comfy/custom_nodes/blocks", "C:\\\\comfy\\\\custom_nodes\\\\My Blocks"])
def test_folder_of_an_extension_does_not_matter(load, folder):
    here = load(name="/home/me/custom_nodes/blocks.model")
    there = load(name=f"{folder}.model")
    assert of(here.Block()) == of(there.Block())


def test_replaced_helper_changes_fingerprint(load):
    module = load()
    before = of(module.Block())
    module.double = lambda x: x * 7
    assert of(module.Block()) != before


def test_replaced_forward_on_the_class_changes_fingerprint(load):
    module = load()
    before = of(module.Block())

    def forward(self, x, options=None):
        return self.linear(x)

    module.Block.forward = forward
    assert of(module.Block()) != before


def test_wrapped_forward_on_the_class_changes_fingerprint(load):
    module = load()
    before = of(module.Block())
    original = module.Block.forward

    @functools.wraps(original)
    def wrapper(self, x, options=None):
        return original(self, x * 2, options)

    module.Block.forward = wrapper
    assert of(module.Block()) != before


HELPER = """class Scaled:
    def __init__(self, x):
        self.x = x * SCALE

    def __enter__(self):
        return self.x

def unrelated(x):"""
CALL = ("widen(self.linear(x))", "widen(Scaled(self.linear(x)).__enter__())")


def test_a_constructor_that_runs_within_the_call_is_read(load):
    edits = ("def unrelated(x):", HELPER), CALL
    before = of(load(*edits).Block())
    assert of(load(*edits, ("self.x = x * SCALE", "self.x = double(x) * SCALE")).Block()) != before
    module = load(*edits)
    module.Scaled.__init__ = lambda self, x: setattr(self, "x", -x)
    assert of(module.Block()) != before


def test_what_every_import_changes_is_no_constant(load, monkeypatch):
    edits = ("SCALE = 2.0", "import sys\nSCALE = 2.0"), ("return double(x) + 1", "return double(x) + len(sys.modules)")
    block = load(*edits).Block()
    describer = Describer(Host())
    before = describer.describe(block)
    monkeypatch.setitem(sys.modules, "imported_since", types.ModuleType("imported_since"))
    assert describer.watch.holds()
    assert of(block) == before.fingerprint


def test_a_helper_in_infrastructure_is_not_followed(load):
    class Program(Host):
        infrastructure = ("edited_blocks",)

    assert of(load(("return x * 2", "return x * 3")).Block(), Program()) == of(load().Block(), Program())


PRINT_FINGERPRINTS = """
from compiled_graphs.compiler.identity.fingerprint import fingerprint
from compiled_graphs.compiler.common.host import Host
from networks import ResidualBlock, TransformerBlock
block = TransformerBlock()
block.features = {"rope", "bias", "gate", "shift", None, 3}
print(fingerprint(block, Host()), fingerprint(ResidualBlock(), Host()))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_fingerprint_is_the_same_in_every_process(seed):
    block = TransformerBlock()
    block.features = {"rope", "bias", "gate", "shift", None, 3}
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", PRINT_FINGERPRINTS], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [of(block), of(ResidualBlock())]


def test_equal_blocks_share_a_fingerprint():
    assert len({of(block) for block in ConvolutionNetwork(depth=3).blocks}) == 1


def test_weight_values_and_placement_do_not_matter():
    block = TransformerBlock()
    before = of(block)
    block.gate.fill_(3.0)
    assert of(block) == before
    assert of(block.to("meta")) == before


def test_requires_grad_does_not_matter():
    assert of(TransformerBlock().requires_grad_(False)) == of(TransformerBlock())


def test_hooks_and_an_instance_forward_do_not_matter():
    block = TransformerBlock()
    block.register_forward_hook(lambda *args: None)
    block.forward = lambda x: x
    assert of(block) == of(TransformerBlock())


@pytest.mark.parametrize(
    "changed",
    [
        lambda: TransformerBlock(eps=1e-5),
        lambda: TransformerBlock(heads=4),
        lambda: TransformerBlock(width=32),
        lambda: TransformerBlock().half(),
        lambda: TransformerBlock().eval(),
        lambda: _without_gate(),
    ],
    ids=["eps", "heads", "width", "dtype", "eval", "absent parameter"],
)
def test_configuration_changes_fingerprint(changed):
    assert of(changed()) != of(TransformerBlock())


def _without_gate():
    block = TransformerBlock()
    block.gate = None
    return block


def test_layout_of_a_weight_changes_fingerprint():
    assert of(ResidualBlock().to(memory_format=torch.channels_last)) != of(ResidualBlock())


def test_a_buffer_of_repeated_numbers_is_one_of_as_many_numbers():
    """A host that moves it to a GPU makes one of the other."""
    spread, filled = TableBlock(), TableBlock()
    filled.table = filled.table.clone()
    assert spread.table.stride() != filled.table.stride()
    assert of(spread) == of(filled)


def test_shape_of_a_buffer_changes_fingerprint():
    one, other = TransformerBlock(), TransformerBlock()
    one.register_buffer("table", torch.zeros(3))
    other.register_buffer("table", torch.zeros(4))
    assert of(one) != of(other)


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


@dataclasses.dataclass
class Settings:
    eps: float


def scaled_by(factor):
    def scale(x):
        return x * factor

    return scale


def shifted_by(amount):
    def shift(x, by=amount):
        return x + by

    return shift


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        (torch.float16, torch.bfloat16),
        (1, True),
        (nn.GELU, nn.SiLU),
        (torch.relu, torch.sigmoid),
        (np.float32(0.5), np.float32(0.25)),
        (2j, 3j),
        (Mode.FIRST, Mode.SECOND),
        (Settings(1e-5), Settings(1e-6)),
        (types.SimpleNamespace(eps=1e-5), types.SimpleNamespace(eps=1e-6)),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=1)),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clip, min=0)),
        (scaled_by(2), scaled_by(3)),
        (shifted_by(2), shifted_by(3)),
        (slice(1, 2), slice(1, 3)),
        (b"a", b"b"),
        ({"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 2}]}}),
        (TransformerBlock.forward, ResidualBlock.forward),
    ],
    ids=lambda value: type(value).__name__,
)
def test_different_settings_change_fingerprint(one, other):
    assert of(with_attribute(one)) == of(with_attribute(copy.copy(one)))
    assert of(with_attribute(one)) != of(with_attribute(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.device("cpu"), torch.device("meta")),
        (object(), object()),
    ],
    ids=["device", "identity"],
)
def test_equal_settings_keep_fingerprint(one, other):
    assert of(with_attribute(one)) == of(with_attribute(other))


def test_circular_setting_is_described():
    block = TransformerBlock()
    block.owner = types.SimpleNamespace(block=block)
    block.owner.itself = block.owner
    assert of(block) != of(TransformerBlock())


class Manager(Host):
    volatile_attributes = frozenset({"loaded_bytes"})


def test_a_volatile_attribute_of_the_host_does_not_matter():
    block = TransformerBlock()
    block.loaded_bytes = 1024.0
    assert of(block, Manager()) == of(TransformerBlock(), Manager())
    assert of(block) != of(TransformerBlock())


def test_strings_are_those_a_region_can_look_up(load):
    string_constants = string_constants_of(load().Block(), Host())
    assert {"patch", "high"} <= string_constants
    assert "A block." not in string_constants


def test_strings_come_from_helpers_and_submodules_too(load):
    module = load(("return x * 2", 'return x * {"factor": 2}["factor"]'))
    assert "factor" in string_constants_of(nn.Sequential(module.Block()), Host())


def test_class_without_source_has_a_fingerprint():
    text = "class Block(Base):\n    def forward(self, x):\n        return x * {}\n"
    blocks = [run_text(text.format(factor), {"Base": nn.Module})["Block"]() for factor in ("self.two", "self.three")]
    assert of(blocks[0]) != of(blocks[1])


def test_constants_of_a_class_without_source_matter():
    text = "class Block(Base):\n    def forward(self, x):\n        return x * {}\n"
    blocks = [run_text(text.format(factor), {"Base": nn.Module})["Block"]() for factor in (2, 3)]
    assert of(blocks[0]) != of(blocks[1])


def test_tensors_outside_parameters_and_buffers_are_named():
    block = TransformerBlock()
    block.register_buffer("known", torch.ones(1))
    assert tensor_attributes(block, Host()) == []
    block.table = torch.ones(1)
    block.mlp[0].scale = torch.ones(1)
    assert tensor_attributes(block, Host()) == ["table", "mlp.0.scale"]


def test_stand_in_for_a_method_does_not_matter():
    class NetworkWrapper:
        stands_in = True

    block = TransformerBlock()
    before = of(block)
    block.decode = NetworkWrapper()
    assert of(block) == before


def test_shared_objects_are_described_once():
    """Sixty levels that each hold the next one twice would fill any memory if they were written out."""
    shared = [1.0]
    for _ in range(60):
        shared = [shared, shared]
    block = TransformerBlock()
    block.setting = shared
    before = of(block)
    inner = shared
    while isinstance(inner[0], list):
        inner = inner[0]
    inner[0] = 2.0
    assert of(block) != before


def from_an_extension(name, source):
    """Return a function whose module is not a library."""
    return run_text(source, {"__name__": "extension", "CALLS": []})[name]


@pytest.mark.parametrize("owner", [nn.Module, torch, torch.nn.functional, torch.Tensor])
def test_uncalled_addition_to_torch_does_not_matter(owner, monkeypatch):
    """For instance, transformers adds a method to torch's modules that reads its own globals."""
    block = TransformerBlock()
    before = Describer(Host()).describe(block)
    helper = from_an_extension("smart_apply", "def smart_apply(self):\n    CALLS.append(self)\n")
    monkeypatch.setattr(owner, "smart_apply", helper, raising=False)
    assert Describer(Host()).describe(block) == before
    assert not before.obscure


class Helped(nn.Module):
    def forward(self, x):
        return self.helped(x)


class HelpedByName(nn.Module):
    def forward(self, x):
        return getattr(self, "helped")(x)  # noqa: B009


@pytest.mark.parametrize("kind", [Helped, HelpedByName])
def test_addition_to_torch_matters_where_it_is_called(kind, monkeypatch):
    twice = from_an_extension("helped", "def helped(self, x):\n    return x * 2\n")
    monkeypatch.setattr(nn.Module, "helped", twice, raising=False)
    before = of(kind())
    monkeypatch.setattr(nn.Module, "helped", from_an_extension("helped", "def helped(self, x):\n    return x * 3\n"))
    assert of(kind()) != before


def numbered(load, result, base="Base", made="", attribute="layer_id"):
    """Return two blocks that differ in a number only."""
    module = load(
        ("import functools", "import functools\nfrom operator import attrgetter"),
        ("def unrelated(x):", "def attribute(block, name):\n    return getattr(block, name)\n\ndef unrelated(x):"),
        ("class Block(Base):", f"class Block({base}):"),
        ("def __init__(self, width=4):", "def __init__(self, number, width=4):"),
        ("super().__init__()", f"super().__init__({made})"),
        ("self.eps = 1e-6", f"self.{attribute} = number"),
        ("self.norm(widen(self.linear(x)))", "widen(self.linear(x))"),
        ('return x * SCALE * LIMITS["high"]', f"return {result}"),
    )
    return module.Block(0), module.Block(1)


def test_a_number_that_no_code_reads_is_no_difference(load):
    one, other = numbered(load, "x * 2")
    assert of(one) == of(other)


@pytest.mark.parametrize(
    "result",
    [
        "x * self.layer_id",
        "x * getattr(self, 'layer_id')",
        "x * getattr(self, 'layer' + '_id')",
        "x * attribute(self, chr(108) + 'ayer_id')",
        "x * vars(self)[chr(108) + 'ayer_id']",
        "x * self.__dict__[chr(108) + 'ayer_id']",
        "x * sum(v for v in vars(self).values() if type(v) is int)",
        "x * attrgetter(chr(108) + 'ayer_id')(self)",
        "x * int('{0.layer_id}'.format(self))",
        "x * next(map(getattr, [self], [chr(108) + 'ayer_id']))",
        "x * functools.partial(getattr, self)(chr(108) + 'ayer_id')",
        "x * object.__getattribute__(self, chr(108) + 'ayer_id')",
    ],
)
def test_a_number_that_code_may_read_is_a_difference(load, result):
    one, other = numbered(load, result)
    assert of(one) != of(other)


def test_a_private_number_that_code_reads_is_a_difference(load):
    one, other = numbered(load, "x * self.__id", attribute="__id")
    assert of(one) != of(other)


def test_a_number_of_a_librarys_class_is_a_difference(load):
    one, other = numbered(load, "x", "nn.Linear", "4, 4")
    assert of(one) != of(other)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(nn.Module, "__call__"), (nn.Module, "_call_impl"), (nn.Linear, "forward"), (torch.nn.functional, "linear")]
    + [(torch, "matmul"), (torch.Tensor, "__add__"), (torch.Tensor, "reshape")],
)
def test_replaced_torch_function_changes_fingerprint(owner, name, monkeypatch):
    block = TransformerBlock()
    before = of(block)
    source = f"def {name}(*arguments):\n    return original(*arguments)\n"
    replacement = from_an_extension(name, source)
    replacement.__globals__["original"] = getattr(owner, name)
    monkeypatch.setattr(owner, name, replacement)
    after = of(block)
    monkeypatch.undo()
    assert after != before


CALLED = """
class Shared:
    LEVEL = 2.0

    @staticmethod
    def double(x):
        return x * 2

    @classmethod
    def scale(cls, x):
        return cls.shift(x) * cls.LEVEL

    @classmethod
    def shift(cls, x):
        return x + 1

class Helper(Shared):
    LEVEL = 4.0

class Derived(Helper):
    pass

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

"""


def swap_levels(module):
    module.Helper.LEVEL, module.Shared.LEVEL = module.Shared.LEVEL, module.Helper.LEVEL


def with_call(load, call, name="edited_blocks"):
    """Return a module whose block has `call` in its forward."""
    plain = "        x = self.norm(widen(self.linear(x)))"
    return load(("class Base", f"{CALLED}class Base"), (plain, f"        {call}\n{plain}"), name=name)


@pytest.mark.parametrize(
    ("call", "change"),
    [
        ("x = Helper.double(x)", lambda m: setattr(m.Shared, "double", staticmethod(lambda x: x * 5))),
        ("x = Helper.scale(x)", lambda m: setattr(m.Shared, "scale", classmethod(lambda cls, x: x * 5))),
        ("x = Helper.scale(x)", lambda m: setattr(m.Shared, "shift", classmethod(lambda cls, x: x + 5))),
        ("x = Helper.scale(x)", lambda m: setattr(m.Helper, "LEVEL", 5.0)),
        ("x = Derived.scale(x)", lambda m: setattr(m.Derived, "LEVEL", 5.0)),
        ("x = Helper.scale(x) - Shared.scale(x) * 0.5", lambda m: swap_levels(m)),
        ("x = Function.apply(x)", lambda m: setattr(m.Function, "forward", staticmethod(lambda ctx, x: x * 5))),
    ],
    ids=["static method", "class method", "called by it", "read by it", "hidden in a subclass", "swapped", "autograd"],
)
def test_methods_that_are_called_on_a_class_are_read(load, call, change):
    module = with_call(load, call)
    block, describer = module.Block(), Describer(Host())
    before = describer.describe(block).fingerprint
    assert describer.watch.holds()
    change(module)
    assert of(block) != before
    assert not describer.watch.holds()


@pytest.mark.parametrize(
    "line",
    [
        "from edited_blocks import double as twice; x = twice(x)",
        "import edited_blocks as blocks; x = blocks.double(x)",
        "import edited_blocks; x = edited_blocks.double(x)",
        "from .edited_blocks import double; x = double(x)",
        "from .edited_blocks import later; x = later(x)",
        "import package.edited_blocks; x = package.edited_blocks.double(x)",
        "from . import edited_blocks as blocks; x = blocks.double(x)",
    ],
)
def test_what_code_imports_when_it_runs_is_read(load, monkeypatch, line):
    module = with_call(load, line, "package.edited_blocks")
    package = types.ModuleType("package")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "package", package)
    monkeypatch.setitem(sys.modules, "edited_blocks", module)
    package.edited_blocks = module
    module.__getattr__ = lambda name: {"later": module.double}[name]  # as modules that load their parts when asked
    block, describer = module.Block(), Describer(Host())
    before = describer.describe(block).fingerprint
    assert describer.watch.holds()
    module.double = lambda x: x * 7
    assert of(block) != before
    assert not describer.watch.holds() or "later" in line


def test_each_import_of_a_name_is_read(load, monkeypatch):
    statements = "from one import g" + "\n        " + "if x.ndim > 9: from two import g"
    one, two = types.ModuleType("one"), types.ModuleType("two")
    for each in (one, two):
        monkeypatch.setitem(sys.modules, each.__name__, each)
        each.g = load(name=each.__name__ + "_source").double
    block = with_call(load, statements + "\n        x = g(x)").Block()
    before = of(block)
    for each in (one, two):
        plain = each.g
        each.g = lambda x: x * 7
        assert of(block) != before
        each.g = plain
    assert of(block) == before


def test_what_cannot_be_imported_is_left_out(load):
    line = "from .nowhere import a; from nowhere.at import b; import nowhere.all as c; y = lambda: a(b, c.d)"
    block, describer = with_call(load, line).Block(), Describer(Host())
    assert describer.describe(block).obscure is None
    assert describer.watch.holds()
