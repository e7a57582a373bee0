// Curves over training steps: one small chart each, one cursor over all. Colours repeat what the words above each chart say.

import { CHARTS, DASHES, HUES, RUN_HUES, colour, line, uprights, yScale } from "./chartlist.js";
import { el, say } from "./dom.js";
import { duration, percent, short } from "./format.js";
import { mark } from "./overlays.js";

export class Charts {
  constructor(place, tune) {
    this.data = { edition: -1, step: [], columns: {} };
    this.others = []; // runs that lie over this one
    this.evals = [];
    this.marks = { knobs: [], restarts: [], bounds: [] };
    this.visible = true;
    this.cards = CHARTS.map((spec) => (spec.ages ? new Ages(place, spec) : new Chart(place, spec, this, tune)));
  }

  /** Points from an index on; what lies behind it is replaced. */
  take(news) {
    const { step, columns } = this.data;
    step.length = Math.min(step.length, news.at);
    for (const name of new Set([...Object.keys(columns), ...Object.keys(news.columns)])) {
      const column = (columns[name] ??= Array(news.at).fill(null));
      column.length = news.at;
      column.push(...(news.columns[name] ?? Array(news.step.length).fill(null)));
    }
    step.push(...news.step);
    this.draw();
  }

  told(state) {
    this.evals = state.evals ?? [];
    this.marks = state.marks ?? this.marks;
    this.cards.find((card) => card instanceof Ages).show(state.ages ?? {});
    this.draw();
  }

  overlay(runs) {
    this.others = runs;
    this.draw();
  }

  show(visible) {
    this.visible = visible;
    this.draw();
  }

  repaint() {
    for (const card of this.cards) card.forget?.();
    this.draw();
  }

  draw() {
    if (this.pending || !this.visible) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      if (window.uPlot) for (const card of this.cards) card.draw?.();
    });
  }
}

