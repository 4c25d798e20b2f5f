"use strict";
// Draws the charts of a page from the JSON in it, and shows the tensors of one moment.
// The first functions are pure; `show` alone touches the page.  A drawing is HEIGHT units high and stretched over its box, so
// texts are no part of it: they stand over it, at shares of width and height from the top left.

const HEIGHT = 1000, FRONTIER_WIDTH = 1000;
const MOST_TENSORS = 12; // tensors listed for one moment
const LABEL_LEAST = 0.075; // the least height of an area that can hold its name, as a share of the chart
const NEAR = 0.07; // labels closer than this share of the height would overlap

// -- texts ---------------------------------------------------------------------------------------------------------------

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function bytes(n) { // as format_bytes in Python
  if (n < 1024) return `${n} B`;
  for (const [scale, unit] of UNITS) {
    if (n >= scale - Math.floor(scale / 20480)) return `${fixed(n / scale)} ${unit}`;
  }
  return `${fixed(n / 1024)} KiB`;
}

function fixed(x) { // one decimal; halves to the even digit, as Python's
  const tenths = x * 10, low = Math.floor(tenths);
  return ((tenths - low === 0.5 ? low + (low % 2) : Math.round(tenths)) / 10).toFixed(1);
}

const percent = (x) => `${x < 0 ? "" : "+"}${x.toFixed(2)} %`;

const where = (step, bin) => `${bin < step.num_forward ? "forward" : "backward"}, at ${step.names[bin]}`;

// -- the chart of live bytes ---------------------------------------------------------------------------------------------

function stepChart(step, colours) {
  const { top_bytes: top, ticks } = step.axis, width = step.names.length;
  const y = (n) => Math.round(HEIGHT * (1 - n / top));
  const kinds = Object.keys(step.areas).filter((kind) => step.areas[kind].some(Boolean));
  const areas = kinds.reverse().map((kind) => // each down to 0, the next lower one over it
    `<path class="${kind}" fill="${colours[kind]}" d="${outline(step.tops[kind].map(y))}V${HEIGHT}H0Z"/>`);
  const shapes = [
    line("grid", ticks.map(([n]) => `M0 ${y(n)}H${width}`).join(""), 'stroke-opacity=".14"'),
    ...areas,
    line("divider", `M${step.num_forward} 0V${HEIGHT}`, 'stroke-opacity=".45"'),
    step.other ? line("other", outline(step.other.live_bytes.map(y)), 'stroke-width="1.25"') : "",
    ...Object.entries(step.lines).map(([name, n]) =>
      line(name, `M0 ${y(n)}H${width}`, `stroke-width="1.5" stroke-dasharray="${name === "budget" ? "7 4" : "1.5 3"}"`)),
  ];
  const peaks = peakLabels(step);
  return {
    width,
    shapes: shapes.join(""),
    ticks: ticks.map(([n, text]) => ({ text, y: 1 - n / top })),
    labels: [...peaks, ...lineLabels(step, peaks[0]), ...areaLabels(step)],
  };
}

function outline(levels) { // steps from left to right, a unit for each level
  const parts = [];
  levels.forEach((level, k) => {
    if (level !== levels[k - 1]) parts.push(k ? `V${level}` : `M0 ${level}`);
    if (level !== levels[k + 1]) parts.push(`H${k + 1}`);
  });
  return parts.join("");
}

function line(name, path, style) { // its thickness does not change when the drawing is stretched
  return `<path class="${name}" fill="none" stroke="currentColor" ${style} vector-effect="non-scaling-stroke" d="${path}"/>`;
}

function peakLabels(step) { // the plan's peak, and the other plan's if that is more than 2 % higher
  const label = (name, role, levels) => {
    const most = Math.max(...levels), x = (levels.indexOf(most) + 0.5) / levels.length;
    const side = x > 0.6 ? "end" : "start";
    return { text: `${name} ${bytes(most)}`, x, y: 1 - most / step.axis.top_bytes, side, role };
  };
  const labels = [label("peak", "plan", step.live_bytes)];
  if (step.other && Math.max(...step.other.live_bytes) > 1.02 * step.live_bytes[step.peak]) {
    labels.push(label(step.other.label, "other", step.other.live_bytes));
  }
  return labels;
}

