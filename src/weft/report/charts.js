"use strict";
// Draws the charts of a report with uPlot in place of the static pictures; reads the JSON of the element "data".
(function () {
  const get = id => document.getElementById(id), read = () => JSON.parse(get("data").textContent);
  let data = read();
  const x = get("x"), log = get("log"), smooth = get("smooth");
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const WHOLE = [...Array(15).keys()].flatMap(power => [1, 2, 5].map(factor => factor * 10 ** power));  // steps, tokens
  let plots = [];

  // From a step to the chosen x, between the places where it is known.
  function place(run, step) {
    const known = data.runs[run].x, steps = known.step, values = known[x.value];
    if (x.value === "step" || !steps.length) return step;
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return values[0] * step / steps[0];
    if (step >= steps[high]) return values[high];
    while (high - low > 1) { const mid = (low + high) >> 1; if (steps[mid] <= step) low = mid; else high = mid; }
    return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
  }

  // Exponential moving average over steps, without a bias at the start; at 0 the curve itself.
  function smoothed(series) {
    const share = smooth.value / 100;
    if (!share || series.style === "points") return [series.x, series.y];
    const xs = series.mx || series.x, ys = series.my || series.y;
    const width = Math.pow(share, 3) * 0.2 * Math.max(1, xs[xs.length - 1] - xs[0]) + 1;
    let sum = 0, weight = 0;
    const means = ys.map((value, i) => {
      const keep = i ? Math.exp(-(xs[i] - xs[i - 1]) / width) : 0;
      sum = keep * sum + (1 - keep) * value; weight = keep * weight + (1 - keep);
      return sum / weight;
    });
    return [xs, means];
  }

  function number(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size >= 1e9) return +(value / 1e9).toPrecision(4) + " B";
    if (size >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
    if (size && size < 1e-4) return (+value.toPrecision(3)).toExponential();
    return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
  }

  // Of the splits of a logarithmic axis those that are powers of ten.
  function decades(_, splits) { return splits.map(value => Number.isInteger(+Math.log10(value).toFixed(6)) ? value : null); }

  function draw(plot) {
    const loud = data.marks.filter(mark => mark.kind !== "save" && mark.kind !== "note");
    const saves = data.marks.filter(mark => mark.kind === "save");
    const pen = plot.ctx, box = plot.bbox, ratio = devicePixelRatio || 1;
    pen.save();
    pen.beginPath(); pen.rect(box.left, box.top, box.width, box.height); pen.clip();
    loud.forEach(mark => {
      const at = plot.valToPos(place(mark.run, mark.step), "x", true);
      pen.strokeStyle = pen.fillStyle = colour(mark.kind === "resume" ? "dim" : "mark");
      pen.lineWidth = ratio; pen.setLineDash([4 * ratio, 3 * ratio]);
      pen.beginPath(); pen.moveTo(at, box.top); pen.lineTo(at, box.top + box.height); pen.stroke();
      pen.setLineDash([]); pen.font = 10 * ratio + "px system-ui, sans-serif"; pen.textAlign = "left";
      pen.fillText(mark.kind, at + 3 * ratio, box.top + 10 * ratio);
    });
    pen.restore();
    pen.save();
    const room = 4 * ratio;  // half a triangle stands beside the first and the last step
    pen.beginPath(); pen.rect(box.left - room, box.top, box.width + 2 * room, box.height); pen.clip();
    pen.fillStyle = colour("dim");
    saves.forEach(mark => {
      const at = plot.valToPos(place(mark.run, mark.step), "x", true), low = box.top + box.height, side = room;
      pen.beginPath(); pen.moveTo(at - side, low); pen.lineTo(at + side, low); pen.lineTo(at, low - 1.6 * side); pen.fill();
    });
    pen.restore();
  }

  // The names below a chart stand beside the last value of each curve while no pointer is on it.
  function rest(plot) {
    if (plot.cursor.left >= 0) return;
    const last = column => { let at = column.length - 1; while (at > 0 && column[at] == null) at--; return at; };
    plot.setLegend({ idxs: plot.data.map(last) });
  }

  function open(figure) {
    const chart = data.charts[figure.dataset.chart], holder = figure.querySelector(".plot");
    const isLog = chart.log || log.checked;
    const tables = chart.series.map(series => {
      const [xs, ys] = smoothed(series);
      return [xs.map(step => place(series.run, step)), isLog ? ys.map(y => y > 0 ? y : null) : ys];
    });
    const axis = { stroke: colour("dim"), grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, values: (_, ticks) => ticks.map(t => t === null ? "" : number(t)) };
    const series = chart.series.map(each => {
      const stroke = colour("s" + each.colour), few = each.style === "points" || each.x.length === 1;
      return { label: each.label, stroke, width: few ? 0 : 1.5, spanGaps: true, dash: each.style === "dashes" ? [6, 4] : undefined,
        points: few ? { show: true, size: 7, fill: stroke, stroke } : { show: false },
        value: (_, v) => v === null || v === undefined ? "-" : number(v) + (chart.unit ? " " + chart.unit : "") };
    });
    holder.textContent = "";
    figure.classList.add("live");
    const plot = new uPlot({
      width: holder.clientWidth, height: Math.max(190, Math.min(260, holder.clientWidth * 0.5)), padding: [8, 12, 0, 0],
      cursor: { sync: { key: "report" }, drag: { x: true, y: false } }, legend: { live: true },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [
        { ...axis, space: 60, size: 30, ...(x.value === "hours" ? {} : { incrs: WHOLE }) },
        { ...axis, size: 64, grid: { ...axis.grid, ...(isLog ? { filter: decades } : {}) } },
      ],
      series: [{ label: x.options[x.selectedIndex].text, value: (_, v) => number(v) }, ...series],
      hooks: { draw: [draw], setCursor: [rest] },
    }, uPlot.join(tables), holder);
    rest(plot);
    plots.push(plot);
  }

  function show() {
    plots.forEach(plot => plot.destroy());
    plots = [];
    document.querySelectorAll("figure[data-chart]").forEach(open);
  }

  // The part of x that is shown; undefined where it is the whole run.
  function zoomed() {
    const plot = plots[0], xs = plot && plot.data[0];
    if (!xs || !xs.length) return undefined;
    const { min, max } = plot.scales.x;
    return min > xs[0] || max < xs[xs.length - 1] ? { min, max } : undefined;
  }

  // New data of a page that is kept up to date; its figures are new elements, its controls are the old ones.
  function renew() {
    const part = zoomed();
    data = read();
    controls.hidden = false;
    show();
    if (part) plots.forEach(plot => plot.setScale("x", part));
  }

  let width = innerWidth;
  const controls = get("controls");
  controls.hidden = false;
  document.addEventListener("data", renew);
  [x, log].forEach(input => input.addEventListener("change", show));
  smooth.addEventListener("input", show);
  get("all").addEventListener("click", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; show(); } });
  show();
})();
