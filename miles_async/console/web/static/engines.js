// Who works in the run: engines with versions, hosts, requests and their memory; then the other rooms and what they wait for.

import { el, rows, say, table, toggle } from "./dom.js";
import { duration, percent } from "./format.js";

const COLOURS = { "generating": "green", "taking a new version": "purple", "booting": "orange", "without work": "grey" };
const SHOWN = 400;
const grave = (a) => (a.life === "late" || a.life === "dead" || a.state === "stalled" || a.state === "failed" ? 0 : a.life === "ended" ? 2 : 1);

export class Engines {
  constructor(place, now) {
    this.now = now;
    this.serving = el("p", { class: "soft" });
    this.split = el("div", { class: "split", role: "img", "aria-label": "Time of the engines: not known yet" });
    this.words = el("p", { class: "soft small" });
    const [engines, engineRows] = table("Engines", ["engine", "version", "running", "KV", "state"], "tall");
    const [others, otherRows] = table("Rooms", ["room", "state", "waits for"], "tall");
    this.engineRows = engineRows;
    this.otherRows = otherRows;
    this.head = el("h2", { text: "Engines" });
    place.append(this.head, this.serving, this.split, this.words, engines, el("h2", { text: "Rooms" }), others);
  }

  show(state) {
    if (!state.actors) return;
    const hosts = new Set(state.actors.map((a) => a.host));
    this.one = hosts.size === 1;
    say(this.head, this.one ? `Engines, all on ${[...hosts][0]}` : "Engines");
    const engines = state.engines;
    const names = engines.serving.map(([version, n]) => `${version < 0 ? "no version yet" : `v${version}`} ×${n}`);
    say(this.serving, names.length ? `serve ${names.slice(0, 6).join(", ")}` : "no engine is alive");
    this.bar(engines);
    const shown = state.actors.filter((a) => a.role !== "launcher" || grave(a) === 0).slice().sort((a, b) => grave(a) - grave(b));
    const cells = (n) => (a) => el("tr", {}, el("th", { scope: "row" }, a.name, el("span", { class: "soft small host", text: ` ${a.host}` })),
      Array.from({ length: n }, () => el("td")));
    rows(this.engineRows, shown.filter((a) => a.role === "generation").slice(0, SHOWN), (a) => a.name, cells(4), (row, a) => {
      this.fill(row, a, [a.version < 0 ? "–" : `v${a.version}`, a.slots ? `${a.busy}/${a.slots}` : String(a.busy),
        a.kv === null || a.kv === undefined ? "–" : percent(a.kv), this.state(a)]);
      row.title = [a.waits && `waits for ${a.waits}`, a.queued ? `${a.queued} in the engine's queue` : ""].filter(Boolean).join("; ");
    });
    rows(this.otherRows, shown.filter((a) => a.role !== "generation"), (a) => a.name, cells(2), (row, a) =>
      this.fill(row, a, [this.state(a), a.waits + (a.since ? ` ${duration(this.now() - a.since)}` : "")]));
  }

  fill(row, a, texts) {
    row.querySelector(".host").hidden = this.one;
    texts.forEach((text, i) => say(row.children[i + 1], text));
    toggle(row, "bad", grave(a) === 0);
    toggle(row, "soft", grave(a) === 2);
  }

  state(a) {
    if (a.life === "late" || a.life === "dead") return `${a.life === "dead" ? "dead" : "silent"} ${duration(this.now() - a.heard)}`;
    return a.doing || a.state;
  }

  bar(engines) {
    const parts = Object.entries(engines.split);
    const text = parts.map(([what, share]) => `${what} ${percent(share)}`).join(", ");
    const used = engines.slots_used === null ? "" : `; ${percent(engines.slots_used)} of the slots in use`;
    say(this.words, text ? `Last minutes: ${text}${used}.` : "");
    if (this.split.key === text) return;
    this.split.key = text;
    this.split.setAttribute("aria-label", `Time of the engines: ${text || "not known yet"}`);
    this.split.replaceChildren(...parts.map(([what, share]) => {
      const part = el("span", { class: `fill-${COLOURS[what]}` });
      part.style.width = `${100 * share}%`;
      return part;
    }));
  }
}
