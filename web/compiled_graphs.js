// Shows on a node what the extension says about it: after it ran, and when a later step changes the picture.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ComfyWidgets } from "../../scripts/widgets.js";

const CATEGORY = "compiled graphs";
const STATUS_EVENT = "compiled_graphs.status";
const WIDGET = "status";

function showStatus(node, text) {
  let widget = node.widgets?.find((w) => w.name === WIDGET);
  if (!widget) {
    widget = ComfyWidgets.STRING(node, WIDGET, ["STRING", { multiline: true }], app).widget;
    widget.serialize = false; // not saved with the workflow
    widget.options = { ...widget.options, serialize: false }; // not sent with the prompt
    const element = widget.inputEl ?? widget.element;
    if (element) {
      element.readOnly = true;
      element.style.opacity = 0.8;
    }
    const [width, height] = node.computeSize();
    node.setSize([Math.max(node.size[0], width, 320), Math.max(node.size[1], height)]);
  }
  widget.value = text;
  node.graph?.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "compiled_graphs.status",

  setup() {
    api.addEventListener(STATUS_EVENT, ({ detail }) => {
      const node = app.graph.getNodeById(Number(detail.node)) ?? app.graph.getNodeById(detail.node);
      if (node) showStatus(node, detail.text);
    });
  },

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.category?.startsWith(CATEGORY)) return;
    const onExecuted = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      if (output?.text) showStatus(this, output.text.join("\n"));
    };
  },
});
