"""Every name that torch calls its own and this package uses. A new torch release is checked here, and only here.

Torch may rename or drop these names in any release, so none of them is simply imported. Where a name is gone, the
package still imports. If graphs cannot be made without it, `missing` says so in one sentence and models stay
uncompiled; if it only makes something faster, that gain is lost and nothing else.

A path is a module, a colon and an attribute in it, as in entry points. Parentheses after a class make an object of it:
some attributes are only on objects. Names are bound once, when this module is imported, so that using one costs
nothing. Names of modules that take seconds to import are `Later`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch


class MissingName(AttributeError):
    """This torch lacks a name that is used."""

    def __init__(self, path: str) -> None:
        super().__init__(f"this torch ({torch.__version__}) has no {_as_people_write_it(path)}")


class Need(Enum):
    """What depends on a name."""

    ALL = "no graph can be made without it"
    SOME = "a backend or a kind of device cannot do without it, and says so"
    NONE = "it makes something faster"


NAMES: dict[str, Need] = {}
"""Every path of this file. Tests take each of them away."""


class _Absent(type):
    """The class of stand-ins for names that are gone: one can be imported and subclassed, but using it raises."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(cls.path)

    def __getattr__(cls, name: str) -> Any:
        raise MissingName(cls.path)


def _look_up(path: str) -> Any:
    """Return what torch has under a path. Raises MissingName if it has nothing there."""
    module, _, attributes = path.partition(":")
    try:
        found = import_module(module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute.removesuffix("()"))
            found = found() if attribute.endswith("()") else found
    except Exception as error:  # modules that are gone or broken, and classes that want other arguments by now
        raise MissingName(path) from error
    return found


def _optional(path: str, fallback: Any = None, need: Need = Need.NONE) -> Any:
    """Return what torch has under a path, or else the fallback: without one, a stand-in that raises when used."""
    NAMES[path] = need
    try:
        return _look_up(path)
    except MissingName:
        return _Absent("Absent", (), {"path": path}) if fallback is None else fallback


def _needed(path: str) -> Any:
    """Return what torch has under a path, or a stand-in that raises when used; `missing` then names the path."""
    return _optional(path, need=Need.ALL)


def _read(path: str) -> None:
    """List an attribute that the functions below read off objects of torch."""
    NAMES[path] = Need.ALL


@dataclass(frozen=True)
class Later:
    """A name whose module takes long to import, or is there on some machines only."""

    path: str
    need: Need = Need.NONE

    def __post_init__(self) -> None:
        NAMES[self.path] = self.need

    def get(self) -> Any:
        """Import it and return what it stands for. Raises MissingName."""
        return _look_up(self.path)


def is_gone(name: Any) -> bool:
    """Whether a name of this module stands for nothing, because this torch lacks it."""
    return isinstance(name, _Absent)


def missing(*also: Later) -> str | None:
    """Return one sentence that says what this torch lacks, or None if graphs can be made with it.

    `also` are names that one backend needs besides those that all need.
    """
    needed = [path for path, need in NAMES.items() if need is Need.ALL] + [name.path for name in also]
    gone = [_as_people_write_it(path) for path in needed if not _is_there(path)]
    if not gone:
        return None
    named = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more names" if len(gone) > 3 else "")
    return (
        f"This torch ({torch.__version__}) has no {named}: Compiled Graphs needs an update for it. "
        "Until then models run uncompiled."
    )


def _is_there(path: str) -> bool:
    try:
        _look_up(path)
    except MissingName:
        return False
    return True


def _as_people_write_it(path: str) -> str:
    return path.replace(":", ".").replace("()", "").rstrip(".")


# Arguments and results of a call are taken apart into tensors and put together again. Graph files hold the signature
# of a region's result as `treespec_dumps` writes it.
pytree = SimpleNamespace(
    tree_flatten=_needed("torch.utils._pytree:tree_flatten"),
    tree_unflatten=_needed("torch.utils._pytree:tree_unflatten"),
    tree_leaves=_needed("torch.utils._pytree:tree_leaves"),
    tree_map_only=_needed("torch.utils._pytree:tree_map_only"),
    treespec_dumps=_needed("torch.utils._pytree:treespec_dumps"),
    treespec_loads=_needed("torch.utils._pytree:treespec_loads"),
    TreeSpec=_optional("torch.utils._pytree:TreeSpec"),  # in annotations only
)

