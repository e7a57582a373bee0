// Curves of one or several runs, events and what the hosts did, for the report's page: data, lines, charts, zoom.

import { CHARTS, DASHES, HUES, RUN_HUES, colour, line, uprights, yScale } from "./web/static/chartlist.js";
import { byId, el, say } from "./web/static/dom.js";
import { clockTime, count, duration, percent, short } from "./web/static/format.js";

const KINDS = { error: "red", warning: "orange", restart: "red", "dead letter": "purple", knob: "blue", checkpoint: "green" };
export const X = { step: "training step", wall: "time since the start", samples: "samples trained" };
const bytes = (n) => `${count(n)}B`;
const BORN = "rollout/start_age/";
const system = (title, key, unit) => ({ title, key, unit, group: "Hosts and Redis", series: [] });
export const SPECS = [
  ...CHARTS.map((spec) => ({ ...spec, group: "Curves" })),
  { title: "Engines stood still for a version, s", pauses: true, group: "Curves", series: [] },
  { title: "Events", events: true, group: "Curves", series: [], wide: true },
  system("Processors in use", /^cpu_share$/, percent), system("Memory in use", /^memory_bytes$/, bytes), system("Network in and out, a second", /^net_/, bytes),
  system("Disk read and written, a second", /^disk_(read|write)/, bytes), system("Disk free", /^disk_free/, bytes),
  system("GPUs in use", /^gpu\d+_util/, percent), system("GPU memory in use", /^gpu\d+_memory/, bytes), system("GPU power, W", /^gpu\d+_power/, short),
  system("Redis memory", /^redis_memory/, bytes), system("Redis commands a second", /^redis_commands/, count), system("Redis clients", /^redis_clients/, count),
  { title: "Share of samples that are longer, by tokens", spread: "rollout/response_len", group: "The newest steps' samples", series: [] },
  { title: "Share of groups whose slowest member took longer, over the group's mean", spread: "rollout/straggler", group: "The newest steps' samples", series: [] },
];

export const runs = JSON.parse(byId("data").textContent).map((run, i) => ({ ...run, on: true, hue: RUN_HUES[i % RUN_HUES.length] }));
export const page = { x: "step", smooth: 0, marks: true, range: null, charts: [] };
const shown = () => runs.filter((run) => run.on);

// -- where things lie on the x axis --------------------------------------------------------------------------------------

/** Index of the last of rising `xs` that is at most v; -1 before the first. */
function indexOf(xs, v) {
  let low = -1;
  for (let high = xs.length; high - low > 1;) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= v) low = middle; else high = middle;
  }
  return low;
}

function between(from, to, v) {
  const i = indexOf(from, v);
  if (i < 0) return to[0] ?? 0;
  if (i >= from.length - 1) return to.at(-1);
  return to[i] + ((to[i + 1] - to[i]) * (v - from[i])) / (from[i + 1] - from[i]);
}

/** The x values of a table of a run: its own, or by the wall times of the run's steps. */
function axis(run, table) {
  const known = (table.axes ??= {});
  const steps = run.curves.x;
  return (known[page.x] ??= page.x === "wall" ? table.x.wall.map((w) => w - run.began)
    : table.x[page.x] ?? (table.x.step ? table.x.step.map((s) => between(steps.step, steps.samples, s)) : table.x.wall.map((w) => between(steps.wall, steps[page.x], w))));
}

const places = (run, kinds) => {
  const found = run.events.filter((event) => kinds.includes(event.kind));
  return axis(run, { x: { wall: found.map((event) => event.wall) } });
};

function xText(v) {
  if (page.x === "wall") return duration(v);
  return Math.abs(v) < 1e5 ? String(Math.round(v)) : count(v);
}

// -- lines ---------------------------------------------------------------------------------------------------------------

/** One line of a chart: its values `ys` at `xs`, with the least and the most of each point where a point is of several steps. */
function drawn(run, table, name, label, hue, more = {}) {
  return { key: `${run.name} ${label}`, label: shown().length > 1 ? `${run.name}: ${label}` : label, hue, xs: axis(run, table), ys: table.columns[name],
    low: table.low[name], high: table.high[name], ...more };
}

function stackOf(spec, run) {
  const names = Object.keys(run.curves.columns);
  if (spec.dropped) return names.filter((name) => name.startsWith("dropped/")).sort().map((key, i) => line(key, key.slice(8), HUES[i % HUES.length]));
  if (spec.ages) return names.filter((name) => name.startsWith(BORN)).sort((a, b) => parseInt(a.slice(BORN.length)) - parseInt(b.slice(BORN.length)))
    .map((key, i, all) => line(key, key.slice(BORN.length).replace("_up", " and more"), blend("line", "blue", (i + 1) / all.length)));
  return spec.series.filter((s) => run.curves.columns[s.key]);
}

