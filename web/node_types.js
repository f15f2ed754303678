// What the frontend gets wrong about our nodes: the width of a title, the language of what the server says, and a choice
// that an old workflow does not make.
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

const isOurs = (nodeData) => Boolean(nodeData?.python_module?.endsWith(FOLDER));

// OneDiff's workflows have null where the first choice is meant now. Nodes 2.0 draws null red, and only frontends of 2026
// replace it.
function chooseForNull(node) {
  const unset = (node.widgets ?? []).filter((widget) => widget.type === "combo" && widget.value === null);
  for (const widget of unset) widget.value = widget.options.values[0];
}

app.registerExtension({
  name: "compiled_graphs.node_types",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!isOurs(nodeData)) return;
    keepTitleWhole(nodeType);
    translateTooltips(nodeData);
  },

  loadedGraphNode(node) {
    if (isOurs(node.constructor.nodeData)) chooseForNull(node);
  },
});