// Budget and floor, at the side farther from the peak.  The floor's name is below its line; the budget's is above, or below if
// the peak's label is near and the floor's is not.
function lineLabels(step, peak) {
  const [x, side] = peak.x < 0.5 ? [0.992, "end"] : [0.008, "start"];
  return Object.entries(step.lines).map(([name, n]) => {
    const y = 1 - n / step.axis.top_bytes;
    const room = step.lines.floor === undefined ? 1 : (n - step.lines.floor) / step.axis.top_bytes;
    const isBelow = name === "floor" || (Math.abs(peak.y - y) < NEAR && room > NEAR);
    return { text: `${name} ${bytes(n)}`, x, y, side, role: name, isBelow };
  });
}

function areaLabels(step) { // in the middle of the widest part of an area that is high enough
  const labels = [], top = step.axis.top_bytes;
  for (const [kind, area] of Object.entries(step.areas)) {
    let begin = 0, best = [0, 0];
    area.forEach((n, k) => {
      if (n / top < LABEL_LEAST) begin = k + 1;
      else if (k + 1 - begin > best[1] - best[0]) best = [begin, k + 1];
    });
    if (best[1] - best[0] < 0.12 * area.length) continue;
    const middle = Math.floor((best[0] + best[1]) / 2);
    const y = 1 - (step.tops[kind][middle] - area[middle] / 2) / top;
    labels.push({ text: kind, x: (best[0] + best[1]) / 2 / area.length, y, side: "middle", role: "area" });
  }
  return labels;
}

// -- the frontier --------------------------------------------------------------------------------------------------------

function frontierChart({ points, axis }, colours) {
  const shares = points.map((point) => point.percent), least = Math.min(0, ...shares), most = Math.max(...shares);
  const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000];
  const step = steps.find((s) => (most - least) / s <= 4.5) ?? most - least;
  const bottom = step * Math.floor(least / step);
  const height = Math.max(most - bottom + 0.25 * (most - least), step);
  const x = (point) => point.peak_bytes / axis.top_bytes, y = (level) => 1 - (level - bottom) / height;
  const levels = [];
  for (let k = Math.round(bottom / step); k * step <= bottom + height; k++) levels.push(k * step);
  const place = (point) => `${Math.round(FRONTIER_WIDTH * x(point))} ${Math.round(HEIGHT * y(point.percent))}`;
  const dot = (point) => {
    const style = point.is_chosen ? `stroke="${colours.saved}" stroke-width="12"` : 'stroke="currentColor" stroke-width="7"';
    return `<path d="M${place(point)}h0" stroke-linecap="round" ${style} fill="none" vector-effect="non-scaling-stroke">` +
      `<title>${bytes(point.peak_bytes)}, ${percent(point.percent)}</title></path>`;
  };
  const ordered = points.slice().sort((a, b) => a.peak_bytes - b.peak_bytes);
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : 2;
  return {
    width: FRONTIER_WIDTH,
    shapes: line("grid", levels.map((level) => `M0 ${Math.round(HEIGHT * y(level))}H${FRONTIER_WIDTH}`).join(""), 'stroke-opacity=".14"') +
      line("plans", `M${ordered.map(place).join("L")}`, 'stroke-width="1.25"') + points.map(dot).join(""),
    ticks: [
      ...levels.map((level) => ({ text: `${level.toFixed(digits)} %`, y: y(level) })),
      ...axis.ticks.map(([n, text]) => ({ text, x: n / axis.top_bytes })),
    ],
    labels: points.filter((point) => point.is_chosen).map((point) => labelBeside(point, x(point), y(point.percent))),
  };
}

function labelBeside(point, x, y) { // above and right of a point of the falling line, or left of it if there is no space
  const text = `this plan: ${bytes(point.peak_bytes)}, ${percent(point.percent)}`;
  if (x < 0.65) return { text, x: x + 0.012, y: y - 0.02, side: "start", role: "plan" };
  const isBelow = y < 0.85;
  return { text, x: x - 0.012, y: y + (isBelow ? 0.03 : -0.12), side: "end", role: "plan", isBelow };
}