# Models are looked at and traced with fake tensors, which have sizes and no data. Sizes are symbols.
FakeTensorMode = _needed("torch._subclasses.fake_tensor:FakeTensorMode")
FakeTensor = _needed("torch._subclasses.fake_tensor:FakeTensor")
in_python = _optional("torch._dispatch.python:enable_python_dispatcher", nullcontext)
"""A context in which operators take sizes that are symbols outside of a trace, too."""
DisableTorchFunctionSubclass = _optional("torch._C:DisableTorchFunctionSubclass")
without_fake_tensors = _optional("torch._subclasses.fake_tensor:unset_fake_temporarily", nullcontext)
"""A context in which tensors that are not fake can be read."""
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
"""It logs each operator that fails with fake tensors as an error with a traceback, also where the failure is caught."""
scalar_value = _optional("torch.ops:aten._local_scalar_dense.default")
_DataDependent = _optional("torch._subclasses.fake_tensor:DataDependentOutputException")
_DynamicShape = _optional("torch._subclasses.fake_tensor:DynamicOutputShapeException")
_GuardOnValue = _optional("torch.fx.experimental.symbolic_shapes:GuardOnDataDependentSymNode")
ShapeEnv = _needed("torch.fx.experimental.symbolic_shapes:ShapeEnv")
PythonPrinter = _needed("torch.utils._sympy.printers:PythonPrinter")
TensorArgument = _needed("torch.export.graph_signature:TensorArgument")
ConstantArgument = _needed("torch.export.graph_signature:ConstantArgument")
_read("torch:Tensor._version")
_read("torch._subclasses.fake_tensor:FakeTensorMode().shape_env")
_read("torch.fx.experimental.symbolic_shapes:ShapeEnv().guards")
_read("torch.fx.experimental.symbolic_shapes:ShapeEnv.replace")
_read("torch.fx.experimental.sym_node:SymNode.expr")
_shape_options = _optional("torch.fx.experimental._config:patch")
_size_oblivious = _optional("torch.fx.experimental._config:backed_size_oblivious")


def undecided_strides() -> AbstractContextManager[Any]:
    """Return a context in which questions about strides are not decided by the sizes of an example.

    Torch otherwise asks at each operator whether its result is contiguous, and guards the answer. It does so in a
    torch without the option, too.
    """
    if is_gone(_shape_options) or is_gone(_size_oblivious):
        return nullcontext()
    return _shape_options(backed_size_oblivious=True)


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to."""
    return tensor._version


def fake_mode(tensor: torch.Tensor) -> Any:
    """Return the mode that a fake tensor was made in, a context manager."""
    return tensor.fake_mode


def met_real_tensor(error: BaseException) -> bool:
    """Whether code that ran with fake tensors failed because it met another one (`FakeTensorMode.validate`)."""
    return isinstance(error, AssertionError) and "convert all Tensors to FakeTensors" in str(error)


def needs_values(error: BaseException) -> str | None:
    """Return the operator that made code with fake tensors fail because its result depends on values."""
    return str(error.func) if isinstance(error, _DataDependent | _DynamicShape) else None


def guards_value(error: BaseException) -> str | None:
    """Return the condition that made a trace fail because it depends on values, such as "Eq(u0, 0)"."""
    return str(getattr(error, "cond", "")) or "a size" if isinstance(error, _GuardOnValue) else None


def size_expression(size: torch.SymInt) -> Any:
    """Return a symbolic size as sympy has it."""
    return size.node.expr


def guard_expressions(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return what tracing assumed of the sizes of fake tensors, as sympy has it."""
    environments = {id(t.fake_mode.shape_env): t.fake_mode.shape_env for t in tensors}
    return [environment.replace(guard.expr) for environment in environments.values() for guard in environment.guards]


# A module's children, weights and hooks are compared on every call. The guards read these tables in place, because a
# function between would be called thousands of times a step.
MODULE_TABLES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
for _table in MODULE_TABLES:
    _read(f"torch.nn:Module().{_table}")
global_forward_hooks = _needed("torch.nn.modules.module:_global_forward_hooks")
global_forward_pre_hooks = _needed("torch.nn.modules.module:_global_forward_pre_hooks")

