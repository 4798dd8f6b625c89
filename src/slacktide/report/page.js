"use strict";
// Reading values off the charts (pointer, or arrow keys on a focused chart), switching runs, the theme.
(() => {
  const root = document.documentElement, tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-label", "Switch to the " + theme.textContent.toLowerCase() + " theme"); };
  theme.hidden = false;
  label();
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });

  for (const button of document.querySelectorAll("button.switch"))
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      root.classList.toggle("hide-" + button.dataset.run, !shown);
    });

  const hidden = (run) => run !== null && root.classList.contains("hide-" + run);
  const at = (axis, value) => {
    const [scale, low, high, start, length] = axis;
    if (scale === "log") return start + (Math.log10(Math.max(value, low) / low) / Math.log10(high / low)) * length;
    if (scale === "tail") return start + (-Math.log10(Math.max(1 - value, 1e-4)) / high) * length;
    return start + ((value - low) / (high - low)) * length;
  };
  const back = (axis, place) => {
    const [scale, low, high, start, length] = axis, share = (place - start) / length;
    return scale === "log" ? low * Math.pow(high / low, share) : low + share * (high - low);
  };
  const text = (value) => Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  const percent = (value) => { const t = (100 * value).toFixed(value > 0.99 && value < 1 ? 3 : 1); return t + " %"; };

  // The last point at or before x: lines here hold their value up to the next point, or nearly so.
  const find = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (xs[middle] <= x) low = middle; else high = middle - 1; }
    return low;
  };

  for (const script of document.querySelectorAll("script[data-for]")) {
    const data = JSON.parse(script.textContent), svg = document.getElementById(script.dataset.for);
    const cursor = svg.querySelector(".cursor"), said = data.pct ? percent : text;
    let place = null;
    const hide = () => { cursor.replaceChildren(); tip.hidden = true; };
    const show = (px) => {
      const [, , , start, length] = data.x;
      place = Math.min(Math.max(px, start), start + length);
      const x = back(data.x, place), step = length / 60;
      const line = document.createElementNS(SVG, "line");
      line.setAttribute("x1", place); line.setAttribute("x2", place); line.setAttribute("y1", 26); line.setAttribute("y2", 254);
      const marks = [line], head = document.createElement("b");
      head.textContent = data.xl + ": " + text(x);
      tip.replaceChildren(head);
      for (const series of data.s) {
        if (hidden(series.run) || !series.x.length) continue;
        let i = find(series.x, x);
        if (i + 1 < series.x.length && series.x[i + 1] - x < x - series.x[i] && data.x[0] === "linear") i += 1;
        const y = series.y[i];
        if (y === null || series.x[i] === null || x < series.x[0] && Math.abs(at(data.x, series.x[0]) - place) > step) continue;
        if (/, (runs|at most)$/.test(series.name) && Math.abs(at(data.x, series.x[i]) - place) > step) continue;
        const row = document.createElement("span"), name = document.createElement("span"), value = document.createElement("span");
        name.textContent = series.name; value.textContent = said(y);
        if (series.band && series.band[0][i] !== null)
          value.textContent += " (" + said(series.band[0][i]) + " to " + said(series.band[1][i]) + ")";
        row.append(name, value); tip.append(row);
        const dot = document.createElementNS(SVG, "circle");
        dot.setAttribute("cx", place); dot.setAttribute("cy", at(data.y, y)); dot.setAttribute("r", 3.5);
        if (!/^(decode|prefill|mixed|load)$/.test(series.colour)) marks.push(dot);
      }
      cursor.replaceChildren(...marks);
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), scale = box.width / 560, width = tip.offsetWidth;
      let left = box.left + place * scale + 14;
      if (left + width > innerWidth - 8) left = Math.max(8, box.left + place * scale - width - 14);
      tip.style.left = left + "px";
      tip.style.top = Math.max(8, Math.min(box.top + 10, innerHeight - tip.offsetHeight - 8)) + "px";
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(((event.clientX - box.left) / box.width) * 560);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const [, , , start, length] = data.x, step = length / (event.shiftKey ? 10 : 60);
      const moves = { ArrowRight: step, ArrowLeft: -step };
      if (event.key === "Escape") { hide(); return; }
      if (event.key === "Home" || event.key === "End") show(event.key === "Home" ? start : start + length);
      else if (event.key in moves) show(place === null ? start + length / 2 : place + moves[event.key]);
      else return;
      event.preventDefault();
    });
  }
})();
