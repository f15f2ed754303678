// The registry panel: a sidebar tab with what is compiled, what is not and why, and what it gains.
// A frontend without sidebar tabs (before autumn 2024) gets none.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const TAB = "compiled-graphs";
const REGISTRY_EVENT = "compiled_graphs.registry";
const ROUTES = "/compiled_graphs";
const HELP = { VAE: "CG_VAESpeedup", ControlNet: "CG_ControlNetSpeedup", default: "CG_CompileModel" };

// Elements are built of text: what workflows and nodes are called is nobody's markup.
function element(tag, properties = {}, ...children) {
  const { data = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, data);
  made.append(...children.flat().filter((child) => child !== null && child !== ""));
  return made;
}

const div = (className, ...children) => element("div", { className }, ...children);
const span = (className, ...children) => element("span", { className }, ...children);
const icon = (name) => element("i", { className: `pi pi-${name}` });

// A number of about three digits and its unit, never on two lines.
function quantity(number, unit) {
  return `${number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0)}\u00a0${unit}`;
}

function time(seconds) {
  if (seconds >= 100) return quantity(seconds / 60, "min");
  return seconds >= 1 ? quantity(seconds, "s") : quantity(seconds * 1000, "ms");
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), units.length - 1);
  return power ? quantity(bytes / 1000 ** power, units[power]) : `${bytes}\u00a0B`;
}

const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
const times = (factor) => `${factor.toFixed(2)}×`;

// The role "3:base UNet" is what node 3 made.
function readRole(name) {
  const [, node, kind] = name.match(/^([^:]*):(.*)$/) ?? [null, "", name];
  return { node, kind };
}

function openWorkflow(id) {
  const known = app.extensionManager.workflow?.openWorkflows ?? [];
  return known.find((workflow) => (workflow.activeState ?? workflow.initialState)?.id === id);
}

function workflowName(id) {
  return openWorkflow(id)?.filename ?? `Workflow ${id.slice(0, 8)}`;
}

// Sidebar and dialogs are the frontend's own; of its stores it hands out one, and by that the others can be found.
function store(name) {
  return app.extensionManager._p?._s?.get(name);
}

// Opens a node's help where the frontend shows it; false if this one cannot.
function openNativeHelp(node) {
  const help = store("nodeHelp");
  const definition = store("nodeDef")?.nodeDefsByName?.[node];
  const tabs = app.extensionManager.sidebarTab;
  if (!help?.openHelp || !definition || !tabs) return false;
  tabs.activeSidebarTabId = "node-library";
  help.openHelp(definition);
  return true;
}

const locale = () => app.extensionManager.setting?.get("Comfy.Locale") ?? "en";

async function helpText(node) {
  const language = locale();
  for (const page of [`${node}/${language}.md`, `${node}.md`]) {
    const answer = await fetch(new URL(`./docs/${page}`, import.meta.url));
    if (answer.ok) return answer.text();
  }
  return "This node has no help page.";
}

class RegistryPanel {
  constructor() {
    this.root = div("compiled-graphs-panel");
    this.open = new Set(); // keys of the sections that the person has opened
    this.busy = new Set(); // keys of the buttons whose answer is not there yet
    this.message = null;
    this.help = null;
    this.report = null;
    this.doctor = null;
    this.onEvent = this.onEvent.bind(this);
    this.events = [REGISTRY_EVENT, "status", "reconnected"]; // "status": a prompt has begun or ended
  }

  // The frontend calls this whenever it draws the sidebar, before the place is in the page, and may have drawn
  // another tab in the same place.
  mount(parent) {
    if (this.root.parentElement === parent && parent.childElementCount === 1) return;
    parent.replaceChildren(this.root);
    this.listen(true);
    this.refresh();
    this.examine();
  }

  listen(wanted) {
    for (const event of this.events) {
      api.removeEventListener(event, this.onEvent);
      if (wanted) api.addEventListener(event, this.onEvent);
    }
  }

  onEvent() {
    if (this.root.isConnected) this.refresh();
    else this.listen(false); // until the tab is opened again
  }