/** A colour between two named ones; without names, as it is. */
function blend(a, b, share) {
  const [from, to] = [colour(a), colour(b)].map((text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)));
  return `rgb(${from.map((v, i) => Math.round(v + (to[i] - v) * share)).join(",")})`;
}

const paint = (hue) => (hue.startsWith("rgb") ? hue : colour(hue));

function linesOf(spec) {
  const all = shown();
  const lead = all[0];
  if (!lead) return [];
  if (spec.spread) return all.flatMap((run) => (run.spreads[spec.spread]
    ? [{ key: run.name, label: run.name, hue: run.hue, xs: run.spreads[spec.spread][0], ys: run.spreads[spec.spread][1], steady: true }] : []));
  if (spec.events) return Object.keys(KINDS).flatMap((kind, lane) => {
    const xs = places(lead, [kind]);
    return xs.length ? [{ key: kind, label: kind, hue: KINDS[kind], xs, ys: xs.map(() => lane), points: true, texts: lead.events.filter((e) => e.kind === kind) }] : [];
  });
  if (spec.pauses) return all.flatMap((run) => (run.pauses.columns.pause_s ? [drawn(run, run.pauses, "pause_s", "pause", run.hue)] : []));
  if (spec.group === "Hosts and Redis") return all.flatMap((run, r) => Object.entries(run.system).flatMap(([source, table]) =>
    Object.keys(table.columns).filter((name) => spec.key.test(name)).map((name) => [run, table, name, source, r]))).map(([run, table, name, source, r], i) =>
    drawn(run, table, name, `${source} ${name.replace(/^redis_/, "").replace(/_(share|bytes|bytes_s|s|w|util_share|memory_bytes|power_w)$/, "").replaceAll("_", " ")}`, HUES[(i + 4) % HUES.length], { dash: DASHES[r % 4] }));
  if (spec.stacked) return stackOf(spec, lead).map((s) => drawn(lead, lead.curves, s.key, s.label, s.colour, { low: null, high: null }));
  const lines = all.flatMap((run) => spec.series.filter((s) => run.curves.columns[s.key]).map((s, i) =>
    drawn(run, run.curves, s.key, s.label, all.length > 1 ? run.hue : s.colour, { dash: all.length > 1 ? DASHES[i % 4] : undefined })));
  if (spec.evals) for (const run of all) run.evals.forEach((set, i) => lines.push(drawn(run, set, "score", set.name, all.length > 1 ? run.hue : HUES[(i + 4) % HUES.length], { points: true })));
  if (spec.bound) for (const run of all.filter((one) => one.bounds.length)) {
    const steps = run.curves.x.step;
    const bound = steps.map((step) => run.bounds.filter(([from]) => from <= step).at(-1)?.[1] ?? null);
    lines.push({ ...drawn(run, { x: run.curves.x, columns: { bound }, low: {}, high: {} }, "bound", "bound", "red"), dash: [4, 3], steady: true });
  }
  return lines;
}

/** Exponential mean, of weight `page.smooth` on what was before; as if it had begun long ago. */
function smoothed(ys) {
  let sum = 0, weight = 0;
  return ys.map((v) => {
    if (v === null) return null;
    sum = page.smooth * sum + (1 - page.smooth) * v;
    weight = page.smooth * weight + (1 - page.smooth);
    return sum / weight;
  });
}

// -- one chart -----------------------------------------------------------------------------------------------------------

