// The registry panel: a sidebar tab with what is compiled, what is not and why, and what it gains.
// A frontend without sidebar tabs (before autumn 2024) gets none.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { markdown } from "./markdown.js";
import { inLanguage, language, ownLanguage, say } from "./words.js";

const TAB = "compiled-graphs";
const REGISTRY_EVENT = "compiled_graphs.registry";
const ROUTES = "/compiled_graphs";
const HELP = {
  VAE: "CG_VAESpeedup",
  ControlNet: "CG_ControlNetSpeedup",
  "text encoder": "CG_CLIPSpeedup",
  default: "CG_CompileModel",
};

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
  if (seconds >= 100) return quantity(seconds / 60, say("min"));
  if (seconds < 0.001) return `<\u00a01\u00a0${say("ms")}`;
  return seconds >= 1 ? quantity(seconds, say("s")) : quantity(seconds * 1000, say("ms"));
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), units.length - 1);
  return power ? quantity(bytes / 1000 ** power, units[power]) : `${bytes}\u00a0B`;
}

const whole = (number) => number.toLocaleString(language());
const listed = (texts) => texts.filter(Boolean).join(say(", "));
const graphs = (number) => (number === 1 ? say("1 graph") : say("{n} graphs", { n: whole(number) }));
const SAME = 0.05; // a gain or a loss of less than this share is none

// What a factor of speed says to a person, and how it looks.
function gain(factor) {
  if (Math.abs(factor - 1) < SAME) return { text: say("same speed"), className: "" };
  if (factor > 1) return { text: say("{x}× faster", { x: factor.toFixed(2) }), className: "cg-good" };
  return { text: say("{x}× slower", { x: (1 / factor).toFixed(2) }), className: "cg-bad" };
}

const PATIENCE = 30_000; // milliseconds until a request counts as lost: the next one would wait for it
const PATIENCE_TO_WRITE = 300_000;

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
  return openWorkflow(id)?.filename ?? say("Workflow {id}", { id: id.slice(0, 8) });
}