  async refresh() {
    this.stale = true;
    if (this.reading) return;
    this.reading = true;
    try {
      while (this.stale) {
        this.stale = false;
        await this.read();
      }
    } finally {
      this.reading = false;
    }
  }

  async read() {
    try {
      const answer = await api.fetchApi(`${ROUTES}/registry?language=${encodeURIComponent(locale())}`);
      if (!answer.ok) throw new Error(answer.statusText);
      this.report = await answer.json();
      if (this.message?.lost) this.message = null;
    } catch (error) {
      this.lose(error);
    }
    this.draw();
  }

  async examine() {
    try {
      const answer = await api.fetchApi(`${ROUTES}/doctor`);
      this.doctor = answer.ok ? await answer.json() : null;
    } catch {
      this.doctor = null;
    }
    this.draw();
  }

  say(text, ok) {
    this.message = { text, ok };
  }

  lose(error) {
    this.message = { text: `The server does not answer: ${error.message}`, ok: false, lost: true };
  }

  async post(key, route, fields) {
    this.busy.add(key);
    this.draw();
    try {
      const answer = await api.fetchApi(`${ROUTES}/${route}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(fields),
      });
      const told = await answer.json().catch(() => ({}));
      this.say(told.text ?? told.error ?? `${answer.status} ${answer.statusText}`, answer.ok);
    } catch (error) {
      this.lose(error);
    }
    this.busy.delete(key);
    await this.refresh();
    this.draw();
  }

  async showHelp(node) {
    if (openNativeHelp(node)) return;
    this.help = { node, text: await helpText(node) };
    this.draw();
  }

  draw() {
    const focused = this.root.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.root.replaceChildren(this.header(), this.help ? this.helpPage() : this.body());
    if (focused) this.root.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  button(key, label, symbol, title, onclick) {
    const disabled = this.busy.has(key);
    const parts = [icon(disabled ? "spin pi-spinner" : symbol), label && span("", label)].filter(Boolean);
    return element("button", { type: "button", title, disabled, onclick, ariaLabel: title, data: { key } }, parts);
  }

  section(key, className, summary, makeBody) {
    const open = this.open.has(key);
    const toggle = (event) => {
      event.preventDefault(); // drawn from what this panel knows, which outlives what is drawn
      this.open[open ? "delete" : "add"](key);
      this.draw();
    };
    const heading = element("summary", { data: { key }, onclick: toggle }, summary);
    return element("details", { className, open }, heading, open ? makeBody() : null);
  }

  header() {
    const { message } = this;
    return div(
      "cg-header",
      div(
        "cg-bar",
        span("cg-title", "Compiled Graphs"),
        this.button("help", "", "question-circle", "Open the help of Compile Model", () => this.showHelp(HELP.default)),
      ),
      element("div", { className: `cg-message ${message?.ok ? "" : "cg-bad"}`, role: "status", hidden: !message }, message?.text ?? ""),
    );
  }

  helpPage() {
    const close = this.button("back", "Back", "arrow-left", "Back to the registry", () => {
      this.help = null;
      this.draw();
    });
    return div("cg-body", close, element("pre", { className: "cg-help" }, this.help.text));
  }

  body() {
    if (!this.report) return div("cg-body cg-muted", "Reading the registry …");
    const workflows = Object.entries(this.report.workflows).reverse(); // the one that ran last comes first
    const cards = workflows.map(([id, workflow]) => this.workflow(id, workflow));
    return div(
      "cg-body",
      this.totals(),
      cards.length ? cards : div("cg-empty", icon("bolt"), "Nothing is compiled yet. Put Compile Model between a loader and a sampler, and queue a prompt."),
      this.doctor ? this.machine() : null,
      this.section("figures", "cg-card cg-figures", [span("", "What the figures mean")], () => this.figures()),
    );
  }

  totals() {
    const { totals, memory, disk } = this.report;
    const tile = (value, label, title) => element("div", { className: "cg-tile", title }, span("cg-value", value), span("cg-label", label));
    return div(
      "cg-tiles",
      tile(`${totals.compiled} / ${totals.regions}`, "kinds of block compiled", "Equal blocks of a model are one kind and share a graph"),
      tile(time(totals.seconds), "compiling and loading", `${count(totals.compiles, "graph")} compiled and ${totals.from_disk + totals.from_file} loaded since ComfyUI started`),
      tile(size(memory.bytes), `${count(memory.graphs, "graph")} in memory`, "Code only: graphs hold no weights"),
      disk
        ? tile(size(disk.bytes), `${count(disk.graphs, "graph")} on disk`, `At most ${size(disk.limit)}; then those go that were used longest ago`)
        : tile("–", "on disk", "The store is at a URL, or cannot be listed"),
    );
  }

  workflow(id, { roles }) {
    const key = `drop ${id}`;
    const opened = openWorkflow(id);
    const drop = () => this.post(key, "drop", { workflow: id });
    return div(
      "cg-card cg-workflow",
      div(
        "cg-row",
        element("span", { className: "cg-name", title: id }, icon(opened ? "sitemap" : "history"), workflowName(id)),
        this.button(key, "Drop", "eraser", "Take the graphs of this workflow out of memory. They stay on disk, and the next prompt loads them.", drop),
      ),
      Object.entries(roles).map(([name, role]) => this.role(id, name, role)),
    );
  }

  role(id, name, role) {
    const { node, kind } = readRole(name);
    const key = `${id} ${name}`;
    const save = () => this.post(`save ${key}`, "save", { workflow: id, role: name, name: this.fileName(id, kind) });
    const help = () => this.showHelp(this.nodeType(id, node, kind));
    return div(
      "cg-role",
      div(
        "cg-row",
        span("cg-kind", kind, node && span("cg-muted", ` node ${node}`)),
        role.speed_up
          ? element("span", { className: `cg-gain ${role.speed_up > 1.005 ? "cg-good" : ""}`, title: "Time of the uncompiled blocks over that of the compiled ones, each measured once. See below." }, times(role.speed_up))
          : null,
      ),
      role.regions ? this.bar(role) : div("cg-muted", "This model has left memory."),
      this.facts(role),
      this.reasons(role),
      role.graphs.length
        ? this.section(`graphs ${key}`, "cg-graphs", [span("", count(role.graphs.length, "graph"))], () => div("", role.graphs.map((graph) => this.graph(graph))))
        : null,
      div(
        "cg-buttons",
        this.button(`save ${key}`, "Save", "save", "Write these graphs to a file under models/compiled_graphs, as Save Graph does", save),
        this.button(`help ${key}`, "Help", "question-circle", "Open the help of the node that made this", help),
      ),
    );
  }

  nodeType(id, node, kind) {
    const type = openWorkflow(id)?.activeState?.nodes?.find((known) => String(known.id) === node)?.type;
    return type ?? HELP[kind] ?? HELP.default;
  }

  fileName(id, kind) {
    return `${workflowName(id)} ${kind}`.replace(/[^\p{L}\p{N}_.-]+/gu, "_").replace(/^[_.-]+/, "").slice(0, 80) || "graphs";
  }

  bar({ regions, compiled, eager }) {
    const part = (className, number) => {
      const made = span(className);
      made.style.flexGrow = number;
      return made;
    };
    const waiting = regions - compiled - eager;
    const texts = [`${compiled} of ${count(regions, "kind")} compiled`, eager && `${eager} eager`, waiting && `${waiting} when first used`];
    return div(
      "",
      div("cg-progress", part("cg-compiled", compiled), part("cg-eager", eager), part("cg-waiting", waiting)),
      div("cg-label", texts.filter(Boolean).join(" · ")),
    );
  }

  facts(role) {
    const pace = role.paces.at(-1);
    const eager = Object.values(role.reasons).reduce((sum, calls) => sum + calls, 0);
    const sources = [[role.compiles, "compiled"], [role.from_disk, "from disk"], [role.from_file, "from a file"], [role.from_memory, "from memory"]];
    const facts = [
      ["Graphs", sources.filter(([number]) => number).map(([number, from]) => `${number} ${from}`).join(", ")],
      ["Compile, load", time(role.seconds)],
      ["Network call", pace && `${time(pace.seconds)} at ${pace.shape.join("×")}`],
      ["Replayed steps", role.replays && role.replays.toLocaleString("en")],
      ["Block calls", role.calls && role.calls.toLocaleString("en") + (eager ? `, ${eager.toLocaleString("en")} uncompiled` : "")],
    ];
    return element("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]).flat());
  }

  reasons(role) {
    const counted = { ...Object.fromEntries(role.graphs.filter((graph) => graph.reason).map((graph) => [graph.reason, 0])), ...role.reasons };
    return Object.entries(counted).map(([reason, calls]) =>
      div(
        "cg-reason",
        icon("exclamation-triangle"),
        div("", this.report.explained[reason] ?? "", div("cg-muted", reason, calls ? ` · ${count(calls, "call")}` : "")),
      ),
    );
  }

  graph({ region, blocks, state, reason, source, seconds, bytes, timing }) {
    const made = { compiled: "compiled", disk: "loaded from disk", file: "loaded from a file" }[source];
    const timed = timing && `${time(timing.eager)} eager, ${time(timing.graph)} compiled`;
    const origin = [made && `${made} in ${time(seconds)}`, bytes && size(bytes)].filter(Boolean).join(" · ");
    const told = { compiled: [timed, origin].filter(Boolean).map((fact) => div("", fact)), eager: reason, waiting: "compiled when first used" }[state];
    return div(
      "cg-graph",
      div(
        "cg-row",
        span(`cg-dot cg-${state}`),
        span("cg-region", region, blocks > 1 ? span("cg-muted", ` ×${blocks}`) : null),
        timing && state === "compiled" ? span("cg-factor", times(timing.eager / timing.graph)) : span("cg-factor cg-muted", state === "compiled" ? "not measured" : state),
      ),
      div("cg-label", told ?? ""),
    );
  }

  machine() {
    const bad = this.doctor.filter((fact) => !fact.ok).length;
    const summary = [span("", "This machine"), span(bad ? "cg-muted cg-bad" : "cg-muted", bad ? ` ${count(bad, "thing")} to look at` : " in order")];
    return this.section("machine", "cg-card cg-machine", summary, () =>
      div(
        "",
        this.doctor.map(({ name, text, ok, remedy }) =>
          div(
            "cg-fact",
            element("i", { className: ok ? "pi pi-check cg-good" : "pi pi-times cg-bad" }),
            div("", element("strong", {}, name), ` ${text}`, remedy ? div("cg-muted", remedy) : null),
          ),
        ),
      ),
    );
  }

  figures() {
    const lines = [
      "1.30× says that the uncompiled blocks take 1.3 times as long as the compiled ones. When a graph is first used here it is checked against the uncompiled block, and then both run again, up to three times each, on the same inputs; the fastest run of each counts, with the GPU waited for. The figure of a model weights each graph by the number of its blocks.",
      "An image gains less where time goes elsewhere (text encoder, VAE, sampler), and more where steps are replayed as CUDA graphs. Graphs that a patch takes part in are not measured, and neither are any where verify is off.",
      "A network call is the median of the last 20 calls at that size in which nothing was compiled, loaded or checked; on a GPU by the GPU's own clock. Most samplers make one call a step, some two.",
      "Memory is the size of the graphs' code. Graphs hold no weights.",
    ];
    return div("", lines.map((line) => element("p", {}, line)));
  }
}

app.registerExtension({
  name: "compiled_graphs.registry_panel",

  setup() {
    if (!app.extensionManager?.registerSidebarTab) return;
    document.head.append(element("link", { rel: "stylesheet", href: new URL("./registry_panel.css", import.meta.url).href }));
    const panel = new RegistryPanel();
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-bolt",
      title: "Compiled Graphs",
      label: "Graphs",
      tooltip: "Compiled Graphs: what is compiled, and what it gains",
      type: "custom",
      render: (parent) => panel.mount(parent),
      destroy: () => panel.listen(false),
    });
  },
});
