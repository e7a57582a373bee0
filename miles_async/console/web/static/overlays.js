// Other runs over this one's curves: which ones, each with a letter and a colour that stay its own while it is shown.

import { RUN_HUES } from "./chartlist.js";
import { ask, byId, el, say } from "./dom.js";

const HUES = RUN_HUES.slice(1); // the first is this run's
const MOST = HUES.length;
const LETTERS = "ABCDEF";

export class Overlays {
  constructor(shown) {
    this.shown = shown; // told of every change: a list of { name, key, hue, curves }
    this.runs = [];
    this.names = null; // of the runs beside this one; null until they were read
    this.button = byId("compare");
    this.box = byId("runs");
    this.find = el("input", { type: "search", "aria-label": "Find a run by its name", placeholder: "Find a run", oninput: () => this.list() });
    this.said = el("p", { class: "small", role: "status" });
    this.choices = el("ul", { class: "choices" });
    const note = el("p", { class: "small soft", text: "Of each, every chart's first curve as it is when chosen. Stacked charts and ages stay this run's alone." });
    this.box.append(this.find, this.said, note, this.choices);
    this.button.addEventListener("click", () => this.open(this.box.hidden));
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { this.open(false); this.button.focus(); }
    });
    document.addEventListener("pointerdown", (event) => {
      if (!this.box.hidden && !this.box.parentElement.contains(event.target)) this.open(false);
    });
    this.box.parentElement.addEventListener("focusout", (event) => {
      if (event.relatedTarget && !this.box.parentElement.contains(event.relatedTarget)) this.open(false);
    });
  }

  async open(wanted) {
    this.box.hidden = !wanted;
    this.button.setAttribute("aria-expanded", wanted);
    if (!wanted) return;
    this.find.focus();
    try {
      this.names = await ask("/api/runs");
      this.tell();
    } catch (error) {
      this.tell(`The runs beside this one could not be read: ${error.message}`);
    }
    this.list();
  }

  /** What is the matter, or how many are shown. */
  tell(wrong = "") {
    const none = this.names && !this.names.length;
    say(this.said, wrong || (none ? "There is no other run in this one's folder." : `${this.runs.length} of at most ${MOST} runs are shown over this one.`));
    this.said.classList.toggle("error", Boolean(wrong));
  }

  list() {
    const word = this.find.value.trim().toLowerCase();
    const found = (this.names ?? []).filter((name) => name.toLowerCase().includes(word));
    this.choices.replaceChildren(...found.map((name) => {
      const run = this.runs.find((one) => one.name === name);
      const box = el("input", { type: "checkbox", value: name, onchange: () => this.choose(name, box) });
      box.checked = Boolean(run);
      return el("li", {}, el("label", {}, box, run ? mark(run) : null, el("span", { text: name })));
    }));
    if (this.names?.length && !found.length) this.choices.append(el("li", { class: "soft", text: `No run's name holds ${word}.` }));
  }

  async choose(name, box) {
    if (!box.checked) return this.drop(name);
    if (this.runs.some((one) => one.name === name)) return;
    if (this.runs.length >= MOST) {
      box.checked = false;
      return this.tell(`${MOST} runs are shown over this one, as many as can be told apart: take one out first.`);
    }
    const run = { name, at: [...HUES.keys()].find((i) => this.runs.every((one) => one.at !== i)), curves: null };
    Object.assign(run, { hue: HUES[run.at], key: LETTERS[run.at] });
    this.runs.push(run); // its place is taken while its curves are under way
    this.runs.sort((a, b) => a.at - b.at);
    try {
      run.curves = await ask(`/api/curves?run=${encodeURIComponent(name)}`);
      if (!run.curves.step.length && !run.curves.evals.length) throw new Error("it has no step on record yet");
    } catch (error) {
      this.runs = this.runs.filter((one) => one !== run);
      box.checked = false;
      return this.tell(`${name} is not shown: ${error.message}`);
    }
    if (this.runs.includes(run)) this.changed(name);
  }

  drop(name) {
    this.runs = this.runs.filter((one) => one.name !== name);
    this.changed(name);
  }

  changed(name) {
    const inside = this.box.contains(document.activeElement) && document.activeElement.type === "checkbox";
    this.tell();
    this.list();
    if (inside) this.choices.querySelector(`input[value="${CSS.escape(name)}"]`)?.focus();
    const ready = this.runs.filter((one) => one.curves);
    legend(ready, (run) => { this.drop(run.name); (byId("overlays").querySelector("button") ?? this.button).focus(); });
    this.shown(ready);
  }
}

export const mark = (run) => el("span", { class: `key fill-${run.hue}`, text: run.key });

/** Which letter and colour is which run, above the curves. */
function legend(runs, drop) {
  const place = byId("overlays");
  place.hidden = !runs.length;
  place.replaceChildren(
    el("li", {}, el("span", { class: `dot fill-${RUN_HUES[0]}` }), "this run"),
    ...runs.map((run) => {
      const until = run.curves.step.at(-1) ?? 0;
      return el("li", {}, mark(run), el("span", { class: "run", title: run.name, text: run.name }), el("span", { class: "soft", text: ` to step ${until}` }),
        el("button", { type: "button", class: "inline", text: "✕", "aria-label": `Take ${run.name} out`, onclick: () => drop(run) }));
    }),
  );
}
