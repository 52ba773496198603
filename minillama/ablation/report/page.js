"use strict";
// Draws every figure from the page's own data, and again when an arm, the rate or the theme changes.
let page = JSON.parse(document.getElementById("data").textContent);
const shown = page.arms.map(() => true);
const rateSelect = document.getElementById("rate");
const dark = matchMedia("(prefers-color-scheme: dark)");
const printing = matchMedia("print");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    dark: dark.matches && !printing.matches,
    ink: of("--ink"), soft: of("--soft"), grid: of("--grid"), line: of("--line"), card: of("--card"),
  };
}

function colourOf(arm, look) {
  return look.dark ? page.arms[arm].dark : page.arms[arm].light;
}

function isShown(trace) {
  const meta = trace.meta;
  if (!shown[meta.arm]) return false;
  if (meta.rate === null || !rateSelect) return true;
  const wanted = rateSelect.value;
  return wanted === "all" || (wanted === "best" ? meta.best : meta.rate === wanted);
}

function painted(trace, look) {
  const colour = colourOf(trace.meta.arm, look);
  const out = { ...trace, visible: isShown(trace), showlegend: false };
  if (trace.line) out.line = { ...trace.line, color: colour };
  if (trace.marker) {
    const edge = { width: 1, color: look.card, ...trace.marker.line };
    if (String(trace.marker.symbol).match(/-(thin|open)$/)) edge.color = colour;
    out.marker = { ...trace.marker, color: colour, line: edge };
  }
  if (trace.fill) out.fillcolor = colour + "2a";
  if (trace.error_x) out.error_x = { ...trace.error_x, color: colour };
  return out;
}

// The shown curves from a tenth of their way on: the first fall looks alike everywhere and would
// squeeze what differs.
function tailRange(figure) {
  const values = figure.traces
    .filter((trace) => isShown(trace) && !trace.opacity)
    // An outline to be filled goes along its upper edge and comes back along the lower one.
    .flatMap((trace) => trace.fill
      ? trace.y.slice(Math.ceil(trace.y.length / 20), -Math.ceil(trace.y.length / 20))
      : trace.y.slice(Math.ceil(trace.y.length / 10)))
    .filter((value) => value !== null);
  if (!values.length) return undefined;
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const pad = 0.06 * (high - low) || 0.1;
  return [low - pad, high + pad];
}

function layoutOf(figure, look, narrow) {
  const axis = (given) => ({
    gridcolor: look.grid, linecolor: look.line, tickcolor: look.line, ...given,
  });
  return {
    ...figure.layout,
    xaxis: axis(figure.layout.xaxis),
    yaxis: axis(figure.fit_tail ? { ...figure.layout.yaxis, range: tailRange(figure) } : figure.layout.yaxis),
    annotations: (figure.layout.annotations || []).map((note) => ({
      ...note, font: { ...note.font, color: look.soft },
    })),
    shapes: (figure.layout.shapes || []).map((shape) => ({
      ...shape, line: { color: look.soft, ...shape.line },
    })),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: look.ink, size: narrow ? 11 : 13, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { namelength: -1, font: { family: getComputedStyle(document.body).fontFamily } },
    hovermode: "closest",
    dragmode: narrow ? false : "zoom",
    margin: { l: narrow ? 44 : 60, r: 12, t: 10, b: 44 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: look.line, activecolor: look.ink },
    uirevision: "keep the reader's zoom",
  };
}

function draw() {
  const look = theme();
  const narrow = innerWidth < 640;
  for (const figure of page.figures) {
    const config = { responsive: true, displaylogo: false, displayModeBar: narrow ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    if (figure.layout.height) document.getElementById(figure.id).style.height = "auto";
    const traces = figure.traces.map((trace) => painted(trace, look));
    Plotly.react(figure.id, traces, layoutOf(figure, look, narrow), config);
  }
  document.querySelectorAll("[data-arm]").forEach((button) => {
    button.setAttribute("aria-pressed", shown[button.dataset.arm]);
    button.style.setProperty("--arm", colourOf(Number(button.dataset.arm), look));
  });
}

document.querySelectorAll("[data-arm]").forEach((button) => {
  button.addEventListener("click", () => {
    shown[button.dataset.arm] = !shown[button.dataset.arm];
    draw();
  });
});
if (rateSelect) rateSelect.addEventListener("change", draw);
dark.addEventListener("change", draw);
printing.addEventListener("change", draw);
draw();
document.documentElement.dataset.drawn = "true";
