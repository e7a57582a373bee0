// What the policy wrote: prompts, turns, answers and rewards, the worst first. Every text here is data and is shown as such.

import { Panel, ask, el } from "./dom.js";
import { short } from "./format.js";

export class Samples extends Panel {
  counted = "samples";

  constructor(place) {
    super();
    this.order = this.select("Order", [["worst", "worst reward first"], ["best", "best reward first"], ["kept", "as they were kept"]]);
    this.step = this.select("Step", [["", "newest"]]);
    this.set = this.select("From", [["", "training"]]);
    this.said = el("p", { class: "soft", role: "status" });
    this.list = el("div", { class: "samples" });
    place.append(el("h2", { text: "Samples" }),
      el("div", { class: "controls" }, ...[this.order, this.step, this.set].map((s) => s.label), el("button", { type: "button", text: "Refresh", onclick: () => this.load() })),
      this.said, this.list);
  }

  select(name, choices) {
    const list = el("select", { onchange: () => { if (name === "From") this.step.list.value = ""; this.load(); } });
    const found = { list, label: el("label", {}, `${name} `, list) };
    found.fill = (items) => {
      const before = list.value;
      list.replaceChildren(...items.map(([value, text]) => el("option", { value, text })));
      list.value = items.some(([value]) => value === before) ? before : "";
    };
    list.replaceChildren(...choices.map(([value, text]) => el("option", { value, text })));
    return found;
  }

  async load() {
    const query = new URLSearchParams({ order: this.order.list.value, step: this.step.list.value, set: this.set.list.value });
    let found;
    try {
      found = await ask(`/api/samples?${query}`);
    } catch (error) {
      this.said.textContent = error.message;
      return;
    }
    this.step.fill([["", "newest"], ...found.steps.map((n) => [String(n), String(n)])]);
    this.set.fill([["", "training"], ...found.sets.map((name) => [name, `evaluation ${name}`])]);
    this.said.textContent = found.samples.length
      ? `${found.all} samples kept at step ${found.samples[0].step}${found.all > found.samples.length ? `, ${found.samples.length} shown` : ""}`
      : "No sample is kept yet: the first ones come within a minute of the first trained step.";
    this.list.replaceChildren(...found.samples.map((sample) => article(sample)));
  }
}

/** One sample: its numbers, its prompt and every turn. */
export function article(sample) {
  const parts = Object.entries(sample.rewards ?? {}).map(([name, value]) => `${name} ${short(value)}`);
  const turns = sample.turns ?? [{ by: "model", text: sample.response ?? "" }];
  const facts = [`step ${sample.step}`, `version ${sample.version ?? "?"}`, `${sample.tokens ?? "?"} tokens`, sample.finish, ...parts].filter(Boolean);
  const block = (by, text) => el("div", { class: `turn ${by}` }, el("span", { class: "by soft", text: by }), el("pre", { text: text === "" ? "(empty)" : text }));
  return el("article", {},
    el("h3", {}, el("span", { class: "reward", text: `reward ${short(sample.reward)}` }), ` ${sample.sample} `, el("span", { class: "soft small", text: facts.join(" · ") })),
    sample.label ? el("p", { class: "small", text: `label: ${sample.label}` }) : null,
    block("prompt", sample.prompt ?? ""),
    ...turns.map((turn) => block(turn.by, turn.text)));
}
