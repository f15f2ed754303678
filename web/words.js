// What the panel says: English in the code, Chinese here. A test checks that every text has its Chinese.
import { app } from "../../scripts/app.js";

const CHINESE = {
  "Compiled": "编译",
  "Compiled Graphs: what is compiled, and what it gains": "Compiled Graphs：编译了什么，提升了多少",
  "Open the help of Compile Model": "打开“编译模型”的帮助",
  "Open the help of the node that made this": "打开生成它的节点的帮助",
  "Back": "返回",
  "Back to the models": "返回模型列表",
  "Help": "帮助",
  "Save": "保存",
  "Write these graphs to a file under models/compiled_graphs, as Save Graph does": "把这些计算图写入 models/compiled_graphs 下的文件，与“保存计算图”相同",
  "Free memory": "释放内存",
  "Take the graphs of this workflow out of memory. They stay on disk, and the next prompt loads them.": "把此工作流的计算图移出内存。它们仍在磁盘上，下次运行时加载。",
  "This node has no help page.": "此节点没有帮助页面。",
  "The server does not answer: {error}": "服务器没有响应：{error}",
  "Reading …": "正在读取……",
  "Nothing is compiled yet. Put Compile Model between a loader and a sampler, and queue a prompt.": "尚未编译任何内容。请把“编译模型”接在加载器与采样器之间，然后运行。",
  "Earlier": "较早的工作流",
  "Workflow {id}": "工作流 {id}",
  "node {node}": "节点 {node}",
  "base UNet": "基础 UNet",
  "refiner UNet": "精修 UNet",
  "diffusion model": "扩散模型",
  "VAE": "VAE",
  "ControlNet": "ControlNet",
  "text encoder": "文本编码器",
  "This model is not in memory any more.": "此模型已不在内存中。",
  "block types compiled": "块类型已编译",
  "Equal blocks of a model are one type and share a graph": "模型中相同的块算一种，共用一个计算图",
  "compiling and loading": "编译和加载",
  "{compiled} compiled and {loaded} loaded since ComfyUI started": "ComfyUI 启动以来编译了 {compiled}，加载了 {loaded} 个",
  "1 graph": "1 个计算图",
  "{n} graphs": "{n} 个计算图",
  "{graphs} in memory": "内存中有 {graphs}",
  "{graphs} on disk": "磁盘上有 {graphs}",
  "on disk": "磁盘上",
  "Code only: graphs hold no weights": "只有代码：计算图不含权重",
  "At most {size}. Then the graphs that were not used for the longest time are removed": "最多 {size}，超出后删除最久未使用的计算图",
  "The store is at a URL, or cannot be listed": "存储位于某个网址，或无法列出",
  "same speed": "速度相同",
  "{x}× faster": "速度 {x} 倍",
  "{x}× slower": "耗时 {x} 倍",
  "Time of the uncompiled blocks over that of the compiled ones, each measured once. See below.": "未编译的块与编译后的块所用时间之比，各测量一次。见下文。",
  "{compiled} of {regions} block types compiled": "{regions} 种块中已编译 {compiled} 种",
  "{n} at normal speed": "{n} 种以正常速度运行",
  "{n} when first used": "{n} 种在首次使用时编译",
  "Details": "详细信息",
  "Graphs": "计算图",
  "Compiling and loading": "编译和加载",
  "Network call": "网络调用",
  "{time} at {size}": "{time}，尺寸 {size}",
  "Replayed steps": "重放的步数",
  "Block calls": "块调用次数",
  "{n} uncompiled": "{n} 次未编译",
  "{n} compiled": "编译 {n} 个",
  "{n} from disk": "来自磁盘 {n} 个",
  "{n} from a file": "来自文件 {n} 个",
  "{n} from memory": "来自内存 {n} 个",
  ", ": "，",
  "min": "分钟",
  "s": "秒",
  "ms": "毫秒",
  "1 call": "1 次调用",
  "{n} calls": "{n} 次调用",
  "compiled in {time}": "编译用时 {time}",
  "loaded from disk in {time}": "从磁盘加载用时 {time}",
  "loaded from a file in {time}": "从文件加载用时 {time}",
  "{eager} uncompiled, {graph} compiled": "未编译 {eager}，编译后 {graph}",
  "compiled when first used": "首次使用时编译",
  "not measured": "未测量",
  "normal speed": "正常速度",
  "waiting": "等待中",
  "This machine": "本机",
  "in order": "正常",
  "1 thing to look at": "有 1 项需要查看",
  "{n} things to look at": "有 {n} 项需要查看",
  "What the figures mean": "数字的含义",
  "1.30× faster means that the uncompiled blocks take 1.3 times as long as the compiled ones. On its first use each graph is checked against the uncompiled block. Then both run up to three times on the same inputs, and the fastest run of each counts. The figure of a model counts each graph as often as it has blocks.": "“速度 1.30 倍”表示未编译的块所用时间是编译后的 1.3 倍。每个计算图首次使用时与未编译的块比对，随后两者用相同输入各运行至多三次，取最快的一次。模型的数字按每个计算图的块数加权。",
  "A whole image gains less, because the text encoder, the VAE and the sampler take time too. It gains more if steps are replayed as CUDA graphs. Graphs with a patch in them are not measured, nor are graphs with verify off.": "整张图像的提升较小，因为文本编码器、VAE 和采样器也要用时间；若步骤以 CUDA 图重放，提升更大。含补丁的计算图以及关闭“验证”时的计算图不测量。",
  "A network call is the median of the last 20 calls at that size, without those in which something was compiled, loaded or checked. Most samplers make one call per step, some make two.": "网络调用取该尺寸最近 20 次调用的中位数，不含编译、加载或检查过内容的调用。多数采样器每步调用一次，有些调用两次。",
  "Memory is the size of the graphs' code. Graphs hold no weights.": "内存指计算图的代码大小。计算图不含权重。",
};

// The frontend's language, such as "en" or "zh". "zh-TW" reads what there is for "zh".
export function language() {
  const chosen =
    app.extensionManager?.setting?.get("Comfy.Locale") ?? app.ui?.settings?.getSettingValue?.("Comfy.Locale");
  return String(chosen ?? "en").split("-")[0];
}

const isChinese = () => language() === "zh";

// What an element of ours has as `lang`. The frontend's page says that it is English in every language, and a browser
// then draws Chinese in the forms of another country.
export const ownLanguage = () => (isChinese() ? "zh-CN" : "en");

// A number and what it counts stay on one line.
const keepCounts = (text) => (isChinese() ? text.replace(/(\d) (?=\p{Script=Han})/gu, "$1\u00a0") : text);

// A text with values in it, in the frontend's language.
export function say(text, values = {}) {
  const own = isChinese() ? (CHINESE[text] ?? text) : text;
  return keepCounts(own.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole));
}

// What the server said, which comes with its translations.
export function inLanguage({ text, translations }) {
  return keepCounts(translations?.[language()] ?? text);
}
