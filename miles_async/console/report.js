// The report's page: its charts and their controls, and the samples, found by numbers and words. All data lies in the page.

import { CHARTS, line } from "./web/static/chartlist.js";
import { byId, el, say } from "./web/static/dom.js";
import { article } from "./web/static/samples.js";
import { Chart, SPECS, X, page, redraw, runs, zoomTo } from "./report_charts.js";

const groups = {};
for (const spec of SPECS) {
  groups[spec.group] ??= el("div", { class: "charts" });
  page.charts.push(new Chart(groups[spec.group], spec));
}
byId("charts").append(...Object.entries(groups).map(([name, place]) => el("section", { class: "group" }, el("h2", { text: name }), place)));

const choice = (label, list) => el("label", {}, `${label} `, list);
const others = [...new Set(runs.flatMap((run) => Object.keys(run.curves.columns)))].filter((name) => !CHARTS.some((spec) => spec.series.some((s) => s.key === name))).sort();
const xs = el("select", { id: "x", onchange: () => { page.x = xs.value; page.range = null; byId("whole").disabled = true; redraw(); } }, Object.entries(X).map(([value, text]) => el("option", { value, text })));
const smooth = el("input", { type: "range", id: "smooth", min: "0", max: "0.99", step: "0.01", value: "0", oninput: () => { page.smooth = Number(smooth.value); redraw(); } });
const marks = el("input", { type: "checkbox", id: "marks", checked: true, onchange: () => { page.marks = marks.checked; redraw(); } });
const another = el("select", { id: "another", onchange: () => {
  if (!another.value) return;
  const chart = new Chart(groups.Curves, { title: another.value, series: [line(another.value, "value")], added: true });
  page.charts.push(chart);
  chart.draw();
  chart.card.scrollIntoView({ block: "nearest" });
  another.value = "";
} }, el("option", { value: "", text: "choose a metric" }), others.map((value) => el("option", { value, text: value })));
byId("controls").append(choice("X axis", xs), choice("Smoothing", smooth), el("label", {}, marks, " knobs and restarts"), choice("Another curve", another),
  el("button", { type: "button", id: "whole", text: "Whole run", disabled: true, onclick: () => zoomTo(null) }));
if (runs.length > 1) byId("controls").append(el("span", { role: "group", "aria-label": "Runs" }, runs.map((run) => {
  const button = el("button", { type: "button", class: "key", "aria-pressed": "true", onclick: () => { run.on = !run.on; button.setAttribute("aria-pressed", String(run.on)); redraw(); } }, el("span", { class: `dot fill-${run.hue}` }), run.name);
  return button;
})));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();

// -- samples -------------------------------------------------------------------------------------------------------------

const AT_ONCE = 8;
const field = (label, props) => {
  const input = el("input", { autocomplete: "off", oninput: () => list(AT_ONCE), ...props });
  return { input, label: choice(label, input), number: () => (input.value.trim() === "" ? null : Number(input.value)) };
};
const pair = (what) => [["from", "least"], ["to", "most"]].map(([word, name]) => field(`${what} ${word}`, { type: "number", step: "any", id: `${what}-${name}` }));
const filters = { step: pair("step"), reward: pair("reward"), tokens: pair("tokens") };
const text = field("text", { type: "search", id: "text" });
const ORDERS = { newest: (a, b) => b.step - a.step, "worst reward": (a, b) => a.reward - b.reward, "best reward": (a, b) => b.reward - a.reward, longest: (a, b) => b.tokens - a.tokens };
const order = el("select", { id: "order", onchange: () => list(AT_ONCE) }, Object.keys(ORDERS).map((value) => el("option", { value, text: value })));
const whose = el("select", { id: "whose", onchange: () => list(AT_ONCE) }, runs.map((run, i) => el("option", { value: i, text: run.name })));

function list(most) {
  const wanted = text.input.value.toLowerCase();
  const within = (sample) => Object.entries(filters).every(([name, [least, greatest]]) => (least.number() ?? -Infinity) <= sample[name] && sample[name] <= (greatest.number() ?? Infinity));
  const words = (sample) => [sample.sample, sample.prompt, sample.response, sample.label, ...(sample.turns ?? []).map((turn) => turn.text)].join("\n").toLowerCase();
  const all = runs[whose.value]?.samples ?? [];
  const found = all.filter((sample) => within(sample) && (!wanted || words(sample).includes(wanted))).sort(ORDERS[order.value]);
  say(byId("found"), all.length ? `${found.length} of ${all.length} samples${found.length > most ? `, ${most} shown` : ""}` : "No sample of this run was kept.");
  byId("list").replaceChildren(...found.slice(0, most).map(article));
  if (found.length > most) byId("list").append(el("button", { type: "button", text: "Show more", onclick: () => list(most + 5 * AT_ONCE) }));
}

byId("filters").append(...(runs.length > 1 ? [choice("Run", whose)] : []), ...Object.values(filters).flat().map((one) => one.label), text.label, choice("Order", order));
list(AT_ONCE);