export class Chart {
  constructor(place, spec) {
    this.spec = spec;
    this.off = new Set();
    this.where = el("span", { class: "where soft" });
    this.keys = el("p", { class: "keys" });
    this.frame = el("div", { class: "plot", tabindex: "0", role: "img", "aria-label": spec.title });
    const drop = spec.added ? el("button", { type: "button", class: "inline", text: "remove", "aria-label": `Remove ${spec.title}`, onclick: () => this.remove() }) : null;
    this.card = el("section", { class: `chart${spec.wide ? " wide" : ""}` }, el("h3", {}, spec.title, " ", this.where, drop), this.keys, this.frame);
    place.append(this.card);
    this.frame.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.frame);
  }

  size() {
    return { width: Math.max(160, this.frame.clientWidth), height: 170 };
  }

  remove() {
    page.charts = page.charts.filter((chart) => chart !== this);
    this.card.remove();
  }

  draw() {
    const lines = linesOf(this.spec);
    this.card.hidden = !lines.length;
    this.plot?.destroy();
    this.plot = null;
    if (!lines.length) return;
    const kept = lines.filter((one) => !this.off.has(one.key));
    this.lines = lines;
    this.values = lines.map(() => el("b"));
    this.keys.replaceChildren(...lines.map((one, i) => {
      const dot = el("span", { class: "dot" });
      dot.style.background = paint(one.hue);
      return el("button", { type: "button", class: "key", "aria-pressed": String(!this.off.has(one.key)), onclick: () => { this.turn(one.key); } }, dot, `${one.label} `, this.values[i]);
    }));
    const [series, data, bands] = this.spec.stacked ? stacked(kept) : laid(kept);
    this.plot = new uPlot(this.options(series, bands), data, this.frame);
    if (!this.spec.spread) this.zoom();
    this.legend(null);
  }

  turn(key) {
    if (!this.off.delete(key)) this.off.add(key);
    const at = [...this.keys.children].indexOf(document.activeElement);
    this.draw();
    this.keys.children[at]?.focus();
  }

  zoom() {
    const [min, max] = page.range ?? extent();
    this.plot?.setScale("x", { min, max });
  }

  options(series, bands) {
    const { spec } = this;
    const unit = spec.unit ?? short;
    const grid = { stroke: colour("line"), width: 1 };
    const base = { stroke: colour("soft"), font: "11px system-ui, sans-serif", grid, ticks: { show: false } };
    const lanes = Object.keys(KINDS);
    const xs = spec.spread ? {} : { values: (_, ticks) => ticks.map(xText), incrs: page.x === "wall" ? [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400, 172800, 604800]
      : [1, 2, 5].flatMap((m) => [...Array(10).keys()].map((p) => m * 10 ** p)).sort((a, b) => a - b) };
    const y = spec.spread ? { distr: 3, log: 10 } : spec.events ? { range: [-0.5, lanes.length - 0.5] } : spec.stacked && !spec.cut ? { range: (_, low, high) => [0, high || 1] } : yScale(spec);
    return {
      ...this.size(), padding: [8, 16, 0, 0], legend: { show: false }, bands,
      cursor: { y: false, points: { size: 6 }, ...(spec.spread ? {} : { sync: { key: "report" }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => zoomTo(null) } }) },
      scales: { x: { time: false }, y },
      axes: [{ ...base, ...xs, size: 22, gap: 3, space: 54 }, { ...base, size: spec.events ? 74 : 58, gap: 4, space: 26,
        ...(spec.events ? { splits: lanes.map((_, i) => i), values: () => lanes } : { values: (_, ticks) => ticks.map((v) => (v === null ? "" : unit === duration ? short(v) : unit(v))) }) }],
      series: [{}, ...series],
      hooks: {
        draw: [(plot) => this.mark(plot)],
        setCursor: [(plot) => this.legend(plot.cursor.idx ?? null, plot)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 3) zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
      },
    };
  }

  mark(plot) {
    if (!page.marks || this.spec.spread || this.spec.events) return;
    for (const run of this.spec.stacked ? shown().slice(0, 1) : shown()) uprights(plot, places(run, ["knob"]), places(run, ["restart"]));
  }

  /** The values at a point of the plot, or the last ones. */
  legend(idx, plot) {
    const v = idx === null || !plot ? null : plot.data[0][idx];
    const unit = this.spec.unit ?? short;
    const texts = this.lines.map((one, i) => {
      if (one.texts) return "";
      const at = v === null ? one.ys.findLastIndex((y) => y !== null) : indexOf(one.xs, v);
      const text = at >= 0 && one.ys[at] !== null && one.ys[at] !== undefined ? unit(one.ys[at]) : "–";
      say(this.values[i], text);
      return `${one.label} ${text}`;
    });
    say(this.where, v === null ? "" : this.spec.spread ? short(v) : page.x === "wall" ? duration(v) : `${page.x} ${xText(v)}`);
    if (this.spec.events && v !== null) say(this.where, this.near(v, plot));
    if (v === null) this.frame.setAttribute("aria-label", `${this.spec.title}, last values: ${texts.filter(Boolean).join(", ") || "none"}`);
    return texts;
  }

  /** The event closest to a point, in words. */
  near(v, plot) {
    let best = null, apart = 12;
    for (const one of this.lines.filter((l) => !this.off.has(l.key))) one.xs.forEach((x, i) => {
      const away = Math.abs(plot.valToPos(x, "x") - plot.valToPos(v, "x"));
      if (away <= apart) [best, apart] = [one.texts[i], away];
    });
    return best ? `${clockTime(best.wall)} ${best.kind}: ${best.text}` : "";
  }

  /** Arrows move the cursor, + and - zoom, 0 shows everything. */
  key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = this.plot.data[0];
    const { min, max } = this.plot.scales.x;
    const now = this.plot.cursor.idx ?? indexOf(xs, max);
    const step = Math.max(1, Math.round(xs.length / 100)) * (event.shiftKey ? 10 : 1);
    const next = { ArrowLeft: now - step, ArrowRight: now + step, Home: Math.max(0, indexOf(xs, min)), End: indexOf(xs, max) }[event.key];
    if (next !== undefined) {
      const to = Math.max(0, Math.min(xs.length - 1, next));
      this.plot.setCursor({ left: this.plot.valToPos(xs[to], "x"), top: 20 });
      say(byId("spoken"), `${this.where.textContent}: ${this.legend(to, this.plot).filter(Boolean).join(", ")}`);
    } else if (["+", "=", "-"].includes(event.key) && !this.spec.spread) {
      const half = ((max - min) / 2) * (event.key === "-" ? 2 : 0.5);
      const middle = event.key === "-" ? (min + max) / 2 : xs[now];
      const [low, high] = extent();
      const range = [Math.max(low, middle - half), Math.min(high, middle + half)];
      zoomTo(range[0] <= low && range[1] >= high ? null : range);
    } else if (event.key === "0" || event.key === "Escape") zoomTo(null);
    else return;
    event.preventDefault();
  }
}

