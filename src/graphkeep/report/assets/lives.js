"use strict";
/* The lives of graphs: each a bar from birth to death; on top those that never died. */

/** Bars into as few rows as hold them without an overlap. */
gk.lanes = function (bars, x, most) {
  const ends = [];
  const placed = [];
  for (const bar of bars) {
    const from = x(bar.from);
    const to = Math.max(x(bar.to), from + 3);
    let row = ends.findIndex((end) => end <= from + 0.5);
    if (row < 0) row = ends.length;
    if (row >= most) continue;
    ends[row] = to;
    placed.push({ ...bar, row, px: from, width: Math.max(to - from - 1, 2) });
  }
  return { placed, rows: ends.length };
};

/** Of many bars some from the whole length, of neighbours the largest. */
gk.spread = function (bars, most) {
  if (bars.length <= most) return bars;
  return d3.range(most).map((i) => {
    const part = bars.slice(Math.floor((i * bars.length) / most), Math.floor(((i + 1) * bars.length) / most));
    return part.reduce((best, bar) => (bar.bytes > best.bytes ? bar : best), part[0]);
  });
};

gk.lives = function (run, time) {
  const names = ["born", "died", "from", "to", "tensors", "bytes", "backward"];
  const died = run.lives.bars.map((row) => Object.fromEntries(names.map((name, i) => [name, row[i]]))).sort((a, b) => a.from - b.from || a.to - b.to);
  const holders = run.alive.holders.map((holder) => ({
    ...holder,
    bars: holder.parts.map(([first, last, parts, nodes, bytes]) => ({ holder, from: first, to: holder.to, first, last, parts, nodes, bytes })),
  }));
  const chart = gk.el("div", { class: "chart" });
  const caption = gk.el("p", { class: "caption" });
  const spot = gk.el("div", {});
  const tip = gk.tip(chart);
  let shown = [];
  const key = (kind, text) => gk.el("li", {}, gk.el("small", {}, gk.el("span", { class: `key ${kind}` }), text));
  const table = gk.asTable("Lives of graphs", () => [
    [["Graph"], ["Fate"], ["From step", true], ["To step", true], ["Bytes", true]],
    shown.map((bar) => [bar.holder ? stretch(bar) : `born at ${run.at(bar.born)}`, fate(bar), time.number(bar.from), bar.holder ? "–" : time.number(bar.to), gk.bytes(bar.bytes)]),
  ]);
  const figure = gk.el(
    "figure", {},
    gk.el("h3", {}, "Lives of graphs"), caption, chart,
    gk.el("ul", { class: "legend" }, key("alive", "alive when last looked at; with an arrow: at the end"), key("backward", "freed by a backward"), key("count", "freed by reference count")),
    spot, table,
  );

  function stretch(bar) {
    const part = (step) => (step < 0 ? "before the first step" : gk.count(step));
    if (bar.first === bar.last) return bar.first < 0 ? "Built before the first step" : `Built in step ${part(bar.first)}`;
    return `Built in ${gk.many(bar.parts, "step")}, ${part(bar.first)} to ${part(bar.last)}`;
  }

  function fate(bar) {
    if (bar.holder) return `${bar.holder.final ? "alive at the end" : "alive in the last look before the end"}, held by ${bar.holder.holder.replaceAll("`", "")}`;
    return bar.backward === null ? `freed by reference count at ${run.at(bar.died)}` : `freed by backward ${gk.count(bar.backward)} at ${run.at(bar.died)}`;
  }

  function says(bar) {
    if (bar.holder) return [stretch(bar), `${gk.bytes(bar.bytes)} in ${gk.many(bar.nodes, "node")}`, fate(bar)];
    return [`Graph born at ${run.at(bar.born)}`, `${time.when(bar.from)} to ${time.when(bar.to)}`, `${gk.bytes(bar.bytes)} in ${gk.many(bar.tensors, "saved tensor")}`, fate(bar)];
  }

  function open(bar, mark) {
    const close = () => { spot.replaceChildren(); (mark.isConnected ? mark : chart.querySelector(".bar[tabindex='0']"))?.focus(); };
    const place = (title, file, line, where) => gk.el(
      "li", {}, gk.el("p", { class: "sum" }, `${title} `, gk.el("code", {}, where)),
      gk.source(run, file, line) || gk.el("p", { class: "caption" }, "The data file has no source of this line."));
    const site = (title, id) => {
      const found = run.sites.get(id);
      return found ? [place(title, found.file, found.line, run.place(found))] : [];
    };
    const parts = bar.holder
      ? [...(bar.holder.where ? [place("held at", bar.holder.file, bar.holder.line, bar.holder.where)] : []), gk.el("li", {}, gk.el("p", { class: "sum" }, "built at"), gk.places(run, bar.holder.sites, 6))]
      : [...site("born at", bar.born), ...site("freed at", bar.died)];
    const panel = gk.panel(says(bar).join("; "), gk.el("ol", { class: "places" }, parts), close);
    spot.replaceChildren(panel);
    panel.begin();
  }

  /** Those born before the range that is shown, as one bar. */
  function together(bars, from) {
    const older = bars.filter((bar) => bar.last < from);
    if (older.length < 2) return bars;
    const sum = (key) => d3.sum(older, (bar) => bar[key]);
    const one = { ...older[0], last: older[older.length - 1].last, parts: sum("parts"), nodes: sum("nodes"), bytes: sum("bytes") };
    return [one, ...bars.filter((bar) => bar.last >= from)];
  }

  function draw() {
    const [from, to] = time.range;
    const { width, left, right } = time.size(0);
    const x = d3.scaleLinear(time.range, [left, width - right]).clamp(true);
    const inRange = died.filter((bar) => bar.to >= from && bar.from <= to);
    const { placed, rows } = gk.lanes(gk.spread(inRange, 240), x, 24);
    const alive = holders.map((holder) => ({ ...holder, bars: together(holder.bars.filter((bar) => bar.from <= to && bar.to >= from), from) }));
    const [thin, thick] = [7, 11];
    let height = 6;
    for (const holder of alive) {
      holder.y = height;
      height += 20 + holder.bars.length * thin + 8;
    }
    const freed = height;
    height += 20 + Math.max(rows, 1) * thick + 4;
    const bottom = height;
    chart.querySelector("svg")?.remove();
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${bottom + 26}`).attr("height", bottom + 26).attr("role", "group")
      .attr("aria-label", "Lives of graphs over steps, those that never died first. Arrow keys move between graphs, Enter shows the lines.");
    chart.prepend(svg.node());
    const hatch = svg.append("pattern").attr("id", `hatch-${time.id}`).attr("width", 4).attr("height", 4).attr("patternUnits", "userSpaceOnUse").attr("patternTransform", "rotate(45)");
    hatch.append("rect").attr("class", "hatch-ground").attr("width", 4).attr("height", 4);
    hatch.append("line").attr("class", "hatch").attr("y2", 4).attr("x1", 1).attr("x2", 1).attr("stroke-width", 2);
    gk.steps(svg, run, x, 0, bottom);
    const title = (y, text) => svg.append("text").attr("x", left).attr("y", y + 13).text(gk.cut(text, Math.floor((width - left) / 6.6)));
    shown = [];
    for (const holder of alive) {
      title(holder.y, `${holder.final ? "never freed" : `alive at ${time.when(holder.to)}`}: ${holder.holder.replaceAll("`", "")} – ${gk.many(holder.nodes, "node")}, ${gk.bytes(holder.bytes)}`);
      holder.bars.forEach((bar, i) => {
        const px = x(bar.from);
        const wide = Math.max(x(bar.to) - px, 4);
        shown.push({ ...bar, kind: holder.final ? "alive" : "past", px: Math.min(px, width - right - 4), width: wide, py: holder.y + 20 + i * thin, height: thin - 2 });
      });
    }
    title(freed, inRange.length ? `freed – ${gk.many(inRange.length, "graph")} in this range` : "freed – no graph in this range");
    for (const bar of placed) shown.push({ ...bar, kind: bar.backward === null ? "count" : "backward", py: freed + 20 + bar.row * thick, height: thick - 2 });
    const bars = svg.append("g").selectAll("rect").data(shown).join("rect")
      .attr("class", (bar) => `bar ${bar.kind}`).attr("x", (bar) => bar.px).attr("y", (bar) => bar.py)
      .attr("width", (bar) => bar.width).attr("height", (bar) => bar.height).attr("rx", 1.5)
      .attr("fill", (bar) => (bar.kind === "count" ? `url(#hatch-${time.id})` : null))
      .attr("role", "button").attr("aria-label", (bar) => says(bar).join("; "));
    svg.append("g").selectAll("path").data(shown.filter((bar) => bar.kind === "alive")).join("path").attr("class", "arrow")
      .attr("d", (bar) => `M${bar.px + bar.width},${bar.py - 1}l5,${bar.height / 2 + 1}l-5,${bar.height / 2 + 1}z`);
    const show = (bar) => { const [head, ...rest] = says(bar); tip.show(bar.px + Math.min(bar.width, 60), bar.py, head, ...rest); };
    bars.on("pointerenter", (_, bar) => show(bar)).on("focus", (_, bar) => show(bar)).on("pointerleave", tip.hide).on("blur", tip.hide)
      .on("click", (event, bar) => open(bar, event.currentTarget));
    gk.roving(bars.nodes(), null);
    words(inRange.length, placed.length);
    table.fill();
  }

  function words(all, drawn) {
    const parts = [];
    if (holders.some((holder) => holder.steps > holder.parts.length)) parts.push("Where a holder has parts of many steps, a bar stands for those of neighbours.");
    if (run.alive.more) parts.push(`${gk.many(run.alive.more, "more holder")} in the table below.`);
    if (drawn < all) parts.push(`${gk.count(drawn)} of ${gk.count(all)} freed graphs are drawn; a narrower range of steps shows the others.`);
    if (run.lives.died > died.length) parts.push(`${gk.count(run.lives.died)} graphs died in all, ${gk.count(died.length)} are on this page; the sums below count all of them.`);
    caption.textContent = parts.join(" ") || "Each bar is a graph, from the first saved tensor to its death. Choose one to see its lines.";
  }

  time.draws.push(draw);
  return figure;
};
