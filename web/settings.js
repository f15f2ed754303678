// What people choose in ComfyUI's settings dialog. Frontends that know no settings of extensions ignore them.
import { app } from "../../scripts/app.js";

// JSON, so that the tests of the locales can read it. The server reads StoreLimit where ComfyUI keeps it
// (web_server/apply_settings.py); the others are only what new nodes begin with.
const SETTINGS = [
  {
    "id": "CompiledGraphs.StoreLimit",
    "category": ["Compiled Graphs", "Graphs on disk", "StoreLimit"],
    "name": "Size limit for compiled graphs (GB)",
    "tooltip": "Past it, the graphs that were used longest ago are removed. Holds from the next run of a node of Compiled Graphs on. Has no effect if the server's environment names the store or its limit (COMPILED_GRAPHS_STORE, COMPILED_GRAPHS_STORE_LIMIT).",
    "type": "number",
    "attrs": {"min": 1, "max": 10000, "showButtons": true},
    "defaultValue": 10
  },
  {
    "id": "CompiledGraphs.Background",
    "category": ["Compiled Graphs", "New nodes", "Background"],
    "name": "New nodes compile in the background",
    "tooltip": "What 'when' is on a Compile Model that you add. Nodes that are there, and those of a workflow that you open, keep what they have.",
    "type": "boolean",
    "defaultValue": false
  },
  {
    "id": "CompiledGraphs.Verify",
    "category": ["Compiled Graphs", "New nodes", "Verify"],
    "name": "New nodes verify their graphs",
    "tooltip": "What 'verify' is on a node that you add. Nodes that are there, and those of a workflow that you open, keep what they have.",
    "type": "boolean",
    "defaultValue": true
  }
];

const NODES = "CG_";
const WIDGETS = [
  { name: "when", setting: "CompiledGraphs.Background", values: { true: "in background", false: "before sampling" } },
  { name: "verify", setting: "CompiledGraphs.Verify", values: { true: true, false: false } },
];

app.registerExtension({
  name: "compiled_graphs.settings",
  settings: SETTINGS,

  // A workflow's own values are put into the node after this, and stay.
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith(NODES)) return;
    for (const { name, setting, values } of WIDGETS) {
      const chosen = values[app.extensionManager?.setting?.get?.(setting)];
      const widget = node.widgets?.find((w) => w.name === name);
      if (widget && chosen !== undefined) widget.value = chosen;
    }
  },
});