// -- one moment ----------------------------------------------------------------------------------------------------------

function alive(step, bin, most) { // the largest tensors, the number of other ones, and the bytes of these and of workspaces
  const found = step.tensors.filter(([, , begin, end]) => begin <= bin && bin <= end).sort((a, b) => b[0] - a[0]);
  const kept = found.slice(0, most);
  return { kept, others: found.length - kept.length, left: kept.reduce((left, [n]) => left - n, step.live_bytes[bin]) };
}

// -- the page ------------------------------------------------------------------------------------------------------------

function show(data) {
  const element = (id) => document.getElementById(id);

  const made = (name, text, className = "") => {
    const node = document.createElement(name);
    node.textContent = text;
    if (className) node.className = className;
    return node;
  };

  const place = (node, x, y) => {
    if (x !== undefined) node.style.left = `${100 * x}%`;
    if (y !== undefined) node.style.top = `${100 * y}%`;
    return node;
  };

  const draw = (plot, chart) => {
    const texts = made("div", "");
    texts.append(
      ...chart.ticks.map(({ text, x, y }) => place(made("span", text, x === undefined ? "tick" : "tick x"), x, y)),
      ...chart.labels.map(({ text, x, y, side, role, isBelow }) =>
        place(made("span", text, `label ${side}${isBelow ? " below" : ""} ${role}`), x, y)));
    const svg = `<svg viewBox="0 0 ${chart.width} ${HEIGHT}" preserveAspectRatio="none">${chart.shapes}</svg>`;
    plot.insertAdjacentHTML("afterbegin", svg);
    plot.firstChild.after(texts);
  };

  const row = ([size, kind, , , name, type, fate, module, source]) => {
    const node = made("tr", ""), head = made("th", ""), place = made("td", data.step.strings[module], "text");
    const swatch = made("span", "", "swatch");
    head.scope = "row";
    swatch.style.background = data.colours[kind];
    head.append(swatch, data.step.strings[name], " ", made("small", data.step.strings[type]));
    const file = data.step.strings[source];
    if (file) place.append(place.textContent ? " " : "", made("small", file));
    node.append(head, made("td", bytes(size), "bytes"), made("td", data.step.strings[fate], "text"), place);
    return node;
  };

  const showMoment = (bin) => {
    const step = data.step, slider = element("slider");
    const moment = where(step, bin), total = bytes(step.live_bytes[bin]);
    place(element("rule"), (bin + 0.5) / step.names.length);
    element("where").textContent = moment;
    for (const [kind, area] of Object.entries(step.areas)) element(`now-${kind}`).textContent = bytes(area[bin]);
    element("now-sum").textContent = total;
    if (step.other) element("now-other").textContent = bytes(step.other.live_bytes[bin]);
    const { kept, others, left } = alive(step, bin, MOST_TENSORS);
    element("alive").replaceChildren(...kept.map(row));
    element("rest").textContent = left > 0 ? `${others} more tensors and workspaces: ${bytes(left)}` : "";
    slider.value = bin;
    slider.setAttribute("aria-valuetext", `${moment}: ${total} live`);
  };

  if (data.frontier) draw(element("frontier"), frontierChart(data.frontier, data.colours));
  if (!data.step) return;
  const plot = element("step"), slider = element("slider"), last = data.step.names.length - 1;
  const pointed = (event) => {
    const box = plot.getBoundingClientRect();
    const bin = Math.floor((event.clientX - box.left) / box.width * (last + 1));
    showMoment(Math.min(last, Math.max(0, bin)));
  };
  draw(plot, stepChart(data.step, data.colours));
  plot.addEventListener("pointermove", pointed);
  plot.addEventListener("pointerdown", pointed);
  slider.addEventListener("input", () => showMoment(Number(slider.value)));
  showMoment(data.step.peak);
}

if (typeof document !== "undefined") show(JSON.parse(document.getElementById("figures").textContent));
