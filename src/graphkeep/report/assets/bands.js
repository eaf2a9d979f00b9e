"use strict";
/* Graph bytes over steps, as stacked bands by module or by line. */

/** Powers of two as ticks: what people read bytes in. */
gk.byteTicks = function (most, count) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(most, 1) / count)));
  return d3.range(0, most + 1, step);
};

gk.shortBytes = (count) => gk.bytes(count).replace(".0 ", " ");

/** Which samples are drawn: all of them, or of neighbours the highest, and of these also the lowest as a line. */
gk.visible = function ({ x: xs, total: totals, thinned }, [from, to], width) {
  let first = d3.bisectLeft(xs, from) - 1;
  let last = d3.bisectRight(xs, to);
  first = Math.max(first, 0);
  last = Math.min(last, xs.length - 1);
  const all = d3.range(first, last + 1);
  let columns = Math.max(Math.floor(width / 5), 20);
  // where samples were left out, two of them stand for many steps: a column holds more than these two
  const few = all.filter((i) => i >= thinned[0] && i < thinned[1]);
  if (few.length > 2) columns = Math.min(columns, Math.ceil(((to - from) * few.length) / (3 * Math.max(xs[few[few.length - 1]] - xs[few[0]], 1e-9))));
  else if (all.length <= columns) return { high: all, low: null };
  const column = (i) => Math.floor(((xs[i] - from) / Math.max(to - from, 1e-9)) * columns);
  const pick = (part, better) => part.reduce((best, i) => (better(totals[i], totals[best]) ? i : best), part[0]);
  const parts = d3.groups(all, column).map(([, part]) => part);
  const high = parts.map((part) => pick(part, (a, b) => a > b));
  return { high: [...new Set([all[0], ...high, all[all.length - 1]])], low: parts.map((part) => pick(part, (a, b) => a < b)) };
};

