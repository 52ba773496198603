"use strict";
// Asks for the state every second, draws what has changed, and goes on asking when the server is away.
const titles = JSON.parse(document.getElementById("titles").textContent);
let figuresKey = "";
let armNames = page.arms.map((arm) => arm.name);
const byId = (id) => document.getElementById(id);
const folder = new URLSearchParams(location.search).get("folder");
const MARKS = { ok: "✓", running: "▸", waiting: "·", crashed: "!" };

function element(parent, tag, text, className) {
  const child = parent.appendChild(document.createElement(tag));
  if (text !== undefined) child.textContent = text;
  if (className) child.className = className;
  return child;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function place(cell) {
  return `${cell.arm}, lr ${Number(cell.lr.toPrecision(6))}, seed ${cell.seed}`;
}

function showCounts(state) {
  const { counts } = state;
  const partly = state.running.reduce((sum, run) => sum + (run.steps ? run.step / run.steps : 0), 0);
  byId("bar").value = counts.total ? (counts.total - counts.running - counts.waiting + partly) / counts.total : 0;
  const facts = [
    ["ended", `${counts.ended} of ${counts.total}`],
    ["failed", counts.failed],
    ["training", counts.running],
    ["waiting", counts.waiting],
  ];
  const over = !counts.running && !counts.waiting;
  if (state.seconds_left !== null && !over) facts.push(["time left", `about ${duration(state.seconds_left)}`]);
  byId("counts").replaceChildren();
  for (const [name, value] of facts) {
    const pair = element(byId("counts"), "div");
    element(pair, "dt", name);
    element(pair, "dd", value);
  }
  byId("report").hidden = !state.report;
  document.title = `${Math.floor(100 * byId("bar").value)}% ${state.name} – minillama`;
}

function showGrid(state) {
  byId("grid-section").hidden = state.cells.length < 2;
  const rates = [...new Set(state.cells.map((cell) => cell.lr))].sort((a, b) => a - b);
  const table = byId("grid");
  table.replaceChildren();
  const head = element(element(table, "thead"), "tr");
  element(head, "th", "arm");
  rates.forEach((rate) => element(head, "th", Number(rate.toPrecision(6)), "text"));
  const body = element(table, "tbody");
  for (const arm of state.arms) {
    const row = element(body, "tr");
    element(row, "th", arm);
    for (const rate of rates) {
      const entry = element(row, "td", undefined, "text cells");
      for (const cell of state.cells) {
        if (cell.arm !== arm || cell.lr !== rate) continue;
        const known = cell.state in MARKS;
        const mark = element(entry, "span", MARKS[cell.state] || "✕", `cell ${known ? cell.state : "failed"}`);
        mark.title = `${place(cell)}: ${cell.state}${cell.loss === null ? "" : `, validation loss ${cell.loss}`}`;
      }
    }
  }
}

function showRunning(state) {
  byId("running-section").hidden = !state.running.length;
  const look = theme();
  const kept = new Set();
  for (const run of state.running) {
    const id = `running-${place(run)}`;
    kept.add(id);
    let card = byId(id);
    if (!card) {
      card = element(byId("running"), "figure");
      card.id = id;
      element(card, "h3", place(run));
      element(card, "p", "", "note");
      element(card, "div", undefined, "plot");
    }
    const last = run.y.filter((value) => value !== null).at(-1);
    card.querySelector("p").textContent =
      `step ${run.step} of ${run.steps}${last === undefined ? "" : `, training loss ${last}`}`;
    const index = state.arms.indexOf(run.arm);
    const colour = index in page.arms ? colourOf(index, look) : look.ink;
    const traces = [
      { type: "scatter", mode: "lines", x: run.x, y: run.y, name: "training loss", line: { color: colour, width: 1.5 } },
      { type: "scatter", mode: "markers", x: run.val_x, y: run.val_y, name: "validation loss", marker: { color: colour, size: 8 } },
    ];
    const figure = { layout: {
      xaxis: { title: { text: "step" }, range: [0, run.steps || undefined] },
      yaxis: { title: { text: "loss" }, automargin: true },
      showlegend: false,
    } };
    Plotly.react(card.querySelector(".plot"), traces, layoutOf(figure, look, innerWidth < 640), { displayModeBar: false, responsive: true });
  }
  for (const card of [...byId("running").children]) if (!kept.has(card.id)) card.remove();
  document.querySelectorAll("#running .plot").forEach((plot) => Plotly.Plots.resize(plot));
}

function showFailed(state) {
  byId("failed-section").hidden = !state.failed.length;
  const open = new Set([...document.querySelectorAll("#failed details[open]")].map((each) => each.dataset.cell));
  byId("failed").replaceChildren();
  for (const cell of state.failed) {
    const item = element(byId("failed"), "li");
    element(item, "strong", place(cell));
    item.append(`: ${cell.fate}${cell.error ? `: ${cell.error}` : ""}`);
    if (!cell.log) continue;
    const details = element(item, "details");
    details.dataset.cell = place(cell);
    details.open = open.has(place(cell));
    element(details, "summary", "the end of its log");
    element(details, "pre", cell.log);
  }
}

function showFigures(figures) {
  page = figures;
  byId("figures-section").hidden = !page.figures.length;
  if (!page.figures.length) return;
  const ids = new Set(page.figures.map((figure) => figure.id));
  for (const figure of page.figures) {
    if (byId(figure.id)) continue;
    const card = element(byId("figures"), "figure");
    card.dataset.figure = figure.id;
    element(card, "h3", titles[figure.id] || figure.id);
    element(card, "div", undefined, "plot").id = figure.id;
  }
  document.querySelectorAll("[data-figure]").forEach((card) => { card.hidden = !ids.has(card.dataset.figure); });
  for (const rate of page.rates) {
    if (![...rateSelect.options].some((option) => option.value === rate)) rateSelect.add(new Option(rate, rate), rateSelect.length - 1);
  }
  draw();
}

function show(state) {
  const problem = state.error || "";
  byId("connection").hidden = !problem;
  byId("connection").textContent = problem;
  if (problem) return;
  showCounts(state);
  showGrid(state);
  showRunning(state);
  showFailed(state);
  if (!state.figures) return;
  const names = state.figures.arms.map((arm) => arm.name);
  if (names.join("\n") !== armNames.join("\n")) {
    location.reload(); // other arms need other buttons
    return;
  }
  figuresKey = state.figures_key;
  showFigures(state.figures);
}

async function poll() {
  let wait = 1000;
  try {
    const query = new URLSearchParams({ figures: figuresKey });
    if (folder) query.set("folder", folder);
    const response = await fetch(`state?${query}`, { cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    show(await response.json());
  } catch (error) {
    byId("connection").hidden = false;
    byId("connection").textContent = `No answer (${String(error.message || error).trim()}); trying again. ` +
      "If the command has ended, this is its last state.";
    wait = 2000;
  }
  setTimeout(poll, document.hidden ? 5000 : wait);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
poll();