async function helpText(node) {
  const own = language() === "en" ? [] : [`${node}/${language()}.md`];
  for (const page of [...own, `${node}.md`]) {
    const answer = await fetch(new URL(`./docs/${page}`, import.meta.url), { signal: AbortSignal.timeout(PATIENCE) });
    if (answer.ok) return answer.text();
  }
  return say("This node has no help page.");
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
    this.latest = {}; // the newest request of each kind: an older one may be answered after it
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
      const path = `${ROUTES}/registry?language=${encodeURIComponent(language())}`;
      const answer = await api.fetchApi(path, { signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(answer.statusText);
      this.report = await answer.json();
      if (this.message?.lost) this.message = null;
    } catch (error) {
      this.lose(error);
    }
    this.draw();
  }

  async examine() {
    const isLatest = this.begin("doctor");
    let facts = null;
    try {
      const path = `${ROUTES}/doctor?language=${encodeURIComponent(language())}`;
      const answer = await api.fetchApi(path, { signal: AbortSignal.timeout(PATIENCE) });
      if (answer.ok) facts = await answer.json();
    } catch {
      // The panel does without this section.
    }
    if (!isLatest()) return;
    this.doctor = facts;
    this.draw();
  }

  begin(kind) {
    const request = (this.latest[kind] = Symbol(kind));
    return () => this.latest[kind] === request;
  }

  say(text, ok) {
    this.message = { text, ok };
  }

  lose(error) {
    this.message = { text: say("The server does not answer: {error}", { error: error.message }), ok: false, lost: true };
  }

  async post(key, route, fields) {
    this.busy.add(key);
    this.draw();
    try {
      const answer = await api.fetchApi(`${ROUTES}/${route}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(fields),
        signal: AbortSignal.timeout(PATIENCE_TO_WRITE),
      });
      const told = await answer.json().catch(() => ({}));
      const text = told.text ?? told.error ?? `${answer.status} ${answer.statusText}`;
      this.say(inLanguage({ ...told, text }), answer.ok);
    } catch (error) {
      this.lose(error);
    }
    this.busy.delete(key);
    await this.refresh();
    this.draw();
  }

  async showHelp(node) {
    const isLatest = this.begin("help");
    try {
      const text = await helpText(node);
      if (!isLatest()) return;
      this.help = { node, text };
    } catch (error) {
      if (!isLatest()) return;
      this.lose(error);
    }
    this.draw();
  }

  draw() {
    const focused = this.root.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.root.lang = ownLanguage();
    this.root.replaceChildren(this.header(), this.help ? this.helpPage() : this.body());
    if (focused) this.root.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  button(key, label, symbol, title, onclick) {
    const busy = this.busy.has(key); // such a button stays enabled: a disabled one would lose the focus
    const parts = [icon(busy ? "spin pi-spinner" : symbol), label && span("", label)].filter(Boolean);
    const state = { ariaLabel: title, ariaDisabled: String(busy), onclick: busy ? null : onclick };
    return element("button", { type: "button", title, ...state, data: { key } }, parts);
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
        this.button("help", "", "question-circle", say("Open the help of Compile Model"), () => this.showHelp(HELP.default)),
      ),
      element("div", { className: `cg-message ${message?.ok ? "" : "cg-bad"}`, role: "status", hidden: !message }, message?.text ?? ""),
    );
  }

  helpPage() {
    const close = this.button("back", say("Back"), "arrow-left", say("Back to the models"), () => {
      this.begin("help"); // a text that still loads must not open this page again
      this.help = null;
      this.draw();
    });
    return div("cg-body", close, div("cg-help", markdown(this.help.text)));
  }

  body() {
    if (!this.report) return div("cg-body cg-muted", say("Reading …"));
    const workflows = Object.entries(this.report.workflows).reverse(); // the one that ran last comes first
    const isGone = ([id, { roles }]) => !openWorkflow(id) && Object.values(roles).every((role) => !role.regions);
    const cards = workflows.filter((named) => !isGone(named)).map(([id, workflow]) => this.workflow(id, workflow));
    const gone = workflows.filter(isGone);
    return div(
      "cg-body",
      this.totals(),
      cards.length ? cards : div("cg-empty", icon("bolt"), say("Nothing is compiled yet. Put Compile Model between a loader and a sampler, and queue a prompt.")),
      gone.length ? this.section("earlier", "cg-card cg-earlier", [span("", say("Earlier")), span("cg-muted", ` ${gone.length}`)], () => div("", gone.map(([id, workflow]) => this.workflow(id, workflow)))) : null,
      this.doctor ? this.machine() : null,
      this.section("figures", "cg-card cg-figures", [span("", say("What the figures mean"))], () => this.figures()),
    );
  }

  totals() {
    const { totals, memory, disk } = this.report;
    const tile = (value, label, title) => element("div", { className: "cg-tile", title }, span("cg-value", value), span("cg-label", label));
    return div(
      "cg-tiles",
      tile(`${totals.compiled} / ${totals.regions}`, say("block types compiled"), say("Equal blocks of a model are one type and share a graph")),
      tile(time(totals.seconds), say("compiling and loading"), say("{compiled} compiled and {loaded} loaded since ComfyUI started", { compiled: graphs(totals.compiles), loaded: totals.from_disk + totals.from_file })),
      tile(size(memory.bytes), say("{graphs} in memory", { graphs: graphs(memory.graphs) }), say("Code only: graphs hold no weights")),
      disk
        ? tile(size(disk.bytes), say("{graphs} on disk", { graphs: graphs(disk.graphs) }), say("At most {size}. Then the graphs that were not used for the longest time are removed", { size: size(disk.limit) }))
        : tile("–", say("on disk"), say("The store is at a URL, or cannot be listed")),
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
        this.button(key, say("Free memory"), "eraser", say("Take the graphs of this workflow out of memory. They stay on disk, and the next prompt loads them."), drop),
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
        span("cg-kind", say(kind), node && span("cg-muted", ` ${say("node {node}", { node })}`)),
        this.gain(role.speed_up),
      ),
      role.regions ? this.bar(role) : div("cg-muted", say("This model is not in memory any more.")),
      this.reasons(role),
      this.section(`facts ${key}`, "cg-facts", [span("", say("Details"))], () => this.facts(role)),
      role.graphs.length
        ? this.section(`graphs ${key}`, "cg-graphs", [span("", graphs(role.graphs.length))], () => div("", role.graphs.map((graph) => this.graph(graph))))
        : null,
      div(
        "cg-buttons",
        this.button(`save ${key}`, say("Save"), "save", say("Write these graphs to a file under models/compiled_graphs, as Save Graph does"), save),
        this.button(`help ${key}`, say("Help"), "question-circle", say("Open the help of the node that made this"), help),
      ),
    );
  }

  gain(factor) {
    if (!factor) return null;
    const { text, className } = gain(factor);
    const title = say("Time of the uncompiled blocks over that of the compiled ones, each measured once. See below.");
    return element("span", { className: `cg-gain ${className}`, title }, text);
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
    const texts = [
      say("{compiled} of {regions} block types compiled", { compiled, regions }),
      eager && say("{n} at normal speed", { n: eager }),
      waiting && say("{n} when first used", { n: waiting }),
    ];
    return div(
      "",
      div("cg-progress", part("cg-compiled", compiled), part("cg-eager", eager), part("cg-waiting", waiting)),
      div("cg-label", texts.filter(Boolean).join(" · ")),
    );
  }

  facts(role) {
    const pace = role.paces.at(-1);
    const eager = Object.values(role.reasons).reduce((sum, calls) => sum + calls, 0);
    const sources = [
      role.compiles && say("{n} compiled", { n: role.compiles }),
      role.from_disk && say("{n} from disk", { n: role.from_disk }),
      role.from_file && say("{n} from a file", { n: role.from_file }),
      role.from_memory && say("{n} from memory", { n: role.from_memory }),
    ];
    const facts = [
      [say("Graphs"), listed(sources)],
      [say("Compiling and loading"), time(role.seconds)],
      [say("Network call"), pace && say("{time} at {size}", { time: time(pace.seconds), size: pace.shape.join("×") })],
      [say("Replayed steps"), role.replays && whole(role.replays)],
      [say("Block calls"), role.calls && listed([whole(role.calls), eager && say("{n} uncompiled", { n: whole(eager) })])],
    ];
    return element("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]).flat());
  }

  reasons(role) {
    const counted = { ...Object.fromEntries(role.graphs.filter((graph) => graph.reason).map((graph) => [graph.reason, 0])), ...role.reasons };
    return Object.entries(counted).map(([reason, calls]) =>
      div(
        "cg-reason",
        icon("exclamation-triangle"),
        div("", this.report.explained[reason] ?? "", div("cg-muted", reason, calls ? ` · ${calls === 1 ? say("1 call") : say("{n} calls", { n: whole(calls) })}` : "")),
      ),
    );
  }

  graph({ region, blocks, state, reason, source, seconds, bytes, timing }) {
    const took = { time: time(seconds ?? 0) };
    const made = {
      compiled: say("compiled in {time}", took),
      disk: say("loaded from disk in {time}", took),
      file: say("loaded from a file in {time}", took),
    }[source];
    const timed = timing && say("{eager} uncompiled, {graph} compiled", { eager: time(timing.eager), graph: time(timing.graph) });
    const origin = [made, bytes && size(bytes)].filter(Boolean).join(" · ");
    const told = { compiled: [timed, origin].filter(Boolean).map((fact) => div("", fact)), eager: reason, waiting: say("compiled when first used") }[state];
    const measured = timing && state === "compiled" ? gain(timing.eager / timing.graph) : null;
    const otherwise = { compiled: say("not measured"), eager: say("normal speed"), waiting: say("waiting") }[state];
    return div(
      "cg-graph",
      div(
        "cg-row",
        span(`cg-dot cg-${state}`),
        span("cg-region", region, blocks > 1 ? span("cg-muted", ` ×${blocks}`) : null),
        measured ? span(`cg-factor ${measured.className}`, measured.text) : span("cg-factor cg-muted", otherwise),
      ),
      div("cg-label", told ?? ""),
    );
  }

  machine() {
    const bad = this.doctor.filter((fact) => !fact.ok).length;
    const state = { 0: say("in order"), 1: say("1 thing to look at") }[bad] ?? say("{n} things to look at", { n: bad });
    const summary = [span("", say("This machine")), span(bad ? "cg-muted cg-bad" : "cg-muted", ` ${state}`)];
    return this.section("machine", "cg-card cg-machine", summary, () =>
      div(
        "",
        this.doctor.map(({ name, text, ok, remedy, present }) =>
          div(
            "cg-fact",
            icon(!ok ? "times cg-bad" : present === false ? "minus cg-muted" : "check cg-good"),
            div("", element("strong", {}, name), ` ${text}`, remedy ? div("cg-muted", remedy) : null),
          ),
        ),
      ),
    );
  }

  figures() {
    const lines = [
      say("1.30× faster means that the uncompiled blocks take 1.3 times as long as the compiled ones. On its first use each graph is checked against the uncompiled block. Then both run up to three times on the same inputs, and the fastest run of each counts. The figure of a model counts each graph as often as it has blocks."),
      say("A whole image gains less, because the text encoder, the VAE and the sampler take time too. It gains more if steps are replayed as CUDA graphs. Graphs with a patch in them are not measured, nor are graphs with verify off."),
      say("A network call is the median of the last 20 calls at that size, without those in which something was compiled, loaded or checked. Most samplers make one call per step, some make two."),
      say("Memory is the size of the graphs' code. Graphs hold no weights."),
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
    api.addEventListener(REGISTRY_EVENT, () => {}); // the frontend warns of messages that nobody listens to
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-bolt",
      title: "Compiled Graphs",
      label: say("Compiled"),
      tooltip: say("Compiled Graphs: what is compiled, and what it gains"),
      type: "custom",
      render: (parent) => panel.mount(parent),
      destroy: () => panel.listen(false),
    });
  },
});
