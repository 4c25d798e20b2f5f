"use strict";
// Shows the tensors of one moment, copies budgets and folds modules.  The first functions are pure; `show` alone touches the page.

const MOST_TENSORS = 12; // tensors listed for one moment
const MOST_ROWS = 24; // a longer table of modules begins folded

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

const where = (step, bin) => `${bin < step.num_forward ? "forward" : "backward"}, at ${step.names[bin]}`;

// -- one moment ----------------------------------------------------------------------------------------------------------

function alive(step, bin, most) { // the largest tensors, the number of other ones, and the bytes of these and of workspaces
  const found = step.tensors.filter(([, , begin, end]) => begin <= bin && bin <= end).sort((a, b) => b[0] - a[0]);
  const kept = found.slice(0, most);
  return { kept, others: found.length - kept.length, left: kept.reduce((left, [n]) => left - n, step.live_bytes[bin]) };
}

// -- the page ------------------------------------------------------------------------------------------------------------

function show(step) {
  const element = (id) => document.getElementById(id);

  const made = (name, text, className = "") => {
    const node = document.createElement(name);
    node.textContent = text;
    if (className) node.className = className;
    return node;
  };

  const row = ([size, kind, , , name, type, fate, module, source]) => {
    const node = made("tr", ""), head = made("th", ""), place = made("td", step.strings[module], "text");
    head.scope = "row";
    const swatch = element(`now-${kind}`).parentNode.querySelector(".swatch").cloneNode(true);
    head.append(swatch, step.strings[name], " ", made("small", step.strings[type]));
    const file = step.strings[source];
    if (file) place.append(place.textContent ? " " : "", made("small", file));
    node.append(head, made("td", bytes(size), "bytes"), made("td", step.strings[fate], "text"), place);
    return node;
  };

  const showMoment = (bin) => {
    const slider = element("slider"), moment = where(step, bin), total = bytes(step.live_bytes[bin]);
    element("rule").style.left = `${100 * (bin + 0.5) / step.names.length}%`;
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

  const showStep = () => {
    const plot = element("step"), drawing = plot.querySelector("svg"), slider = element("slider"), last = step.names.length - 1;
    const pointed = (event) => {
      const box = plot.getBoundingClientRect();
      const bin = Math.floor((event.clientX - box.left) / box.width * (last + 1));
      showMoment(Math.min(last, Math.max(0, bin)));
    };
    plot.addEventListener("pointermove", pointed);
    plot.addEventListener("pointerdown", pointed);
    slider.addEventListener("input", () => showMoment(Number(slider.value)));
    new ResizeObserver(() => { // hatching keeps its size while the drawing is stretched
      const { width, height } = drawing.viewBox.baseVal, { clientWidth, clientHeight } = plot;
      const scale = `scale(${width / clientWidth} ${height / clientHeight})`;
      for (const pattern of drawing.querySelectorAll("pattern[href]")) pattern.setAttribute("patternTransform", scale);
    }).observe(plot);
    showMoment(step.peak);
  };

  const placeLabels = () => { // left of a point at the right edge; hidden, until its point is pointed at, where it meets another text
    const edge = element("frontier").getBoundingClientRect().right, shown = [];
    for (const node of element("frontier").querySelectorAll(".tick, .rule, .label")) {
      node.classList.remove("hidden");
      if (node.matches(".dot + .label")) {
        node.classList.remove("end");
        node.classList.toggle("end", node.getBoundingClientRect().right > edge);
      }
      const box = node.getBoundingClientRect();
      const meets = (other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom;
      if (node.matches(".label") && shown.some(meets)) node.classList.add("hidden");
      else shown.push(box);
    }
  };

  const copy = ({ currentTarget: button }) => {
    const said = element("copied"), text = button.dataset.copy;
    said.textContent = text;
    const isCopied = () => { said.textContent = `Copied: ${text}`; };
    const isRefused = () => getSelection().selectAllChildren(said); // as in a frame: it is there to be copied by hand
    navigator.clipboard?.writeText(text).then(isCopied, isRefused);
  };

  const fold = (button, isOpen) => {
    button.closest("tbody").nextElementSibling.hidden = !isOpen;
    button.setAttribute("aria-expanded", isOpen);
  };

  if (step) showStep();
  if (element("frontier")) new ResizeObserver(placeLabels).observe(element("frontier"));
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", copy);
  const isLong = document.querySelectorAll("#modules tbody tr").length > MOST_ROWS;
  for (const button of document.querySelectorAll(".fold")) {
    fold(button, !isLong);
    button.addEventListener("click", () => fold(button, button.getAttribute("aria-expanded") === "false"));
  }
}

if (typeof document !== "undefined") show(JSON.parse(document.getElementById("figures").textContent));
