"""A torch without one of the names that it calls its own: each name of torch_compat.py is taken away once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from compiled_graphs.compiler.backends import BACKENDS, choose_backend
from compiled_graphs.compiler.backends import NAMES as BACKEND_NAMES
from compiled_graphs.compiler.common import torch_compat
from compiled_graphs.compiler.common.torch_compat import NAMES, Later, MissingName, Need, float32_precisions, missing
from compiled_graphs.compiler.registry import doctor
from compiled_graphs.compiler.runtime import cuda_graph
from compiled_graphs.compiler.runtime.channels_last_weights import ChannelsLastWeights
from networks import CPU, ConvolutionNetwork

NEEDED = [path for path, need in NAMES.items() if need is Need.ALL]
NOT_NEEDED = [path for path, need in NAMES.items() if need is not Need.ALL]
NEEDED_BY = {
    "inductor on a CPU": torch_compat.FOR_CPUS,
    "inductor on a GPU": torch_compat.FOR_GPUS,
    "inductor_fp8": torch_compat.FOR_FLOAT8,
}
NOT_EVERYWHERE = {
    "torch:_C._cuda_clearCublasWorkspaces",
    "torch:_C._cuda_endAllocateToPool",
    "torch:_C._cuda_releasePool",
    "torch.ops:higher_order.invoke_subgraph.gen_schema",
}
"""Names that builds without CUDA, or some of the torches that we serve, do not have."""

WITHOUT = """
import importlib, json, pkgutil, sys
sys.path[:0] = json.loads(paths)
import torch

class Lacking:
    "Something of torch, without one attribute of it or of what is in it."

    def __init__(self, whole, attributes):
        self.whole, self.attributes = whole, attributes

    def __getattr__(self, name):
        first, *rest = self.attributes
        if name != first:
            return getattr(self.whole, name)
        if not rest:
            raise AttributeError(name)
        return Lacking(getattr(self.whole, name), rest)

    def __call__(self):
        return Lacking(self.whole(), self.attributes)

def import_without(path, found=importlib.import_module):
    module, _, attributes = path.partition(":")

    def import_module(name, package=None):
        if name == module and not attributes:
            raise ImportError(name)
        return Lacking(found(name), attributes.replace("()", "").split(".")) if name == module else found(name, package)

    return import_module

def look(path):
    "Import the package where a name is gone, and say what it makes of that."
    for name in [name for name in sys.modules if name.partition(".")[0] in ("compiled_graphs", "networks")]:
        del sys.modules[name]
    kept, importlib.import_module = importlib.import_module, import_without(path)
    try:
        from compiled_graphs.compiler import backends
        from compiled_graphs.compiler.common import torch_compat
    finally:
        importlib.import_module = kept
    import compiled_graphs.compiler as package, compiled_graphs.diffusers
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "hosts" not in module.name and "oneflow." not in module.name:
            importlib.import_module(module.name)
    chosen, reason = backends.choose_backend("eager", torch.device("cpu"))
    gone = not torch_compat._is_there(path)
    return {"gone": gone, "reason": reason, "compiles": compiled(chosen) if chosen and path in eager else None}

def compiled(backend):
    "Return how many graphs a network has, and why blocks of it ran without one."
    import networks
    from compiled_graphs.compiler.registry.registry import Registry

    with torch.no_grad():
        network = networks.ConvolutionNetwork()
        inputs = network.inputs(networks.sizes())
        expected = network(*inputs)
        model = networks.compile_network(network, Registry(), backend)
        torch.testing.assert_close(network(*inputs), expected)
    return [model.counters.compiles, {str(reason): n for reason, n in model.counters.eager_calls.items()}]

