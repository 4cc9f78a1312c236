"use strict";
// Shows values on hover, read from the data-chart attribute of each plot.
for (const plot of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor"; tip.className = "tip";
  cursor.hidden = tip.hidden = true;
  plot.append(cursor, tip);
  const at = (axis, value) => axis[2] + (value - axis[0]) / (axis[1] - axis[0] || 1) * (axis[3] - axis[2]);
  const show = (lines, x, y, box) => {
    tip.replaceChildren(...lines.map(([colour, text]) => {
      const line = document.createElement("div");
      if (colour !== null) {
        const key = document.createElement("span");
        key.className = "key s" + colour;
        line.append(key);
      }
      line.append(text);
      return line;
    }));
    tip.hidden = cursor.hidden = false;
    cursor.style.left = x + "px";
    tip.style.left = Math.max(0, Math.min(x + 12, box.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(0, Math.min(y + 12, box.height - tip.offsetHeight)) + "px";
  };
  const move = event => {
    const box = plot.getBoundingClientRect(), scale = box.width / chart.view[0];
    const x = (event.clientX - box.left) / scale, y = (event.clientY - box.top) / scale;
    let best = null;
    const hidden = (plot.dataset.without || "").split("\n");
    for (const series of chart.series) if (!hidden.includes(series.name)) series.x.forEach((value, index) => {
      const dx = at(chart.x, value) - x, dy = chart.kind === "points" ? at(chart.y, series.y[index]) - y : 0;
      const far = dx * dx + dy * dy;
      if (!best || far < best.far) best = { far, value, series, index };
    });
    if (!best) return;
    const place = at(chart.x, best.value) * scale, number = value => (Math.round(value * 100) / 100).toString();
    if (chart.kind === "points") {
      const { series, index } = best;
      show([[series.colour, series.name], [null, number(series.x[index]) + " " + chart.unit], [null, series.y[index].toFixed(1) + " %"]],
        place, y * scale, box);
      return;
    }
    const rows = chart.series.map(series => [series, series.x.indexOf(best.value)]).filter(([, index]) => index >= 0)
      .map(([series, index]) => [series.y[index], series]).sort((a, b) => b[0] - a[0]);
    show([[null, chart.unit + " " + number(best.value)],
      ...rows.map(([value, series]) => [series.colour, series.name + "  " + value.toFixed(1) + " %"])], place, y * scale, box);
  };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", () => { tip.hidden = cursor.hidden = true; });
}
