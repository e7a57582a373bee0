// Entries that failed for good, with another chance for each.

import { Panel, ask, el } from "./dom.js";
import { clockTime, plural } from "./format.js";

export class Dead extends Panel {
  counted = "dead";

  constructor(place) {
    super();
    this.said = el("p", { role: "status" });
    this.list = el("div", { class: "letters" });
    place.append(el("h2", { text: "Dead letters" }), this.said, this.list);
  }

  async load() {
    try {
      const letters = await ask("/api/dead");
      this.said.textContent = [this.note, letters.length ? plural(letters.length, "dead letter") : "no dead letters"].filter(Boolean).join(" · ");
      this.list.replaceChildren(...letters.map((letter) => this.letter(letter)));
    } catch (error) {
      this.said.textContent = error.message;
    }
  }

  letter(letter) {
    const act = async (what) => {
      try {
        this.note = (await ask("/api/dead", { id: letter.id, act: what })).text;
        await this.load();
      } catch (error) {
        this.said.textContent = error.message;
      }
    };
    const name = letter.sample || letter.group || letter.entry_id;
    const buttons = this.readOnly ? [] : ["retry", "drop"].map((what) =>
      el("button", { type: "button", text: what, "aria-label": `${what} ${name}`, onclick: () => act(what) }));
    return el("article", {},
      el("h3", {}, `${name} `, el("span", { class: "soft small", text: `on ${letter.stream}, ${letter.actor}, ${clockTime(letter.wall)}, tried ${letter.deliveries} times` })),
      el("p", { class: "error", text: letter.error }),
      letter.traceback ? el("details", {}, el("summary", { text: "traceback" }), el("pre", { text: letter.traceback })) : null,
      el("p", {}, buttons));
  }
}