const edge = (stroke) => ({ stroke, width: 1, spanGaps: true, points: { show: false } });
const look = (one) => ({ stroke: paint(one.hue), width: 1.5, dash: one.dash, spanGaps: true });

/** Lines beside each other: [series, data, bands]. Where a point is of several steps a band shows their least and most; smoothed
 * lines lie over what was measured. */
function laid(lines) {
  const tables = new Map();
  const add = (xs, ys, how) => {
    if (!tables.has(xs)) tables.set(xs, []);
    tables.get(xs).push([ys, how]);
    return how;
  };
  const pairs = [];
  for (const one of lines) {
    const stroke = paint(one.hue);
    const smooth = page.smooth > 0 && !one.steady && !one.points;
    const faint = stroke.startsWith("#") ? `${stroke}40` : stroke;
    if (smooth) add(one.xs, one.ys, { ...look(one), stroke: faint, width: 1, points: { show: false } });
    else if (one.low && one.high) pairs.push([add(one.xs, one.high, edge(faint)), add(one.xs, one.low, edge(faint)), faint]);
    add(one.xs, smooth ? smoothed(one.ys) : one.ys, one.texts ? { stroke: "transparent", width: 0, points: { show: true, size: 8, fill: stroke, stroke } }
      : { ...look(one), points: one.points ? { show: true, size: 6, fill: stroke } : { show: one.ys.length === 1 } });
  }
  if (!tables.size) return [[], [[]], []];
  const flat = [...tables.values()].flat().map(([, how]) => how);
  const data = [...tables].map(([xs, columns]) => [xs, ...columns.map(([ys]) => ys)]);
  const bands = pairs.map(([high, low, fill]) => ({ series: [flat.indexOf(high) + 1, flat.indexOf(low) + 1], fill }));
  return [flat, data.length > 1 ? uPlot.join(data) : data[0], bands];
}

/** Lines on top of each other, as sums: the highest is drawn first. */
function stacked(lines) {
  if (!lines.length) return [[], [[]], []];
  const sums = lines[0].xs.map(() => 0);
  const stack = lines.map((one) => one.ys.map((v, i) => (sums[i] += v ?? 0)));
  return [lines.map((one) => ({ stroke: paint(one.hue), width: 1, fill: paint(one.hue), points: { show: false } })).reverse(), [lines[0].xs, ...stack.reverse()], []];
}

// -- all charts ----------------------------------------------------------------------------------------------------------

function extent() {
  const ends = shown().flatMap((run) => {
    const xs = axis(run, run.curves);
    const evals = run.evals.flatMap((set) => axis(run, set));
    return xs.length || evals.length ? [xs[0] ?? evals[0], xs.at(-1) ?? evals.at(-1), ...(evals.length ? [evals[0]] : [])] : [];
  });
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  return ends.length ? [low, high > low ? high : low + 1] : [0, 1];
}

export function zoomTo(range) {
  page.range = range;
  byId("whole").disabled = !range;
  for (const chart of page.charts) if (chart.plot && !chart.spec.spread) chart.zoom();
}

export function redraw() {
  if (page.pending) return;
  page.pending = true;
  requestAnimationFrame(() => {
    page.pending = false;
    for (const chart of page.charts) chart.draw();
    for (const group of document.querySelectorAll(".charts")) group.parentElement.hidden = [...group.children].every((card) => card.hidden);
  });
}