# What a module's code does is told by the functions that it calls, and those of torch by where torch keeps them.
torch_functions = _needed("torch:_C._VariableFunctions")
OpOverload = type(torch.ops.aten.add.Tensor)
OpOverloadPacket = type(torch.ops.aten.add)

# Modules that torch.compile runs are left to it. Without this name, those that `nn.Module.compile` was called on are
# not noticed, and a region can lie in one.
_optional("torch.nn:Module._compiled_call_impl")


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Whether `nn.Module.compile` has been called on a module."""
    return getattr(module, "_compiled_call_impl", None) is not None


# CUDA graphs. A step that waits for the GPU must not be captured, so nothing is captured where that cannot be seen.
# Without the others a capture needs more memory, a failed one leaves more behind, and a replay copies its inputs one
# by one.
TorchDispatchMode = _optional("torch.utils._python_dispatch:TorchDispatchMode")
to_copy = _optional("torch.ops:aten._to_copy")
clear_cublas_workspaces = _optional("torch:_C._cuda_clearCublasWorkspaces", lambda: None)
end_allocate_to_pool = _optional("torch:_C._cuda_endAllocateToPool")
release_pool = _optional("torch:_C._cuda_releasePool")
CachingAutotuner = Later("torch._inductor.runtime.triton_heuristics:CachingAutotuner")


def can_see_syncs() -> bool:
    """Whether this torch shows where a call waits for the GPU."""
    return not is_gone(TorchDispatchMode) and not is_gone(to_copy)


def _copy_one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


foreach_copy = _optional("torch:_foreach_copy_", _copy_one_by_one)


def float32_precisions() -> tuple[str, str]:
    """Return how GPUs calculate float32 products and convolutions: "tf32" if they round to 10 bits, as float16 has.

    torch 2.9 and newer have names for it. Asked for the older switches, they raise if somebody has used the names.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    if not hasattr(products, "fp32_precision"):
        return tuple("tf32" if each.allow_tf32 else "ieee" for each in (products, convolutions))
    return products.fp32_precision, convolutions.conv.fp32_precision


# Convolutions' weights go to channels_last within their own memory, which must be nobody else's. Without these names
# weights stay as they are.
_storage_users = _optional("torch:_C._storage_Use_Count")
_optional("torch:UntypedStorage()._cdata")


