// Sorts the tables of the leaderboard, and filters its models.
const filters = document.getElementById("filters");
const sort = (table, column, direction) => {
  const body = table.tBodies[0], value = row => row.cells[column].dataset.value;
  const compare = (a, b) => {
    if (column === 0) return direction * a.dataset.name.localeCompare(b.dataset.name);
    const [x, y] = [value(a), value(b)];
    return x === "" || y === "" ? (x === "") - (y === "") : direction * (x - y);  // unknown ones are last
  };
  body.append(...[...body.rows].sort(compare));
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    if (index === column) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  });
};
const heading = (table, name) => [...table.tHead.rows[0].cells].findIndex(cell => cell.textContent === name);
for (const table of document.querySelectorAll(".board table")) table.tHead.addEventListener("click", event => {
  const cell = event.target.closest("th");
  if (!event.target.closest("button")) return;
  const first = ["model", "rank", "passes", "TFLOP"].includes(cell.textContent) ? 1 : -1;
  const before = { ascending: 1, descending: -1 }[cell.getAttribute("aria-sort")];
  sort(table, cell.cellIndex, before ? -before : first);
});
const filter = () => {
  const { text, data, threat, attack, unflagged, count } = filters.elements;
  let shown = 0, all = 0;
  for (const board of document.querySelectorAll(".board")) {
    const hidden = [];
    for (const row of board.querySelectorAll("tbody tr")) {
      const here = (!data.value || data.value === board.dataset.data) && (!threat.value || threat.value === board.dataset.threat);
      const tried = !attack.value || row.dataset.attacks.split(" ").includes(attack.value);
      const named = row.dataset.name.toLowerCase().includes(text.value.trim().toLowerCase());
      row.hidden = !(here && tried && named && !(unflagged.checked && "flagged" in row.dataset));
      if (row.hidden) hidden.push(row.dataset.name);
      all += 1; shown += !row.hidden;
    }
    board.hidden = hidden.length === board.querySelectorAll("tbody tr").length;
    for (const chart of board.querySelectorAll(".chart")) {
      chart.hidden = chart.dataset.attack !== (attack.value || board.dataset.main);
      chart.querySelector(".plot").dataset.without = hidden.join("\n");
      for (const point of chart.querySelectorAll("g[data-name]")) point.style.display = hidden.includes(point.dataset.name) ? "none" : "";
      chart.querySelectorAll(".front").forEach(line => { line.style.display = hidden.length ? "none" : ""; });
    }
  }
  count.value = `${shown} of ${all} rows`;
};
filters.addEventListener("input", event => {
  filter();
  if (event.target.name !== "attack") return;
  for (const table of document.querySelectorAll(".board table")) {
    const column = heading(table, event.target.value ? event.target.value + " %" : "rank");
    if (column > 0) sort(table, column, event.target.value ? -1 : 1);
  }
});
filters.addEventListener("submit", event => event.preventDefault());
filters.hidden = false;
filter();
