// The flow as the README draws it, with what lies on each arrow. Narrow windows and screen readers get the same as a table.

import { el, rows, say, svg, table, toggle } from "./dom.js";
import { count, duration, plural } from "./format.js";

const W = 128, H = 46, GAP = 124, Y = 42, LOW = 134;
const X = Object.fromEntries(["sampler", "generation", "reward", "filter", "trainer", "publisher"].map((name, i) => [name, 4 + i * (W + GAP)]));
const ROOMS = { ...Object.fromEntries(Object.entries(X).map(([name, x]) => [name, [x, Y]])), partial: [X.generation, LOW], evaluator: [X.filter, LOW] };
const ALONG = { prompts: "sampler", rollouts: "generation", scored: "reward", groups: "filter", policy: "trainer" };
const mid = (x) => x + W / 2;
// name: path, then where its words stand and which way they are set
const ARROWS = {
  ...Object.fromEntries(Object.entries(ALONG).map(([name, from]) => {
    const x = X[from] + W;
    return [name, [`M${x} ${Y + H / 2}H${x + GAP - 3}`, x + GAP / 2, Y + H / 2 - 7, "middle", true]];
  })),
  parked: [`M${X.generation + 30} ${Y + H}V${LOW - 3}`, X.generation + 22, Y + H + 18, "end", false],
  prefixes: [`M${X.generation + W - 30} ${LOW}V${Y + H + 3}`, X.generation + W - 22, Y + H + 18, "start", false],
  active: [`M${mid(X.publisher)} ${Y + H}V${LOW + H + 4}H${X.generation - 14}V${Y + H - 10}H${X.generation - 3}`, X.trainer - 10, LOW + H - 17, "middle", false],
};
const READERS = { prompts: "sampler → generation", parked: "generation → partial", prefixes: "partial → generation", tail: "partial → generation",
  rollouts: "generation → reward", scored: "reward → filter", groups: "filter → trainer", policy: "trainer → publisher", active: "publisher → generation" };

export class Flow {
  constructor(place, now) {
    this.now = now;
    this.rooms = {};
    this.arrows = {};
    const picture = svg("svg", { viewBox: `0 0 ${X.publisher + W + 4} ${LOW + H + 10}`, "aria-hidden": "true" },
      svg("defs", {}, svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto" },
        svg("path", { d: "M0 0L8 4L0 8Z", class: "head" }))));
    this.credit = svg("text", { x: mid(X.filter) - 130, y: 12, "text-anchor": "middle" });
    picture.append(svg("path", { class: "arrow faint", d: `M${mid(X.trainer)} ${Y}V20H${mid(X.sampler)}V${Y - 3}`, "marker-end": "url(#head)" }), this.credit);
    for (const [name, [d, x, y, anchor, split]] of Object.entries(ARROWS)) {
      const what = svg("text", { x, y, "text-anchor": anchor, class: "stream" });
      const much = svg("text", { x, y: y + (split ? 21 : 13), "text-anchor": anchor });
      const note = svg("text", { x, y: y + 35, "text-anchor": anchor });
      const line = svg("path", { class: "arrow", d, "marker-end": "url(#head)" });
      this.arrows[name] = { what, much, note, line };
      picture.append(line, what, much, note);
      what.textContent = name;
    }
    for (const [name, [x, y]] of Object.entries(ROOMS)) {
      const box = svg("rect", { x, y, width: W, height: H, rx: 7 });
      const title = svg("text", { x: x + W / 2, y: y + 19, "text-anchor": "middle", class: "room", });
      const does = svg("text", { x: x + W / 2, y: y + 36, "text-anchor": "middle" });
      this.rooms[name] = { title, does, group: svg("g", { class: "room" }, box, title, does) };
      picture.append(this.rooms[name].group);
    }
    const [wrap, body] = table("Streams", ["stream", "waiting", "held", "a second", "oldest"], "streams");
    this.body = body;
    place.append(el("div", { class: "picture" }, picture), wrap);
  }

  show(state) {
    const flow = state.flow;
    if (!flow) return;
    const unsaved = flow.streams.groups.unsaved; // trained: open only until a checkpoint holds their step
    say(this.credit, `${plural(Math.max(0, flow.open_groups - unsaved), "open group")}: freed when trained and active, dropped or dead`);
    for (const [name, parts] of Object.entries(this.rooms)) {
      const room = flow.rooms[name];
      const many = room && room.alive > 1 ? ` ×${room.alive}` : "";
      say(parts.title, name + many);
      say(parts.does, this.does(name, room, state));
      toggle(parts.group, "working", Boolean(room?.working && !room.wrong));
      toggle(parts.group, "wrong", Boolean(room?.wrong && !state.run.ended));
      toggle(parts.group, "absent", !room);
    }
    for (const [name, parts] of Object.entries(this.arrows)) {
      const s = flow.streams[name];
      const tail = name === "prefixes" && flow.streams.tail?.depth ? ` + tail ${flow.streams.tail.depth}` : "";
      say(parts.what, s.data ? `${name} ${count(s.depth)}${tail}` : `${name} ${name === "active" ? `v${flow.active}` : `v${flow.announced}`}`);
      say(parts.much, this.much(s));
      say(parts.note, s.unsaved ? `+${count(s.unsaved)} to save` : "");
      toggle(parts.line, "full", s.data && s.depth > 0);
    }
    const list = Object.entries(READERS).map(([name, between]) => ({ name, between, ...flow.streams[name] }));
    rows(this.body, list, (s) => s.name, (s) => el("tr", {}, el("th", { scope: "row" }, s.name, el("span", { class: "soft small", text: ` ${s.between}` })),
      el("td", { class: "n" }), el("td", { class: "n" }), el("td", { class: "n" }), el("td", { class: "n" })), (row, s) => {
      const cells = [s.data ? count(s.depth - s.held) : "", s.data ? count(s.held) : "", s.rate === null ? "–" : count(s.rate), this.age(s)];
      cells.forEach((text, i) => say(row.children[i + 1], text));
    });
  }

  age(s) {
    const since = s.data ? s.since : s.newest;
    return since ? duration(this.now() - since) : "";
  }

  much(s) {
    return [s.rate === null ? "" : `${count(s.rate)}/s`, this.age(s)].filter(Boolean).join(" · ");
  }

  does(name, room, state) {
    if (!room) return "not in this run";
    if (!room.alive) return state.run.ended ? "ended" : "nobody alive";
    if (room.wrong) return `${room.wrong} in trouble`;
    if (name === "generation") {
      const slots = state.actors.reduce((sum, a) => sum + (a.role === name && a.life === "alive" ? a.slots : 0), 0);
      return slots ? `${room.busy} of ${slots} slots` : plural(room.busy, "sample");
    }
    return room.working ? "works" : "waits";
  }
}
