"""Why something runs eagerly: a code for programs, and a detail that names the thing.

Programs compare codes. The code also picks the explanation that a person reads, in their language
(`registry.explanations`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .errors import one_line


class ReasonCode(Enum):
    """Each value is a short note for logs; `{}` is where the detail stands."""

    # The call
    CALL_MISFIT = "a call that does not fit {}"
    TENSOR_TYPE = "a tensor of type {}"
    TENSOR_LAYOUT = "a tensor of layout {}"
    ARGUMENT_TYPE = "an argument of type {}"
    CALL_DEVICE = "an argument on another GPU than the model"
    ALIASED_INPUT = "an input that is written to and shares memory with another"
    GRADIENTS = "gradients are on"
    AUTOCAST = "autocast is on"
    SIZES_OUTSIDE = "sizes outside of what the graph was traced for"
    TOO_LARGE = "more than 2,147,483,647 values in one tensor"
    SIZES_UNCLEAR = "its sizes cannot be told apart from data ({})"
    ONE_SIZE = "an operator that would be compiled for one size only ({})"
    DEPENDS_ON_VALUES = "what it computes depends on values ({})"
    SIZE_ARGUMENT = "an argument that changes with the size, or sizes that cannot be told apart"
    MANY_SIGNATURES = "an argument that keeps changing (more than {} kinds of call)"
    UNFORESEEN = "a kind of call that was not foreseen"
    NOT_FINITE = "a compiled image with values that are not finite, made again eagerly"

    # Patches and options of the host
    PATCH = "patch {}"
    REPLACEMENT_PATCH = "replacement patch {}"
    PATCH_RESULT = "patch {} changes the shape or dtype"
    PATCH_ARGUMENT = "a patch that is given {}, which is no plain value"
    OPTION = "transformer option {}"
    OPTION_DECIDES = "a result that depends on {}"
    OPTION_REMOVED = "a block that removes the transformer option {}"
    OPTION_LEFT = "a block that leaves a {}"
    OPTIONS_SEARCHED = "code that looks through all transformer options"
    OPTIONS_COUNTED = "code that counts the transformer options"

    EARLIER_TOKENS = "a cache of earlier tokens"

    # The whole model
    SLOWER = "slower compiled than uncompiled ({} as fast)"
    TIMED_UNCOMPILED = "timed uncompiled, to compare"

    # The weights
    WEIGHT_FUNCTION = "weights changed on the fly ({})"
    WEIGHT_TYPE = "weights of type {}"
    WEIGHT_LAYOUT = "quantised weights in the layout {}"
    WEIGHT_OPERATION = "{} of a quantised weight"
    WEIGHT_DEVICE = "weights on {}"
    WEIGHT_MEMORY = "too little memory for a block's weights"
    WEIGHT_FORM = "weights of another shape or dtype than the model was compiled with ({})"

    # The block and its code
    GLOBAL_HOOK = "a hook on every module of the process"
    HOOK = "a hook on a module inside the region"
    FORWARD_REPLACED = "a replaced forward inside the region"
    KEEPS_CHANGING = "a block that keeps changing (more than {} times)"
    CHANGES_MEANWHILE = "a block that changes while it is compiled"
    INDESCRIBABLE = "a block that cannot be described ({})"
    MANY_VALUES = "an attribute that leads to more than {}"
    OPAQUE_OBJECT = "an object that cannot be looked into ({})"
    OPAQUE_TYPE = "an object of a type that cannot be looked into ({})"
    OBJECT_ARRAY = "an array of objects ({})"
    ITERATOR = "an iterator, which is another one after each use ({})"
    STRAY_TENSOR = "a tensor outside parameters and buffers ({})"
    STRAY_LAYER = "a layer that the block reads and does not contain ({})"
    GLOBAL_STATE = "code that remembers things in a global ({})"
    WRITES_ARGUMENT = "a region that writes to a list or dictionary it is given"
    WRITES_WEIGHTS = "a region that writes to its own weights"
    RANDOM = "a region that draws random numbers"
    COMMUNICATES = "a region that exchanges data with other processes by itself ({})"
    RESULT_TYPE = "a region that returns something besides tensors and None"

    # The graph and its compiler
    BACKEND = "{}"
    BACKGROUND = "compiling in the background"
    CHECK_FAILED = "the graph of {}"
    CONTRACT = "a graph whose contract makes no sense ({})"
    TAKEN_BACK = "a graph that was taken back"
    TIMEOUT = "the compiler took more than {}"
    HANGS = "the compiler still hangs on {}; restart to compile again"
    WORKER = "a worker process {}"
    NOT_SENT = "a block that cannot be sent to another process ({})"
    NOT_IMPORTED = "code that another process cannot import ({})"
    CODE_DIFFERS = "code that differs in a worker process"
    ONEFLOW_CONSTANT = "a tensor that the block makes itself"
    ONEFLOW_OPERATOR = "an operator that OneFlow does not have here ({})"
    ONEFLOW_DTYPE = "{}, which OneFlow does not compute in"
    ONEFLOW_CPU_DTYPE = "{} on a CPU, where OneFlow does not compute in it"
    ONEFLOW_ARGUMENT = "an argument that no program can hold ({})"
    ERROR = "{}"

    # Steps that are not captured as CUDA graphs
    HOST_SILENT = "a host that does not say what its calls depend on"
    OUTSIDE_SAMPLING = "a call outside of a sampling"
    DEEP_CACHE = "DeepCache, whose steps are not alike"
    ANY_PATCH = "a patch"
    NETWORK_WRAPPER = "a wrapper of the network"
    FEW_STEPS = "fewer than {} steps"
    MODULE_REPLACED = "a module was replaced"
    INPUT_DEVICE = "an input on another device"
    WEIGHTS_ELSEWHERE = "weights that are not all on the GPU"
    CAPTURE_DIFFERS = "a capture that gives something else ({})"
    UNSAFE_TO_CAPTURE = "an operator that is not known to bear a capture ({})"
    WAITS_FOR_GPU = "the model waits for the GPU within a step ({})"


@dataclass(frozen=True)
class Reason:
    """Why something runs eagerly."""

    code: ReasonCode
    detail: str = ""
    """What it is about: a name, a type, a place, or an error's first line."""

    def __str__(self) -> str:
        return self.code.value.replace("{}", self.detail)


class ReasonedError(Exception):
    """An error that names its reason."""

    def __init__(self, code: ReasonCode, detail: str = "") -> None:
        super().__init__(code, detail)  # what pickling calls the class with
        self.reason = Reason(code, detail)

    @classmethod
    def of(cls, reason: Reason) -> ReasonedError:
        """Return the error for a reason that is already known."""
        return cls(reason.code, reason.detail)

    def __str__(self) -> str:
        return str(self.reason)


class Unsupported(ReasonedError):
    """A call or region that no graph can serve."""


def reason_of(error: BaseException) -> Reason:
    """Return an error's own reason, or one that quotes its first line."""
    return error.reason if isinstance(error, ReasonedError) else Reason(ReasonCode.ERROR, one_line(error))
