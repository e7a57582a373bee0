// Elements without markup: whatever a model wrote reaches the page as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props = {}, ...children) => fill(document.createElementNS(SVG, tag), props, children);
export const byId = (id) => document.getElementById(id);

/** Set the text only where it differs: a screen reader speaks, and a selection ends, only on change. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function toggle(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

/** Keep the rows of a table body by key: made once, updated in place, in the order of `items`. */
export function rows(body, items, key, make, update) {
  const known = body.known ?? (body.known = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, row] of known) if (!wanted.has(name)) { row.remove(); known.delete(name); }
  items.forEach((item, at) => {
    let row = known.get(key(item));
    if (!row) known.set(key(item), (row = make(item)));
    update(row, item);
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

/** A table with a head; returns [wrapper, body]. The wrapper scrolls and can be reached by keyboard. */
export function table(label, heads, kind = "") {
  const body = el("tbody");
  const head = el("tr", {}, heads.map((text) => el("th", { scope: "col", text })));
  const wrap = el("div", { class: `scroll ${kind}`, role: "region", "aria-label": label, tabindex: "0" },
    el("table", {}, el("thead", {}, head), body));
  return [wrap, body];
}

/** Ask the server; what it refuses is thrown with its one line. */
export async function ask(path, body) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw Object.assign(new Error("the console does not answer: is it still running?"), { each: [] });
  }
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error ?? `status ${answer.status}`), { each: found.each ?? [] });
  return found;
}

/** A panel with a list, which is read again (`load`) when the state counts (`counted`) another number of what is in it. */
export class Panel {
  show(state) {
    this.readOnly = state.read_only;
    const n = state.counts?.[this.counted];
    if (this.open && n !== this.n) this.load();
    this.n = n;
  }

  opened() {
    this.open = true;
    this.note = ""; // what was done last; it stays while the list is read again
    this.load();
  }
}