gk.bands = function (run, time) {
  const { x: xs, total } = run.bands;
  const state = { by: run.bands.module.length > 1 ? "module" : "line", open: null };
  const chart = gk.el("div", { class: "chart" });
  const caption = gk.el("p", { class: "caption" });
  const legend = gk.el("ul", { class: "legend", "aria-label": "Bands" });
  const spot = gk.el("div", {});
  const said = gk.el("p", { class: "unseen", role: "status" });
  const tip = gk.tip(chart);
  const choice = (by, name) => gk.el("button", {
    type: "button", "data-by": by, "aria-pressed": String(state.by === by), onclick: () => { state.by = by; close(false); draw(); },
  }, name);
  const buttons = [choice("module", "module"), choice("line", "line")];
  const table = gk.asTable("Graph bytes by band", () => [
    [[state.by === "module" ? "Module" : "Line"], ["At most", true], ["Last", true]],
    bands().map((band) => [name(band), gk.bytes(d3.max(band.v)), gk.bytes(band.v[band.v.length - 1])]),
  ]);
  const figure = gk.el(
    "figure", {},
    gk.el("h3", {}, "Graph bytes"), caption,
    gk.el("div", { class: "controls" }, gk.el("fieldset", {}, gk.el("legend", {}, "Bands by"), buttons)),
    chart, legend, spot, table, said,
  );

  const bands = () => run.bands[state.by];
  const key = (i) => (bands()[i].others ? "kx" : `k${i % 11}`);
  const name = (band) => band.name;
  const says = (band) => `${name(band)}: ${gk.bytes(d3.max(band.v))} at most, ${gk.bytes(band.v[band.v.length - 1])} last`;

  let opener = null; // what had the focus when the panel was opened

  function close(back = true) {
    const was = state.open;
    state.open = null;
    spot.replaceChildren();
    mark();
    if (back && was !== null) (opener?.isConnected ? opener : chart.querySelectorAll("path.band")[was])?.focus();
  }

  function open(i) {
    if (state.open === i) { close(); return; }
    state.open = i;
    opener = document.activeElement;
    const panel = gk.panel(`Lines of ${says(bands()[i])}`, gk.places(run, bands()[i].sites), () => close());
    spot.replaceChildren(panel);
    mark();
    panel.begin();
  }

  function mark() {
    // the legend begins with the uppermost band
    for (const group of [[...chart.querySelectorAll("path.band")], [...legend.querySelectorAll("button")].reverse()]) {
      group.forEach((one, i) => {
        one.setAttribute("aria-expanded", String(state.open === i));
        one.classList.toggle("dim", state.open !== null && state.open !== i);
      });
    }
  }

  function draw() {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.by === state.by)));
    const had = chart.contains(document.activeElement);
    const { width, height, left, right } = time.size(300);
    const [top, bottom] = [10, height - 26];
    const x = d3.scaleLinear(time.range, [left, width - right]);
    const shown = gk.visible(run.bands, time.range, width - left - right);
    const peaks = run.peaks.filter(([first, count]) => first + count > time.range[0] && first < time.range[1]);
    const most = Math.max(d3.max(shown.high, (i) => total[i]) || 0, d3.max(peaks, (p) => p[2]) || 0, 1);
    const y = d3.scaleLinear([0, most * 1.04], [bottom, top]);
    chart.querySelector("svg")?.remove();
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height).attr("role", "group")
      .attr("aria-label", `Graph bytes over steps, stacked by ${state.by}. Up and down move between bands, left and right through time, Enter shows a band's lines.`);
    chart.prepend(svg.node());
    const clip = `clip-b-${time.id}`;
    svg.append("clipPath").attr("id", clip).append("rect").attr("x", left).attr("y", 0).attr("width", width - left - right).attr("height", bottom);
    for (const tick of gk.byteTicks(most, 5)) {
      svg.append("line").attr("class", "grid").attr("x1", left).attr("x2", width - right).attr("y1", y(tick)).attr("y2", y(tick));
      svg.append("text").attr("x", left - 8).attr("y", y(tick) + 4).attr("text-anchor", "end").attr("aria-hidden", "true").text(gk.shortBytes(tick));
    }
    gk.steps(svg, run, x, top, bottom);
    const inside = svg.append("g").attr("clip-path", `url(#${clip})`);
    const ground = new Array(xs.length).fill(0);
    const drawn = bands().map((band) => {
      const points = shown.high.map((i) => [xs[i], ground[i], ground[i] + band.v[i], i]);
      band.v.forEach((value, i) => { ground[i] += value; });
      return points;
    });
    const area = d3.area().x((p) => x(p[0])).y0((p) => y(p[1])).y1((p) => y(p[2]));
    const paths = inside.selectAll("path").data(drawn).join("path").attr("d", area)
      .attr("class", (_, i) => `band ${key(i)}`).attr("role", "button").attr("aria-expanded", "false")
      .attr("aria-label", (_, i) => `${says(bands()[i])}. Show its lines`);
    if (shown.low) inside.append("path").attr("class", "left").attr("d", d3.line((i) => x(xs[i]), (i) => y(total[i]))(shown.low));
    const stairs = d3.line((p) => x(p[0]), (p) => y(p[1])).curve(d3.curveStepAfter);
    inside.append("path").attr("class", "peak").attr("d", stairs([...peaks.map((p) => [p[0], p[2]]), ...peaks.slice(-1).map((p) => [p[0] + p[1], p[2]])]));
    inside.selectAll(null).data(drawn).join("text").attr("class", "inside").attr("aria-hidden", "true").each(function (points, i) {
      label(d3.select(this), points, name(bands()[i]), x, y);
    });
    const cursor = svg.append("line").attr("class", "cursor").attr("y1", top).attr("y2", bottom).attr("visibility", "hidden");
    let now = shown.high.length - 1;

    function point(i, at, announce) {
      now = Math.max(0, Math.min(at, shown.high.length - 1));
      const sample = shown.high[now];
      const band = bands()[i];
      cursor.attr("x1", x(xs[sample])).attr("x2", x(xs[sample])).attr("visibility", "visible");
      const words = [time.when(xs[sample]), `${gk.bytes(band.v[sample])} of ${gk.bytes(total[sample])}`];
      const p = drawn[i][now];
      tip.show(x(p[0]), y(p[2]), name(band), ...words);
      if (announce) said.textContent = [name(band), ...words].join(", ");
    }
    const gone = () => { tip.hide(); cursor.attr("visibility", "hidden"); };
    paths.on("pointermove", (event, points) => {
      const at = x.invert(d3.pointer(event, svg.node())[0]);
      point(drawn.indexOf(points), d3.bisector((p) => p[0]).center(points, at), false);
    }).on("pointerleave", gone).on("blur", gone).on("focus", (_, points) => point(drawn.indexOf(points), now, false))
      .on("click", (_, points) => open(drawn.indexOf(points)));
    // the first band lies at the bottom, so that up is the next one
    gk.roving(paths.nodes(), (event, i) => {
      const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (turn) point(i, now + turn, true);
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        const next = paths.nodes()[i + (event.key === "ArrowUp" ? 1 : -1)];
        if (next) {
          paths.attr("tabindex", function () { return this === next ? "0" : "-1"; });
          next.focus();
        }
      }
      return turn || event.key === "ArrowUp" || event.key === "ArrowDown";
    });
    if (had) paths.nodes()[0]?.focus();
    words(shown);
    mark();
    table.fill();
  }

  /** A name on its own band, where that is thick enough for all of the name; else nowhere. */
  function label(text, points, name, x, y) {
    const room = 3.8 * name.length + 4;
    const [from, to] = x.range();
    const place = d3.bisector((p) => x(p[0])).left;
    const at = (px, k) => {
      const i = Math.max(1, Math.min(place(points, px), points.length - 1));
      const [a, b] = [points[i - 1], points[i]];
      const t = x(b[0]) === x(a[0]) ? 1 : Math.max(0, Math.min((px - x(a[0])) / (x(b[0]) - x(a[0])), 1));
      return y(a[k] + (b[k] - a[k]) * t);
    };
    let best = null;
    if (points.length > 1 && name.length <= 40) {
      const [first, last] = [Math.max(from, x(points[0][0])), Math.min(to, x(points[points.length - 1][0]))];
      for (let px = last - room; px >= first + room; px -= 8) {
        const spots = d3.range(px - room, px + room + 1, 4);
        const [bottom, top] = [d3.min(spots, (s) => at(s, 1)), d3.max(spots, (s) => at(s, 2))];
        if (bottom - top >= 16 && (!best || bottom - top > best.room + 2)) best = { px, room: bottom - top, y: (bottom + top) / 2 };
      }
    }
    if (best) text.attr("x", best.px).attr("y", best.y + 4).attr("text-anchor", "middle").text(name);
    else text.remove();
  }

  function words(shown) {
    const thinned = shown.low ? "The bands show what was held at most among neighbouring samples. " : "";
    caption.textContent = bands().length
      ? `${thinned}Choose a band to see its lines. Samples are taken when a backward begins and when a step ends.`
      : "No sample was taken.";
    legend.replaceChildren(
      ...bands().map((band, i) => gk.el("li", {}, gk.el(
        "button", { type: "button", "aria-expanded": "false", onclick: () => open(i) },
        gk.el("span", { class: `key ${key(i)}` }), `${name(band)} `, gk.el("small", {}, gk.bytes(d3.max(band.v))),
      ))).reverse(),
    );
    const line = (kind, text) => gk.el("li", {}, gk.el("small", {}, gk.el("span", { class: `key ${kind}` }), text));
    if (shown.low) legend.append(line("solid", "least held in between"));
    if (run.peaks.length) legend.append(line("dashed", "most held within a step"));
  }

  time.draws.push(draw);
  return figure;
};
