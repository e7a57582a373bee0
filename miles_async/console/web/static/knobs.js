// Live settings: what they are, what they may be, when a change takes effect; a change is checked as miles-async tune checks it.

import { Panel, ask, el } from "./dom.js";
import { clockTime } from "./format.js";

const FIRST = ["max_weight_staleness", "over_sampling_batch_size", "rollout_batch_size", "rollout_temperature", "lr"]; // most often turned

export class Knobs extends Panel {
  counted = "knob_epoch";

  constructor(place, now) {
    super();
    this.now = now;
    this.search = el("input", { type: "search", id: "knob-search", placeholder: "staleness", oninput: () => this.filter() });
    this.reason = el("input", { type: "text", id: "knob-reason", maxlength: "200", placeholder: "kept in the log" });
    this.said = el("p", { class: "soft", role: "status" });
    this.list = el("div", { class: "knobs" });
    this.log = el("ol", { class: "log", reversed: true });
    place.append(el("h2", { text: "Knobs" }),
      el("div", { class: "controls" }, el("label", { for: "knob-search" }, "Find "), this.search, el("label", { for: "knob-reason" }, "Why you change it "), this.reason),
      this.said, this.list, el("h2", { text: "Changes so far" }), this.log);
  }

  find(text) {
    this.search.value = text;
    this.search.focus();
    this.filter();
  }

  async load() {
    let found;
    try {
      found = await ask("/api/knobs");
    } catch (error) {
      this.said.textContent = error.message;
      return;
    }
    this.said.textContent = [this.note, this.note.startsWith(`epoch ${found.epoch}:`) ? "" : `now epoch ${found.epoch}`, this.readOnly].filter(Boolean).join("; ");
    const names = Object.keys(found.knobs);
    const order = [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => !FIRST.includes(name))];
    const typed = new Map([...this.list.querySelectorAll(".typed")].map((field) => [field.name, field.value]));
    const focused = document.activeElement?.name;
    this.list.replaceChildren(...order.map((name) => this.form(name, found.knobs[name], typed.get(name))));
    if (focused) this.list.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
    this.filter();
    this.log.replaceChildren(...found.log.map((patch) => this.entry(patch, found.epoch)));
  }

  form(name, knob, typed) {
    const fixed = knob.follows || this.readOnly;
    const id = `knob-${name}`;
    const error = el("p", { class: "error", id: `${id}-error`, role: "alert" });
    const about = el("p", { class: "soft small", id: `${id}-about`, text: [knob.help, knob.follows ? `Follows: ${knob.follows}.` : `Takes effect at: ${knob.applies}.`].join(" ") });
    const permitted = `${knob.range}${knob.unit ? ` (${knob.unit})` : ""}`;
    const field = knob.choices.length
      ? el("select", { id, name, class: "field" }, knob.choices.map((text) => el("option", { value: text, text })))
      : el("input", { id, name, class: "field", type: "text", autocomplete: "off", spellcheck: "false" });
    field.value = typed ?? knob.shown;
    field.setAttribute("aria-describedby", `${about.id} ${error.id}`);
    field.disabled = Boolean(fixed);
    if (typed !== undefined) field.classList.add("typed");
    field.addEventListener("input", () => field.classList.toggle("typed", field.value !== knob.shown));
    const apply = async (event) => {
      event.preventDefault();
      error.textContent = "";
      try {
        const made = await ask("/api/knobs", { values: { [name]: field.value }, reason: this.reason.value });
        field.classList.remove("typed");
        this.note = `epoch ${made.epoch}: ${Object.entries(made.values).map(([k, v]) => `${k} = ${v}`).join(", ")}, at: ${knob.applies}`;
        await this.load();
      } catch (refused) {
        error.textContent = refused.message;
        field.setAttribute("aria-invalid", "true");
        field.focus();
      }
    };
    return el("form", { onsubmit: apply, "data-name": name },
      el("label", { for: id, text: name }), field, el("span", { class: "soft small", text: permitted }),
      fixed ? el("span") : el("button", { type: "submit", "aria-label": `Apply ${name}`, text: "Apply" }), about, error);
  }

  filter() {
    const word = this.search.value.trim().toLowerCase().replace(/[ -]/g, "_");
    for (const form of this.list.children) form.hidden = !form.dataset.name.includes(word) && !form.textContent.toLowerCase().includes(this.search.value.toLowerCase());
  }

  entry(patch, epoch) {
    const values = Object.entries(patch.values).map(([k, v]) => k ? `${k} = ${v}` : v).join(", ") || "settings of a start";
    const back = async () => {
      try {
        const made = await ask("/api/knobs", { revert: patch.epoch, reason: this.reason.value });
        this.note = `epoch ${made.epoch}: back to epoch ${patch.epoch}`;
        await this.load();
      } catch (refused) {
        this.said.textContent = refused.message;
      }
    };
    const button = this.readOnly || patch.epoch === epoch ? null
      : el("button", { type: "button", class: "inline", text: `back to epoch ${patch.epoch}`, onclick: back });
    return el("li", { value: patch.epoch }, values, el("span", { class: "soft small", text: ` ${clockTime(patch.wall)} ${patch.author}${patch.reason ? `: ${patch.reason}` : ""} ` }), button);
  }
}
