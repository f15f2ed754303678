// A graph file that is not there yet is no fault: the first run writes it. So the frontend is to show neither a model to
// download nor a wrong choice.
import { app } from "../../scripts/app.js";

const NODES = ["CG_LoadGraph", "ModelGraphLoader", "VaeGraphLoader"];
const WIDGET = "graph";
const SUFFIX = /\.graph\.safetensors$/; // older workflows have it; a name that ends so counts as a model's

const isOurs = (node) => NODES.includes(node.type);

function graphsIn(data) {
  return [data, ...(data.definitions?.subgraphs ?? [])];
}

app.registerExtension({
  name: "compiled_graphs.load_graph",

  beforeConfigureGraph(data) {
    for (const node of graphsIn(data).flatMap((graph) => graph.nodes ?? []).filter(isOurs)) {
      const values = node.widgets_values;
      if (typeof values?.[0] === "string") values[0] = values[0].replace(SUFFIX, "");
    }
  },

  loadedGraphNode(node) {
    const widget = isOurs(node) && node.widgets?.find((known) => known.name === WIDGET);
    const choices = widget?.options?.values;
    if (!Array.isArray(choices) || choices.includes(widget.value)) return;
    widget.options.values = [widget.value, ...choices];
  },
});
