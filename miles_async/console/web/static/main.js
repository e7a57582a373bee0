// The page: takes the state as it comes, and gives each part its sections.

import { byId, el, rows, say } from "./dom.js";
import { count, duration, percent, short } from "./format.js";
import { Charts } from "./charts.js";
import { Flow } from "./flow.js";
import { Engines } from "./engines.js";
import { Samples } from "./samples.js";
import { Knobs } from "./knobs.js";
import { Events, Drops } from "./events.js";
import { Dead } from "./dead.js";
import { Overlays } from "./overlays.js";

const state = { clock: 0 }; // the sections, and the server's wall less ours
const now = () => Date.now() / 1000 + state.clock;

const go = (name) => tabs.find((tab) => tab.name === name)?.open();
const parts = {
  flow: new Flow(byId("flow"), now),
  charts: new Charts(byId("charts"), () => { go("knobs"); panels.knobs.find("max_weight_staleness"); }),
  engines: new Engines(byId("engines"), now),
};
const panels = {
  samples: new Samples(byId("panel-samples")),
  knobs: new Knobs(byId("panel-knobs"), now),
  events: new Events(byId("panel-events"), now),
  drops: new Drops(byId("panel-drops"), now),
  dead: new Dead(byId("panel-dead"), now),
};

// -- tabs: arrows move, as everywhere ------------------------------------------------------------------------------------

const TITLES = { cockpit: "Cockpit", samples: "Samples", knobs: "Knobs", events: "Events", drops: "Dropped", dead: "Dead letters" };
const tabs = Object.entries(TITLES).map(([name, title]) => {
  const button = el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, text: title });
  const panel = byId(`panel-${name}`);
  const open = () => {
    for (const other of tabs) {
      const here = other.name === name;
      other.button.setAttribute("aria-selected", here);
      other.button.tabIndex = here ? 0 : -1;
      other.panel.hidden = !here;
    }
    history.replaceState(null, "", `#${name}`);
    panels[name]?.opened?.();
    parts.charts.show(name === "cockpit");
  };
  button.addEventListener("click", open);
  button.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.findIndex((tab) => tab.name === name) + step + tabs.length) % tabs.length];
    next.open();
    next.button.focus();
  });
  byId("tabs").append(button);
  return { name, title, button, panel, open };
});

const badge = (name, n) => say(tabs.find((tab) => tab.name === name).button, n ? `${TITLES[name]} (${count(n)})` : TITLES[name]);

// -- the head ------------------------------------------------------------------------------------------------------------

function standing() {
  const run = state.run;
  if (!run) return;
  say(byId("name"), run.name);
  document.title = `${run.name}: step ${run.step}`;
  const bar = byId("progress");
  bar.hidden = !run.total;
  bar.setAttribute("aria-valuemax", run.total);
  bar.setAttribute("aria-valuenow", run.step);
  bar.firstElementChild.style.width = `${run.total ? (100 * run.step) / run.total : 0}%`;
  const said = [`step ${run.step}${run.total ? ` of ${run.total}` : ""}`];
  if (run.began) said.push(duration((run.last ?? now()) - run.began));
  if (run.finished) said.push("finished");
  else if (run.ends) said.push(`${duration(run.ends - now())} left`);
  if (run.reward !== null) said.push(`reward ${short(run.reward)}`);
  for (const [name, score] of Object.entries(run.evals)) said.push(`${name} ${percent(score)}`);
  for (const [name, why] of Object.entries(run.failed_evals)) said.push(`${name} failed: ${why}`);
  if (run.tokens_per_s !== null) said.push(`${count(run.tokens_per_s)} tokens/s`);
  if (run.lost_steps) said.push(`${run.lost_steps} steps done again`);
  if (state.read_only) said.push(state.read_only);
  say(byId("standing"), said.join(" · "));
}

function why() {
  const word = state.why;
  if (!word) return;
  say(byId("why-text"), word.text);
  say(byId("why-lately"), word.lately);
  byId("why").classList.toggle("waits", word.waits);
}

const heard = new Set(); // alarms that were read aloud: each once, although the times in its text count on
const alarmKey = (a) => `${a.now ? a.about : a.wall} ${a.who} ${a.text.replace(/[\d.:]+/g, "")}`;

function alarms() {
  const box = byId("alarms");
  const found = state.alarms ?? [];
  box.hidden = !found.length;
  rows(box, found, alarmKey, (a) => el("p", { class: `alarm ${a.level}` }, el("strong", { text: a.now ? `${a.level}: ` : `${a.level}, on record: ` }), el("span"),
    el("span", { class: "soft", text: ` ${a.now ? "since" : "at"} ${new Date(1000 * a.wall).toLocaleTimeString("sv-SE")} (${a.who})` })),
  (line, a) => say(line.children[1], a.text));
  const fresh = found.filter((a) => a.now && !heard.has(alarmKey(a)));
  if (fresh.length) say(byId("announce"), fresh.map((a) => `${a.level}: ${a.text}`).join(" "));
  heard.clear();
  for (const a of found) heard.add(alarmKey(a));
}

function link(text) {
  const line = byId("link");
  line.hidden = !text;
  say(line, text);
}

function show() {
  standing();
  why();
  alarms();
  link(state.silent ? `The bus has not answered for ${duration(state.silent)}; what is shown is from before. Trying again.` : "");
  parts.flow.show(state);
  parts.engines.show(state);
  for (const panel of Object.values(panels)) panel.show(state);
  badge("dead", state.counts?.dead);
  badge("events", state.events?.filter((e) => e.level === "error").length);
}

// -- the stream ----------------------------------------------------------------------------------------------------------

const stream = new EventSource("/events");
stream.addEventListener("hello", (event) => Object.assign(state, JSON.parse(event.data)));
stream.addEventListener("state", (event) => {
  const news = JSON.parse(event.data);
  state.clock = news.wall - Date.now() / 1000;
  Object.assign(state, news);
  show();
  if (news.marks || news.evals || news.ages) parts.charts.told(state);
});
stream.addEventListener("curves", (event) => parts.charts.take(JSON.parse(event.data)));
stream.onerror = () => link("The console does not answer: it was ended, or is unreachable. This page goes on when it is back.");

// -- theme, other runs ---------------------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
function theme(chosen) {
  const dark = chosen ? chosen === "dark" : systemDark.matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", dark);
  parts.charts.repaint();
}
byId("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", next);
  theme(next);
});
systemDark.addEventListener("change", () => theme(localStorage.getItem("theme")));
theme(localStorage.getItem("theme"));

new Overlays((runs) => parts.charts.overlay(runs));

(tabs.find((tab) => `#${tab.name}` === location.hash) ?? tabs[0]).open();
setInterval(standing, 1000);
