// The help pages' Markdown as elements: headings, paragraphs, lists, tables, code, bold and links. Everything else is
// text, so a page cannot bring markup of its own.
const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\((https?:[^)\s]+)\)/g;

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parts.push(text.slice(end, match.index));
    const [, code, bold, label, address] = match;
    if (code) parts.push(element("code", code));
    else if (bold) parts.push(element("strong", bold));
    else parts.push(Object.assign(element("a", label), { href: address, target: "_blank", rel: "noopener" }));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

const cells = (line) => line.replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const row = (tag, line) => element("tr", ...cells(line).map((cell) => element(tag, ...inline(cell))));

// Lines that belong together: what an empty line ends, and each heading and point of a list.
function blocks(source) {
  const found = [];
  let open = null;
  for (const line of source.split("\n")) {
    const [, mark, rest] = line.match(/^(#{1,4}|-|\d+\.|(?=\|))\s*(.*)$/) ?? [null, null, line.trim()];
    if (mark?.startsWith("#")) {
      found.push({ kind: `h${mark.length}`, lines: [rest] });
      open = null;
    } else if (mark === "") {
      if (open?.kind !== "table") found.push((open = { kind: "table", lines: [] }));
      open.lines.push(line);
    } else if (mark) {
      found.push((open = { kind: mark === "-" ? "ul" : "ol", lines: [rest] }));
    } else if (!line.trim()) {
      open = null;
    } else if (open && open.kind !== "table") {
      open.lines.push(rest);
    } else {
      found.push((open = { kind: "p", lines: [rest] }));
    }
  }
  return found;
}

export function markdown(source) {
  const made = [];
  for (const { kind, lines } of blocks(source)) {
    const text = lines.join(" ");
    if (kind === "table") {
      const [head, , ...body] = lines;
      made.push(element("table", row("th", head), ...body.map((line) => row("td", line))));
    } else if (kind === "ul" || kind === "ol") {
      const list = made.at(-1)?.localName === kind ? made.at(-1) : element(kind);
      list.append(element("li", ...inline(text)));
      if (made.at(-1) !== list) made.push(list);
    } else {
      made.push(element(kind, ...inline(text)));
    }
  }
  return made;
}
