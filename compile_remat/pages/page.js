"use strict";
// Moves the moment that the page shows; without a script it shows the peak.
(() => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  const slider = document.getElementById("slider");
  const plot = document.getElementById("step");
  const rule = document.getElementById("rule");
  const units = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

  const bytes = (n) => { // as format_bytes in Python
    if (n < 1024) return `${n} B`;
    for (const [scale, unit] of units) {
      if (n >= scale - Math.floor(scale / 20480)) return `${fixed(n / scale)} ${unit}`;
    }
    return `${fixed(n / 1024)} KiB`;
  };

  const fixed = (x) => { // one decimal; halves to the even digit, as Python's
    const tenths = x * 10, low = Math.floor(tenths);
    return ((tenths - low === 0.5 ? low + (low % 2) : Math.round(tenths)) / 10).toFixed(1);
  };

  const cell = (name, text, title, label) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (title) made.className = title;
    if (label) made.dataset.name = label;
    return made;
  };

  const row = (tensor) => {
    const [name, size, kind, , , fate, type, module, source] = tensor;
    const made = document.createElement("tr");
    const head = cell("th", "");
    head.scope = "row";
    const swatch = cell("span", "", "swatch");
    swatch.style.background = data.colours[kind];
    const text = data.strings;
    head.append(swatch, text[name], " ", cell("small", text[type]));
    const where = cell("td", text[module], "text");
    if (text[source]) where.append(text[module] ? " " : "", cell("small", text[source]));
    made.append(head, cell("td", bytes(size), "bytes"), cell("td", text[fate], "text"), where);
    return made;
  };

  const show = (bin) => {
    const column = data.columns[bin];
    const alive = data.tensors.filter((t) => t[3] <= column && column <= t[4]).sort((a, b) => b[1] - a[1]);
    const total = data.kinds.reduce((sum, kind) => sum + data.areas[kind][bin], 0);
    const phase = bin < data.num_forward ? "forward" : "backward";
    const where = `${phase}, at ${data.strings[data.names[bin]]}`;
    rule.style.left = `${100 * (bin + 0.5) / data.columns.length}%`;
    document.getElementById("where").textContent = where;
    for (const kind of data.kinds) document.getElementById(`now-${kind}`).textContent = bytes(data.areas[kind][bin]);
    document.getElementById("now-total").textContent = bytes(total);
    const other = document.getElementById("now-other");
    if (other) other.textContent = bytes(data.other[bin]);
    const kept = alive.slice(0, data.most_tensors);
    document.getElementById("alive").replaceChildren(...kept.map(row));
    const rest = alive.length - kept.length;
    const left = total - kept.reduce((sum, t) => sum + t[1], 0);
    document.getElementById("rest").textContent = left > 0 ? `${rest} more tensors and workspaces: ${bytes(left)}` : "";
    slider.value = bin;
    slider.setAttribute("aria-valuetext", `${where}: ${bytes(total)} live`);
  };

  const at = (event) => {
    const box = plot.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    show(Math.min(data.columns.length - 1, Math.max(0, Math.floor(share * data.columns.length))));
  };

  plot.addEventListener("pointermove", at);
  plot.addEventListener("pointerdown", at);
  slider.addEventListener("input", () => show(Number(slider.value)));
  show(Number(slider.value));
})();
