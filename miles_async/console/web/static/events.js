// What happened, by severity; what was dropped, why, and one sample's life.

import { ask, el, rows, say, table } from "./dom.js";
import { clockTime, count, short } from "./format.js";

const WEIGHT = { info: 0, warning: 1, error: 2 };

export class Events {
  constructor(place) {
    this.level = el("select", { onchange: () => this.draw() }, [["0", "all"], ["1", "warnings and errors"], ["2", "errors"]].map(([value, text]) => el("option", { value, text })));
    const [wrap, body] = table("Events", ["when", "severity", "what", ""], "long");
    this.body = body;
    this.none = el("p", { class: "soft" });
    place.append(el("h2", { text: "Events" }), el("div", { class: "controls" }, el("label", {}, "Show ", this.level)), this.none, wrap);
  }

  show(state) {
    this.events = state.events ?? [];
    this.draw();
  }

  draw() {
    const found = (this.events ?? []).filter((e) => WEIGHT[e.level] >= Number(this.level.value));
    say(this.none, found.length ? "" : "None of these.");
    rows(this.body, found, (e) => `${e.wall}${e.what}${e.text}`, (e) => el("tr", { class: e.level }, el("td", { class: "when", text: clockTime(e.wall) }),
      el("td", { text: e.level }), el("td", { text: e.what }), el("td", { text: e.text })), () => {});
  }
}

export class Drops {
  constructor(place) {
    const [totals, totalRows] = table("Dropped groups by reason", ["reason", "groups", "what it means"], "long");
    const [newest, newestRows] = table("Newest drops", ["when", "group", "reason", "reward", "samples"], "long");
    Object.assign(this, { totalRows, newestRows });
    this.none = el("p", { class: "soft" });
    this.name = el("input", { type: "text", id: "trace-id", placeholder: "g0000042/3", autocomplete: "off", spellcheck: "false" });
    this.life = el("div", { class: "life", role: "status" });
    place.append(el("h2", { text: "Dropped, by reason" }), this.none, totals,
      el("h2", { text: "One sample's life" }),
      el("form", { class: "controls", onsubmit: (event) => { event.preventDefault(); this.trace(this.name.value); } },
        el("label", { for: "trace-id" }, "Sample or group "), this.name, el("button", { type: "submit", text: "Trace" })),
      this.life, el("h2", { text: "Newest drops" }), newest);
  }

  show(state) {
    const drops = state.drops;
    if (!drops) return;
    const totals = drops.total;
    say(this.none, totals.length ? "" : "Nothing was dropped.");
    rows(this.totalRows, totals, ([reason]) => reason, ([reason, , means]) => el("tr", {}, el("th", { scope: "row", text: reason }), el("td"), el("td", { text: means })),
      (row, [, n]) => say(row.children[1], count(n)));
    // Rows that somebody points at, or has the focus in, stay where they are.
    if (this.newestRows.matches(":hover, :focus-within")) return;
    rows(this.newestRows, drops.newest, (d) => `${d.group}${d.wall}${d.members ?? ""}`, (d) => el("tr", {}, el("td", { class: "when", text: clockTime(d.wall) }),
      el("td", {}, el("button", { type: "button", class: "inline", text: d.group, onclick: () => this.trace(d.group) })),
      el("td", { text: d.reason }), el("td", { text: d.reward === undefined ? "" : short(d.reward) }), el("td", { text: d.members ? d.members.length : d.samples ?? "" })), () => {});
  }

  async trace(id) {
    this.name.value = id;
    this.life.textContent = "looking";
    try {
      const found = await ask(`/api/trace?id=${encodeURIComponent(id)}`);
      this.life.replaceChildren(el("p", {}, el("strong", { text: `${found.sample}: ` }), found.state),
        el("ol", {}, found.moments.map((m) => el("li", {}, el("span", { class: "soft small", text: m.wall ? `${clockTime(m.wall)} ` : "" }), el("span", { class: "pre", text: m.text })))));
    } catch (error) {
      this.life.textContent = error.message;
    }
    this.life.scrollIntoView({ block: "nearest" });
  }
}
