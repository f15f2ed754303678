"""Explanations of the reasons to run eagerly, for people who connect nodes, and what they can do about them.

A reason's code selects the text. English is the fallback for other languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..common.reason import Reason, ReasonCode
from ..common.words import Words, say


@dataclass(frozen=True)
class Explanation:
    """One text in each language."""

    en: str
    zh: str


_MEMORY = Explanation(
    "GPU memory is short, so layers of another extension in these blocks get their weights when they are used. With "
    "more free memory they run compiled.",
    "显存不足，这些块中其他扩展的层在用到时才搬来权重。显存充足时它们会以编译方式运行。",
)
_PATCH = Explanation(
    "A node changes what happens inside of these blocks. They run uncompiled while it is connected.",
    "有节点改变了这些块内部的计算。连接它时，这些块不编译运行。",
)
_ATTENTION_PATCH = Explanation(
    "A node changes what goes into attention, as HyperTile, token merging, hypernetworks and ControlNet-LLLite "
    "do, or what Wan has after it, as InfiniteTalk does. The blocks that it reaches run uncompiled while it is "
    "connected.",
    "有节点改变了注意力的输入，例如 HyperTile、token merging、hypernetwork 和 ControlNet-LLLite，"
    "或 Wan 注意力之后的结果，例如 InfiniteTalk。连接它时，它作用到的块不编译运行。",
)
_OPTION = Explanation(
    "A node sets an option that the code of these blocks reads. They follow it, uncompiled.",
    "有节点设置了这些块的代码会读取的选项。它们不编译运行，以遵从该选项。",
)
_EXTENSION = Explanation(
    "Another extension has changed these blocks, so its version of them runs.",
    "另一个扩展修改了这些块，因此运行的是它的版本。",
)
_UNSTABLE = Explanation(
    "Another extension changes these blocks while the model runs, so that no graph can be made of them.",
    "另一个扩展在模型运行时不断修改这些块，因此无法为它们生成计算图。",
)
_VARYING = Explanation(
    "Something in these blocks changes with every image, so that each would need a graph of its own.",
    "这些块中有内容随每张图像变化，每次都需要一个单独的计算图。",
)
_SIZES = Explanation(
    "The code of these blocks does not say which of its numbers are sizes.",
    "这些块的代码没有表明哪些数是尺寸。",
)
_UNKNOWABLE = Explanation(
    "What these blocks compute depends on something that cannot be written down, so no graph is shared for them.",
    "这些块的计算取决于无法记录下来的内容，因此不为它们共享计算图。",
)
_MEMORY_OF_FRAMES = Explanation(
    "These blocks remember earlier frames from one call to the next, which a graph cannot.",
    "这些块会在调用之间记住之前的帧，计算图做不到这一点。",
)
_COMPILER = Explanation(
    "These blocks cannot be traced or compiled here. They run as they would without this extension.",
    "这些块在此处无法追踪或编译。它们按没有本扩展时的方式运行。",
)
_BACKEND = Explanation(
    "The chosen compiler cannot be used here, or not for these blocks. Choose another backend at the node.",
    "所选的编译器在此处或对这些块不可用。请在节点上选择其他后端。",
)
_SLOW_COMPILER = Explanation(
    "The compiler took too long and was given up. COMPILED_GRAPHS_COMPILE_LIMIT sets the seconds it may take.",
    "编译耗时过长，已放弃。COMPILED_GRAPHS_COMPILE_LIMIT 设置允许的秒数。",
)
_WORKER = Explanation(
    "A background process could not compile these blocks. The log says why. Restart ComfyUI to try again.",
    "后台进程未能编译这些块。原因见日志。重启 ComfyUI 可再试一次。",
)
_CALL = Explanation(
    "A node calls these blocks in a way that a graph cannot serve.",
    "有节点以计算图无法支持的方式调用这些块。",
)
_STEPS = Explanation(
    "The blocks run compiled. The step around them is not replayed as one CUDA graph.",
    "这些块以编译方式运行。外层的采样步没有作为一个 CUDA 图重放。",
)

EXPLANATIONS: Mapping[ReasonCode, Explanation] = {
    ReasonCode.CALL_MISFIT: _CALL,
    ReasonCode.TENSOR_TYPE: _CALL,
    ReasonCode.TENSOR_LAYOUT: _CALL,
    ReasonCode.ARGUMENT_TYPE: _CALL,
    ReasonCode.CALL_DEVICE: _CALL,
    ReasonCode.ALIASED_INPUT: _CALL,
    ReasonCode.UNFORESEEN: _CALL,
    ReasonCode.GRADIENTS: Explanation("The model is being trained.", "模型正在训练。"),
    ReasonCode.AUTOCAST: Explanation(
        "A node runs the model under autocast, which decides about dtypes while it runs.",
        "有节点在 autocast 下运行模型，数据类型要到运行时才确定。",
    ),
    ReasonCode.SIZES_OUTSIDE: Explanation(
        "The code of these blocks has a limit at another size than this one.",
        "这些块的代码在其他尺寸上有限制，与当前尺寸不符。",
    ),
    ReasonCode.TOO_LARGE: Explanation(
        "Compiled kernels index a tensor with 32 bits. A smaller batch, fewer frames or a tiled decode run compiled.",
        "编译后的内核用 32 位整数索引张量。减小批次、减少帧数或使用分块解码，即可编译运行。",
    ),
    ReasonCode.SIZES_UNCLEAR: _SIZES,
    ReasonCode.ONE_SIZE: Explanation(
        "The compiler makes this operator for one size, and the graph would be wrong at others.",
        "编译器只能为一种尺寸生成该算子，计算图在其他尺寸下会出错。",
    ),
    ReasonCode.SIZE_ARGUMENT: _SIZES,
    ReasonCode.DEPENDS_ON_VALUES: Explanation(
        "The model picks what to compute by the values in its tensors, which no graph can know ahead.",
        "模型根据张量中的数值决定计算内容，任何计算图都无法预先知道。",
    ),
    ReasonCode.MANY_SIGNATURES: _VARYING,
    ReasonCode.NOT_FINITE: Explanation(
        "The compiled VAE gave values that are not finite, so the image was made again uncompiled.",
        "编译后的 VAE 给出了非有限的数值，因此图像已不编译地重新生成。",
    ),
    ReasonCode.PATCH: _PATCH,
    ReasonCode.REPLACEMENT_PATCH: _PATCH,
    ReasonCode.PATCH_RESULT: _PATCH,
    ReasonCode.PATCH_ARGUMENT: _PATCH,
    ReasonCode.OPTION: _OPTION,
    ReasonCode.OPTION_DECIDES: _OPTION,
    ReasonCode.OPTION_REMOVED: _OPTION,
    ReasonCode.OPTION_LEFT: _OPTION,
    ReasonCode.OPTIONS_SEARCHED: _OPTION,
    ReasonCode.OPTIONS_COUNTED: _OPTION,
    ReasonCode.EARLIER_TOKENS: Explanation(
        "A model that makes tokens one after the other keeps what it computed of those before. ComfyUI's own code runs "
        "then.",
        "语言模型生成文本时会保留之前词元的计算结果，这时运行的是 ComfyUI 自己的代码。",
    ),
    ReasonCode.SLOWER: Explanation(
        "Compiled, this model was slower on this machine than uncompiled, so it runs uncompiled. Choose the backend "
        "inductor to compile anyway.",
        "在此机器上，该模型编译后比不编译更慢，因此不编译运行。如仍要编译，请选择后端 inductor。",
    ),
    ReasonCode.TIMED_UNCOMPILED: Explanation(
        "The compiled blocks seem no faster than uncompiled ones. To be sure, a sampling, or a few "
        "decodes of a VAE, are timed uncompiled.",
        "编译后的块似乎并不比未编译的更快。为确认这一点，有一次采样或 VAE 的几次解码不编译运行并计时。",
    ),
    ReasonCode.WEIGHT_FUNCTION: Explanation(
        "Weights of these blocks are changed each time they are used: by a LoRA on GGUF weights, or by a node that "
        "changes quantised or float8 weights. Without it these blocks run compiled.",
        "作用于 GGUF 权重的 LoRA，或修改量化、float8 权重的节点，在每次使用时才修改这些块的权重。"
        "不用它们时，这些块以编译方式运行。",
    ),
    ReasonCode.WEIGHT_TYPE: Explanation(
        "The weights are quantised in a form of their own that a graph cannot read.",
        "权重采用特有的量化格式，计算图无法读取。",
    ),
    ReasonCode.WEIGHT_LAYOUT: Explanation(
        "The checkpoint is quantised in a format that Compiled Graphs does not know yet. Another format of the same "
        "model (float8, int8, GGUF Q8_0 or Q4_K) runs compiled.",
        "该检查点的量化格式尚不受支持。同一模型的其他格式，如 float8、int8、GGUF Q8_0 或 Q4_K，会以编译方式运行。",
    ),
    ReasonCode.WEIGHT_OPERATION: Explanation(
        "The code of these blocks does something to a quantised weight besides multiplying with it.",
        "这些块的代码除了相乘之外，还对量化权重做了其他运算。",
    ),
    ReasonCode.WEIGHT_DEVICE: _MEMORY,
    ReasonCode.WEIGHT_MEMORY: Explanation(
        "GPU memory is so short that the weights of a whole block found no room. Its layers got theirs one by one, "
        "uncompiled. A smaller image or a smaller batch leaves more.",
        "显存过于紧张，放不下整个块的权重。该块的各层逐个获取权重，不编译运行。较小的图像或批次会留出更多显存。",
    ),
    ReasonCode.WEIGHT_FORM: Explanation(
        "Something has changed the weights of these blocks since the model was compiled. Queue the workflow again "
        "from its loader.",
        "模型编译之后，这些块的权重被改动过。请从加载器开始重新运行工作流。",
    ),
    ReasonCode.GLOBAL_HOOK: _EXTENSION,
    ReasonCode.HOOK: _EXTENSION,
    ReasonCode.FORWARD_REPLACED: _EXTENSION,
    ReasonCode.KEEPS_CHANGING: _VARYING,
    ReasonCode.CHANGES_MEANWHILE: _UNSTABLE,
    ReasonCode.INDESCRIBABLE: _UNKNOWABLE,
    ReasonCode.MANY_VALUES: _UNKNOWABLE,
    ReasonCode.OPAQUE_OBJECT: _UNKNOWABLE,
    ReasonCode.OPAQUE_TYPE: _UNKNOWABLE,
    ReasonCode.OBJECT_ARRAY: _UNKNOWABLE,
    ReasonCode.ITERATOR: _UNKNOWABLE,
    ReasonCode.STRAY_TENSOR: _UNKNOWABLE,
    ReasonCode.STRAY_LAYER: _UNKNOWABLE,
    ReasonCode.GLOBAL_STATE: _UNKNOWABLE,
    ReasonCode.WRITES_ARGUMENT: _MEMORY_OF_FRAMES,
    ReasonCode.WRITES_WEIGHTS: _MEMORY_OF_FRAMES,
    ReasonCode.COMMUNICATES: Explanation(
        "These blocks exchange data with other processes. A graph serves any number of processes only if that is an "
        "operator of its own.",
        "这些块与其他进程交换数据。只有把这一步做成单独的算子，计算图才能适用于任意数量的进程。",
    ),
    ReasonCode.RANDOM: Explanation(
        "These blocks draw random numbers, and a graph would draw others.",
        "这些块会抽取随机数，而计算图会抽到不同的随机数。",
    ),
    ReasonCode.RESULT_TYPE: _COMPILER,
    ReasonCode.BACKEND: _BACKEND,
    ReasonCode.BACKGROUND: Explanation(
        "The graph is being made. These blocks run uncompiled until it is ready.",
        "计算图正在生成。完成之前，这些块不编译运行。",
    ),
    ReasonCode.CHECK_FAILED: Explanation(
        "The graph gave another result than the uncompiled block, by more than rounding, so it is not used.",
        "计算图的结果与未编译的块相差超过舍入误差，因此不使用它。",
    ),
    ReasonCode.CONTRACT: _COMPILER,
    ReasonCode.TAKEN_BACK: Explanation(
        "Somebody dropped this graph while the model ran. The next image has it again.",
        "模型运行时该计算图被丢弃。下一张图像会重新得到它。",
    ),
    ReasonCode.TIMEOUT: _SLOW_COMPILER,
    ReasonCode.HANGS: Explanation(
        "The compiler hangs on another block, and two compilers in one process are not safe. Restart ComfyUI to "
        "compile again.",
        "编译器卡在另一个块上，而同一进程中运行两个编译器并不安全。重启 ComfyUI 后可再次编译。",
    ),
    ReasonCode.WORKER: _WORKER,
    ReasonCode.NOT_SENT: _WORKER,
    ReasonCode.NOT_IMPORTED: _WORKER,
    ReasonCode.CODE_DIFFERS: _WORKER,
    ReasonCode.ONEFLOW_CONSTANT: _BACKEND,
    ReasonCode.ONEFLOW_OPERATOR: _BACKEND,
    ReasonCode.ONEFLOW_DTYPE: _BACKEND,
    ReasonCode.ONEFLOW_CPU_DTYPE: _BACKEND,
    ReasonCode.ONEFLOW_ARGUMENT: _BACKEND,
    ReasonCode.ERROR: _COMPILER,
    ReasonCode.HOST_SILENT: _STEPS,
    ReasonCode.OUTSIDE_SAMPLING: _STEPS,
    ReasonCode.DEEP_CACHE: _STEPS,
    ReasonCode.ANY_PATCH: _STEPS,
    ReasonCode.NETWORK_WRAPPER: _STEPS,
    ReasonCode.FEW_STEPS: _STEPS,
    ReasonCode.MODULE_REPLACED: _STEPS,
    ReasonCode.INPUT_DEVICE: _STEPS,
    ReasonCode.WEIGHTS_ELSEWHERE: _STEPS,
    ReasonCode.CAPTURE_DIFFERS: _STEPS,
    ReasonCode.UNSAFE_TO_CAPTURE: _STEPS,
    ReasonCode.WAITS_FOR_GPU: _STEPS,
}
"""A test checks that every code has an explanation."""


def explain(reason: Reason, language: str = "en") -> str:
    """Return what a reason means, in a language such as "zh" or "zh-CN"."""
    found = EXPLANATIONS[reason.code]
    if reason.code is ReasonCode.PATCH and reason.detail in ("attn1_patch", "attn2_patch"):
        found = _ATTENTION_PATCH
    return found.zh if language.partition("-")[0] == "zh" else found.en


def explanation_words(reason: Reason) -> Words:
    """Return what a reason means, in every language."""
    return Words(explain(reason), lambda language: explain(reason, language))


def reason_words(reason: Reason) -> Words:
    """Return a reason's short note, in every language that has one for it."""
    return say(reason.code.value.replace("{}", "{detail}"), detail=reason.detail)


def explained(reasons: Iterable[Reason], language: str = "en") -> dict[str, str]:
    """Return the meaning of each reason, keyed by the note that a report shows."""
    return {str(reason): explain(reason, language) for reason in reasons}
