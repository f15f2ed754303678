// Shows on a node what the extension says about it: while it runs, after it ran, and after the page was loaded again.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { inLanguage, ownLanguage } from "./words.js";

const STATUS_EVENT = "compiled_graphs.status";
const TEXTS = "/compiled_graphs/texts";
const NO_ID = "00000000-0000-0000-0000-000000000000";
const WIDGET = "status";
const WIDTH = 320;
const HIGHEST = 120; // pixels; a longer text scrolls
const MARGIN = 10; // pixels that the frontend leaves around an element on a node

function element(className) {
  return Object.assign(document.createElement("div"), { className, lang: ownLanguage() });
}

// The height that a text takes at a width. It is measured outside of the node, which may not be drawn yet.
function heightOf(text, width) {
  const probe = element("compiled-graphs-status compiled-graphs-probe");
  probe.style.width = `${width}px`;
  probe.textContent = text;
  document.body.append(probe);
  const height = probe.offsetHeight;
  probe.remove();
  return Math.min(height, HIGHEST) + 2 * MARGIN;
}

// The frontend owns elements on nodes: it places them, takes them away with the node, and draws them in Nodes 2.0.
function addStatus(node) {
  const box = element("compiled-graphs-status");
  box.setAttribute("role", "status");
  const height = () => heightOf(box.textContent, node.size[0] - 2 * MARGIN);
  const widget = node.addDOMWidget(WIDGET, WIDGET, box, {
    serialize: false,
    getValue: () => box.textContent,
    setValue: (text) => Object.assign(box, { textContent: text, lang: ownLanguage() }),
    getMinHeight: height,
    getMaxHeight: height,
  });
  widget.serialize = false; // not saved with the workflow
  return widget;
}

function showStatus(node, text) {
  const widget = node.widgets?.find((known) => known.name === WIDGET) ?? addStatus(node);
  if (node.size[0] < WIDTH) node.setSize([WIDTH, node.size[1]]);
  widget.value = text;
  const height = node.computeSize()[1];
  if (node.size[1] < height) node.setSize([node.size[0], height]);
  node.graph?.setDirtyCanvas(true, true);
}

// A node inside a subgraph has an id such as "12:5": node 5 of what node 12 stands for.
function findNode(id) {
  const path = String(id).split(":");
  let graph = app.rootGraph ?? app.graph;
  for (const outer of path.slice(0, -1)) graph = byId(graph, outer)?.subgraph;
  return byId(graph, path.at(-1));
}

const byId = (graph, id) => graph?.getNodeById(Number(id)) ?? graph?.getNodeById(id);

// Frontends before 2025 give workflows no id, and those of today none that counts to a prompt in API format.
function openId() {
  const id = (app.rootGraph ?? app.graph)?.id;
  return id === NO_ID ? undefined : id;
}

const isOpen = (workflow) => !openId() || !workflow || openId() === workflow;

function tell(id, told) {
  const node = findNode(id);
  if (node) showStatus(node, inLanguage(told));
}

// What the nodes of the open workflow said last. A server that was started since has nothing to say.
async function recall() {
  const workflow = openId();
  if (!workflow) return;
  const answer = await api.fetchApi(`${TEXTS}?workflow=${encodeURIComponent(workflow)}`).catch(() => null);
  const texts = answer?.ok ? await answer.json() : {};
  if (isOpen(workflow)) Object.entries(texts).forEach(([id, told]) => tell(id, told));
}

app.registerExtension({
  name: "compiled_graphs.status",

  setup() {
    const styles = Object.assign(document.createElement("link"), { rel: "stylesheet" });
    styles.href = new URL("./compiled_graphs.css", import.meta.url).href;
    document.head.append(styles);
    api.addEventListener(STATUS_EVENT, ({ detail }) => {
      if (isOpen(detail.workflow)) tell(detail.node, detail);
    });
    recall();
  },

  afterConfigureGraph: recall,
});