class Chart {
  constructor(place, spec, all, tune) {
    this.spec = spec;
    this.all = all;
    this.said = el("p", { class: "values" });
    this.frame = el("div", { class: "plot", role: "img", "aria-label": `${spec.title}: nothing yet` });
    const more = spec.bound ? el("button", { type: "button", class: "inline", text: "change", "aria-label": "Change the staleness bound", onclick: tune }) : null;
    place.append(el("section", { class: "chart" }, el("h3", {}, el("span", { text: spec.title }), more), this.said, this.frame));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.frame);
  }

  size() {
    return { width: Math.max(120, this.frame.clientWidth), height: Math.max(70, this.frame.clientHeight) };
  }

  series() {
    const found = this.spec.dropped
      ? Object.keys(this.all.data.columns).filter((name) => name.startsWith("dropped/")).sort().map((key, i) => line(key, key.slice(8), HUES[i % HUES.length]))
      : this.spec.series;
    return found.filter((s) => this.all.data.columns[s.key]?.some((v) => v !== null));
  }

  /** Tables of one x column each, to be joined, and what to draw of them. Stacked series are sums, the highest first. */
  content() {
    const { data, others, evals, marks } = this.all;
    const found = this.series();
    const tables = [[data.step, ...found.map((s) => data.columns[s.key])]];
    const lines = found.map((s, i) => (others.length && !this.spec.stacked ? { ...s, ...own(i) } : { ...s }));
    if (this.spec.stacked) {
      const sums = data.step.map(() => 0);
      const stack = found.map((s) => data.columns[s.key].map((v, i) => (sums[i] += v ?? 0)));
      tables[0] = [data.step, ...stack.reverse()];
      lines.reverse();
    }
    if (this.spec.evals) evals.forEach((set, i) => {
      tables.push([set.points.map((p) => p[0]), set.points.map((p) => p[1])]);
      lines.push({ label: set.name, points: true, ...(others.length ? own(i) : { colour: HUES[(i + 4) % HUES.length] }) });
    });
    if (this.spec.bound && marks.bounds.length && data.step.length) {
      tables.push([data.step, data.step.map((step) => marks.bounds.filter(([from]) => from <= step).at(-1)?.[1] ?? null)]);
      lines.push({ label: "bound", colour: "red", dash: [4, 3] });
    }
    const under = []; // other runs, so that this one's lines are drawn over them
    const below = [];
    if (!this.spec.stacked) for (const run of others) {
      const first = this.spec.series.find((s) => run.curves.columns[s.key]);
      if (first) {
        below.push([run.curves.step, run.curves.columns[first.key]]);
        under.push({ label: `${run.name}: ${first.label}`, colour: run.hue, run });
      }
      if (this.spec.evals) run.curves.evals.forEach((set, i) => {
        below.push([set.points.map((p) => p[0]), set.points.map((p) => p[1])]);
        under.push({ label: `${run.name}: ${set.name}`, colour: run.hue, points: true, dash: DASHES[i % 4], run });
      });
    }
    return [[...under, ...lines], tables.length + below.length > 1 ? uPlot.join([...below, ...tables]) : tables[0]];
  }

  draw() {
    const [lines, data] = this.content();
    this.lines = lines;
    const key = lines.map((l) => `${l.label} ${l.colour} ${l.dash}`).join();
    if (this.plot && key !== this.key) this.forget();
    if (!lines.length) return say(this.said, "nothing yet");
    if (!this.plot) {
      this.key = key;
      this.plot = new uPlot(this.options(lines), data, this.frame);
    } else this.plot.setData(data);
    this.legend(null);
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  options(lines) {
    const ink = colour("soft");
    const grid = { stroke: colour("line"), width: 1 };
    const font = "10px system-ui, sans-serif";
    const unit = this.spec.unit ?? short;
    const axis = { stroke: ink, font, grid, ticks: { show: false } };
    return {
      ...this.size(),
      padding: [8, 6, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: yScale(this.spec) },
      axes: [{ ...axis, size: 18, gap: 2, space: 40 }, { ...axis, size: 46, gap: 3, space: 24, values: (_, ticks) => ticks.map((v) => (this.spec.unit === duration ? short(v) : unit(v))) }],
      series: [{}, ...lines.map((l) => ({
        label: l.label, stroke: colour(l.colour), width: l.run ? 1.2 : 1.5, dash: l.dash, spanGaps: true,
        fill: this.spec.stacked ? colour(l.colour) : undefined,
        points: { show: Boolean(l.points), size: 5, fill: colour(l.colour) },
      }))],
      hooks: {
        draw: [(plot) => this.mark(plot)],
        setCursor: [(plot) => this.legend(plot.cursor.idx)],
      },
    };
  }

  mark(plot) {
    const { knobs, restarts } = this.all.marks;
    uprights(plot, knobs.map(([step]) => step), restarts.map(([step]) => step));
  }

  /** The values at a point, or else the last ones; of a curve without a point there, what it was before. */
  legend(at) {
    const unit = this.spec.unit ?? short;
    const data = this.plot.data;
    const value = (i) => {
      const column = data[i + 1];
      for (let point = at ?? column.length - 1; point >= 0; point -= 1) if ((column[point] ?? null) !== null) return column[point];
      return null;
    };
    const order = [...this.lines.keys()].sort((a, b) => Boolean(this.lines[a].run) - Boolean(this.lines[b].run)); // this run first
    const values = order.map((i) => {
      const below = this.spec.stacked && i + 1 < this.lines.length ? value(i + 1) : 0; // stacked columns are sums
      return unit(value(i) === null ? null : value(i) - below);
    });
    const texts = order.map((i, at) => `${this.lines[i].label} ${values[at]}`);
    const where = at === null || at === undefined ? "" : `step ${data[0][at]}: `;
    const key = where + texts.join();
    if (key === this.legendKey) return;
    this.legendKey = key;
    const words = []; // a run's letter stands once before its values
    order.forEach((i, at) => {
      const { run } = this.lines[i];
      if (run && this.lines[order[at - 1]]?.run === run) words.at(-1).append(` · ${values[at]}`);
      else words.push(el("span", { class: run ? "whole" : null }, run ? mark(run) : dot(this.lines[i]), run ? values[at] : texts[at]));
    });
    this.said.replaceChildren(where, ...words.flatMap((word) => [word, " "]));
    if (!where) this.frame.setAttribute("aria-label", `${this.spec.title} over ${data[0].length} points up to step ${data[0].at(-1)}: ${texts.join(", ")}`);
  }
}

/** Where a colour means a run, this one's curves are told apart by their dashes. */
const own = (i) => ({ colour: RUN_HUES[0], dash: DASHES[i % 4], nth: i % 4 });
const dot = (l) => el("span", { class: `dot fill-${l.colour}${l.nth ? ` dashed-${l.nth}` : ""}${l.points ? " round" : ""}` });

/** How old samples were when they were trained: bars. */
class Ages {
  constructor(place, spec) {
    this.said = el("p", { class: "values", text: "nothing yet" });
    this.bars = el("ol", { class: "bars plot", "aria-label": "Share of the samples by age in steps" });
    place.append(el("section", { class: "chart" }, el("h3", { text: spec.title }), this.said, this.bars));
  }

  show(ages) {
    const found = Object.entries(ages).sort(([a], [b]) => parseInt(a) - parseInt(b));
    if (!found.length) return;
    say(this.said, "share of the last steps' samples, by age in steps");
    const most = Math.max(...found.map(([, share]) => share));
    this.bars.replaceChildren(...found.map(([age, share]) => {
      const bar = el("i", { class: "fill-blue" });
      bar.style.height = `${(100 * share) / most}%`;
      return el("li", {}, el("b", { text: percent(share) }), el("span", { class: "column" }, bar), el("span", { text: age.replace("_up", "+") }));
    }));
  }
}