print(json.dumps({path: look(path) for path in json.loads(names)}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By path: what the package does without that name. One process looks at all of them, since torch takes seconds."""
    later = {name.path for value in vars(torch_compat).values() for name in _laters(value)}
    eager = [path for path in NOT_NEEDED if path not in later]
    given = {"paths": json.dumps(sys.path), "names": json.dumps(list(NAMES)), "eager": eager}
    script = "".join(f"{name} = {value!r}\n" for name, value in given.items()) + WITHOUT
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("code")),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _laters(value):
    return [each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Later)]


def written(path):
    """Return a path as a sentence has it."""
    return path.replace(":", ".").replace("()", "").rstrip(".")


@pytest.mark.parametrize("path", NEEDED)
def test_without_a_needed_name_one_sentence_says_so_and_no_backend_is_chosen(seen, path):
    reason = seen[path]["reason"]
    assert reason.startswith(f"This torch ({torch.__version__}) has no ")
    assert written(path) in reason or "more names" in reason
    assert reason.endswith("Until then models run uncompiled.")


@pytest.mark.parametrize("path", NOT_NEEDED)
def test_without_any_other_name_models_are_compiled(seen, path):
    assert seen[path]["gone"]
    assert seen[path]["reason"] == ""
    assert seen[path]["compiles"] in (None, [1, {}])


def test_names_that_are_bound_at_import_have_been_compiled_without(seen):
    assert len([path for path in NOT_NEEDED if seen[path]["compiles"]]) >= 10


@pytest.mark.parametrize("path", NAMES)
def test_this_torch_has_every_name(path):
    if path in NOT_EVERYWHERE:
        pytest.skip("not everywhere")
    torch_compat._look_up(path)


def test_names_that_a_backend_needs_are_all_asked_for():
    asked = {name.path for names in NEEDED_BY.values() for name in names}
    kinds = {"torch.export.graph_signature:InputKind", "torch.export.graph_signature:OutputKind"}
    assert asked | kinds == {path for path, need in NAMES.items() if need is Need.SOME}


@pytest.mark.parametrize("name", torch_compat.FOR_CPUS)
def test_a_backend_without_a_name_that_it_needs_says_so_and_the_others_do_not(take_away, name):
    take_away(name.path)
    chosen, reason = choose_backend("auto", CPU)
    assert chosen is None
    assert f"has no {written(name.path)}: " in reason
    assert choose_backend("eager", CPU) == (BACKENDS["eager"], "")


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_without_a_name_that_all_need_no_backend_is_chosen(take_away, backend):
    take_away(NEEDED[0])
    chosen, reason = choose_backend(backend, CPU)
    assert chosen is None
    assert reason


@pytest.mark.parametrize("names", NEEDED_BY.values(), ids=NEEDED_BY)
def test_each_name_that_a_backend_needs_is_named(take_away, names):
    assert missing(*names) is None
    for name in names:
        take_away(name.path)
        assert f"has no {written(name.path)}: " in missing(*names)


def test_many_missing_names_are_still_one_sentence(take_away):
    take_away(*NEEDED)
    assert f"and {len(NEEDED) - 3} more names: " in missing()


def test_the_doctor_says_what_torch_lacks(take_away):
    assert doctor._torch(None).ok
    take_away(NEEDED[0])
    fact = doctor._torch(None)
    assert not fact.ok
    assert written(NEEDED[0]) in fact.remedy


def test_the_doctor_does_not_look_for_a_compiler_that_torch_does_not_name(take_away):
    take_away(torch_compat.get_cpp_compiler.path)
    assert doctor._cpp_compiler().ok


def test_a_stand_in_can_be_subclassed_and_using_it_names_what_is_gone(take_away):
    take_away("torch.utils._pytree:tree_flatten")
    stand_in = torch_compat._optional("torch.utils._pytree:tree_flatten")
    assert torch_compat.is_gone(stand_in)
    for use in (stand_in, type("Ours", (stand_in,), {}), lambda: stand_in.attribute):
        with pytest.raises(MissingName, match=r"torch\.utils\._pytree\.tree_flatten"):
            use()


@pytest.mark.parametrize("name", ["TorchDispatchMode", "to_copy"])
def test_nothing_is_captured_where_torch_does_not_show_what_waits_for_the_gpu(monkeypatch, name):
    monkeypatch.setattr(torch.version, "hip", None)
    assert cuda_graph.can_capture(torch.device("cuda"))
    monkeypatch.setattr(torch_compat, name, torch_compat._Absent("Absent", (), {"path": name}))
    assert not cuda_graph.can_capture(torch.device("cuda"))


@contextmanager
def precisions(products, convolutions):
    """Set torch's names for float32 arithmetic, as other extensions may."""
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [kind.fp32_precision for kind in kinds]
    for kind, name in zip(kinds, (products, convolutions), strict=True):
        kind.fp32_precision = name
    try:
        yield
    finally:
        for kind, name in zip(kinds, before, strict=True):
            kind.fp32_precision = name


@pytest.mark.parametrize("set_to", [("tf32", "ieee"), ("ieee", "tf32"), ("tf32", "tf32")])
def test_the_precision_of_float32_is_read_whoever_set_it(set_to):
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("this torch has no names for precisions")
    with precisions(*set_to):
        assert float32_precisions() == set_to


@pytest.mark.parametrize(("products", "convolutions"), [(True, False), (False, True)])
def test_an_older_torch_has_switches_for_the_precision_of_float32(monkeypatch, products, convolutions):
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=products))
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=convolutions))
    assert [name == "tf32" for name in float32_precisions()] == [products, convolutions]


def test_copies_one_by_one_are_those_of_all_at_once():
    sources = [torch.randn(3), torch.randn(2, 2)]
    for copy in (torch_compat._copy_one_by_one, torch_compat.foreach_copy):
        targets = [torch.empty_like(source) for source in sources]
        copy(targets, sources)
        assert all(map(torch.equal, targets, sources))


def test_where_torch_does_not_tell_who_shares_memory_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch_compat, "_storage_users", torch_compat._Absent("Absent", (), {"path": "torch:_C._x"}))
    network = ConvolutionNetwork()
    ChannelsLastWeights(network, CPU).begin()
    assert all(weight.is_contiguous() for weight in network.parameters())