def storage_address(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others. Fake tensors have one, too.

    Raises AttributeError if torch does not tell.
    """
    return tensor.untyped_storage()._cdata


def storage_users(tensor: torch.Tensor) -> int | None:
    """Return how many objects hold a tensor's storage, the one made to ask included, or None if torch does not tell."""
    storage = tensor.untyped_storage()
    try:
        return _storage_users(storage._cdata)
    except AttributeError:
        return None


# Inductor compiles for GPUs through the first two, and for CPUs through the other two.
standalone_compile = Later("torch._inductor:standalone_compile", Need.SOME)
CompiledArtifact = Later("torch._inductor:CompiledArtifact", Need.SOME)
aoti_compile_and_package = Later("torch._inductor:aoti_compile_and_package", Need.SOME)
aoti_load_package = Later("torch._inductor:aoti_load_package", Need.SOME)
FOR_GPUS = (standalone_compile, CompiledArtifact)
FOR_CPUS = (aoti_compile_and_package, aoti_load_package)

# Kernels' choices travel with an artifact. Without these names a process times kernels that it did not have to, and a
# check at small sizes leaves choices behind.
write_atomic = Later("torch._inductor.codecache:write_atomic")
LocalAutotuneCache = Later("torch._inductor.runtime.autotune_cache:LocalAutotuneCache")

# What is asked of Inductor before it compiles. Without `torch_key` a graph's key names torch's commit, and changes to
# an installed torch go unnoticed; without the others an unusable compiler or folder shows at the first graph.
torch_key = Later("torch._inductor.codecache:torch_key")
triton_key = Later("torch._inductor.runtime.triton_compat:triton_key")
get_cpp_compiler = Later("torch._inductor.cpp_builder:get_cpp_compiler")
InvalidCxxCompiler = Later("torch._inductor.exc:InvalidCxxCompiler")
cache_dir = Later("torch._inductor.runtime.cache_dir_utils:cache_dir")

# What a process's first compile or load would wait for. Without one of these it waits. Later ones import earlier ones,
# so that no single import takes long. None of them may begin to use a GPU: a process that has begun cannot be forked.
INDUCTOR_WARM_UP = (
    triton_key,
    Later("torch._dynamo:"),
    Later("torch._functorch.aot_autograd:"),
    torch_key,
    Later("torch._inductor.lowering:"),
    Later("torch._inductor.compile_fx:"),
    Later("torch._inductor.select_algorithm:"),
    Later("torch._inductor.async_compile:"),
    Later("torch._inductor.standalone_compile:"),
    Later("torch._inductor.codecache:"),
)

# An artifact for one GPU is moved to another. Without these names each GPU has artifacts compiled of its own.
BytesReader = Later("torch.utils._appending_byte_serializer:BytesReader")
BytesWriter = Later("torch.utils._appending_byte_serializer:BytesWriter")
CompiledTritonKernels = Later("torch._inductor.async_compile:CompiledTritonKernels")

# What Inductor is told to choose otherwise. Without these names it chooses as it does by itself.
inductor_config = Later("torch._inductor.config:")
compiler_config = Later("torch.compiler.config:")
InductorChoices = Later("torch._inductor.choices:InductorChoices")
ReductionHint = Later("torch._inductor.runtime.hints:ReductionHint")
inductor_globals = Later("torch._inductor.virtualized:V")

# How Inductor compares the strides of padded maps. Without this name its own way stays.
InductorLayout = Later("torch._inductor.ir:Layout")

# How many bits the arguments of Triton kernels have. Without this name sizes have 64.
triton_codegen = Later("torch._inductor.codegen.triton:")

# Repeated parts of a graph are compiled once. Without these names they are compiled as often as they are there, or
# (the last) traced as often.
tree_map = _optional("torch.utils._pytree:tree_map")
free_symbols = _optional("torch.fx.experimental.symbolic_shapes:free_symbols")
_optional("torch.ops:aten.add.Tensor._schema")
invoke_subgraph = Later("torch.ops:higher_order.invoke_subgraph")
invoke_subgraph_gen_schema = Later("torch.ops:higher_order.invoke_subgraph.gen_schema")


def is_mutable(target: Any) -> bool:
    """Whether the target of a graph's node is an operator that writes to what it is given.

    Raises AttributeError if torch does not tell.
    """
    return isinstance(target, OpOverload) and target._schema.is_mutable


def written_by(node: torch.fx.Node) -> list[Any]:
    """Return the arguments that a graph's node writes to. Raises as `is_mutable`."""
    given = arguments_of(node)
    return [given[p.name] for p in _aliased_parameters(node.target) if p.alias_info.is_write]


def aliased_by(node: torch.fx.Node) -> list[Any]:
    """Return the arguments that the result of a graph's node may be a view of. Raises as `is_mutable`."""
    given = arguments_of(node)
    return [given[parameter.name] for parameter in _aliased_parameters(node.target)]


def _aliased_parameters(target: Any) -> list[Any]:
    parameters = target._schema.arguments if isinstance(target, OpOverload) else ()
    return [parameter for parameter in parameters if parameter.alias_info is not None]


def arguments_of(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of a graph's node by name, with the defaults; nothing if its target is no operator."""
    if not isinstance(node.target, OpOverload):
        return {}
    parameters = node.target._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), node.args))
    return {parameter.name: parameter.default_value for parameter in parameters} | given | dict(node.kwargs)


# Products in float8. Without these names the backend inductor_fp8 cannot be used.
scaled_mm = Later("torch.ops:aten._scaled_mm.default", Need.SOME)
FOR_FLOAT8 = (scaled_mm, Later("torch.fx.experimental.sym_node:SymNode.hint", Need.SOME))


# Products of float32 with bfloat16 weights on tensor cores. Without these names the weights are cast to float32.
mm_with_dtype = Later("torch.ops:aten.mm.dtype")
tuned_mm = Later("torch._inductor.kernel.mm:tuned_mm")


def size_hint(size: torch.SymInt) -> int:
    """Return the example that a symbolic size was traced with."""
    return size.node.hint


# OneFlow is given exported programs, whose inputs and outputs are of several kinds. Without these names a graph for it
# fails, and its region runs uncompiled.
InputKind = _optional("torch.export.graph_signature:InputKind", need=Need.SOME)
OutputKind = _optional("torch.export.graph_signature:OutputKind", need=Need.SOME)
