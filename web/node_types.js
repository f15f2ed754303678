// What the frontend gets wrong about our nodes' texts: the width of a title, and the language of what the server says.
import { app } from "../../scripts/app.js";
import { inLanguage } from "./words.js";

// The folder of this extension, which is the end of its Python module's name.
const FOLDER = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2));

const pen = document.createElement("canvas").getContext("2d");

function titleWidth(node) {
  pen.font = node.titleFontStyle ?? `${LiteGraph.NODE_TEXT_SIZE}px Arial`;
  return pen.measureText(node.getTitle()).width;
}

// The frontend cuts a title that leaves no square at both sides, and makes a node without widgets narrower than that.
// Before 2025 a type has the methods of all nodes only once it is registered.
function keepTitleWhole(nodeType) {
  const computeSize = nodeType.prototype.computeSize ?? LiteGraph.LGraphNode.prototype.computeSize;
  nodeType.prototype.computeSize = function (...given) {
    const size = computeSize.apply(this, given);
    size[0] = Math.max(size[0], Math.ceil(titleWidth(this)) + 2 * LiteGraph.NODE_TITLE_HEIGHT);
    return size;
  };
}

// The files in `locales` cannot know what this machine lacks, so such a tooltip comes with its translations.
function translateTooltips({ input }) {
  for (const [, options] of Object.values({ ...input?.required, ...input?.optional })) {
    if (options?.translations) options.tooltip = inLanguage({ text: options.tooltip, ...options });
  }
}

app.registerExtension({
  name: "compiled_graphs.node_types",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.python_module?.endsWith(FOLDER)) return;
    keepTitleWhole(nodeType);
    translateTooltips(nodeData);
  },
});
