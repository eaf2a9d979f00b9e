"use strict";
/* What every part uses: elements, numbers, source lines, a tooltip, and moving among marks by arrow keys.
   Text of the watched program gets into the page by textContent only. */
const gk = {};

/** An element; `props` are attributes, `on…` are listeners, children are nodes or texts. */
gk.el = function (tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
};

gk.bytes = function (count) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < 4 && count >= 1024 ** (power + 1)) power += 1;
  return power ? `${(count / 1024 ** power).toFixed(1)} ${names[power]}` : `${count} B`;
};

gk.count = (number) => number.toLocaleString("en-US");
gk.many = (number, one) => `${gk.count(number)} ${one}${number === 1 ? "" : "s"}`;
gk.cut = (text, length) => (text.length > length ? text.slice(0, Math.max(length - 1, 1)) + "…" : text);

/** What stands between backticks as code. */
gk.code = (text) =>
  text.split(/(`[^`]+`)/).map((part) => (/^`[^`]+`$/.test(part) ? gk.el("code", {}, part.slice(1, -1)) : part));

/** A run's data, with its sites by id. */
gk.load = function (element) {
  const run = JSON.parse(element.textContent);
  const names = ["id", "file", "line", "function", "module", "op", "tensors", "bytes", "live", "byBackward", "byCount", "peak", "end"];
  run.sites = new Map(run.sites.map((row) => [row[0], Object.fromEntries(names.map((name, i) => [name, row[i]]))]));
  run.place = (site) => (site ? `${Object.hasOwn(run.short, site.file) ? run.short[site.file] : site.file}:${site.line}` : "a line not on this page");
  run.at = (id) => run.place(run.sites.get(id));
  return run;
};

/** The source lines around a place, or null. */
gk.source = function (run, file, line) {
  const all = Object.hasOwn(run.source, file) ? run.source[file] : null;
  if (!all || !Object.hasOwn(all, line)) return null;
  const pre = gk.el("pre", { class: "source", tabindex: "0", role: "region", "aria-label": `Source around line ${line}` });
  for (let i = line - 4; i <= line + 4; i += 1) {
    if (!Object.hasOwn(all, i)) continue;
    pre.append(gk.el(i === line ? "mark" : "span", { class: "line" }, gk.el("span", { class: "n" }, String(i)), all[i] + "\n"));
  }
  return pre;
};

/** Sites as a list of lines, each with its figures and its source; sites of one line are one entry. */
gk.places = function (run, ids, most = 20) {
  const lines = new Map();
  for (const site of ids.map((id) => run.sites.get(id)).filter(Boolean)) {
    const key = `${site.file}:${site.line}`;
    if (!lines.has(key)) lines.set(key, { ...site, modules: new Set(), bytes: 0, tensors: 0, peak: 0, end: 0 });
    const line = lines.get(key);
    for (const name of ["bytes", "tensors", "peak", "end"]) line[name] += site[name];
    if (site.module) line.modules.add(site.module);
  }
  const found = [...lines.values()].sort((a, b) => b.peak + b.end - a.peak - a.end || b.bytes - a.bytes);
  const list = gk.el("ol", { class: "places" });
  for (const line of found.slice(0, most)) {
    const within = [`in ${line.function}()`, ...(line.modules.size ? [`of ${[...line.modules].join(", ")}`] : [])].join(" ");
    const sums = `${gk.bytes(line.peak)} at the peak, ${gk.bytes(line.end)} last; ${gk.bytes(line.bytes)} saved in all, in ${gk.many(line.tensors, "tensor")}`;
    list.append(
      gk.el(
        "li", {},
        gk.el("p", { class: "sum" }, gk.el("code", {}, run.place(line)), ` ${within} `, gk.el("small", {}, sums)),
        gk.source(run, line.file, line.line) || gk.el("p", { class: "caption" }, "The data file has no source of this line."),
      ),
    );
  }
  if (found.length > most) list.append(gk.el("li", { class: "caption" }, `and ${gk.many(found.length - most, "line")} more`));
  if (!found.length) list.append(gk.el("li", { class: "caption" }, "None of its lines is on this page."));
  return list;
};

/** A panel below a chart; Escape or its button closes it and gives the focus back. */
gk.panel = function (title, content, closed) {
  const heading = gk.el("h4", { tabindex: "-1" }, title);
  const panel = gk.el(
    "section", { class: "panel", "aria-label": title, onkeydown: (event) => event.key === "Escape" && closed() },
    gk.el("header", {}, heading, gk.el("button", { type: "button", "aria-label": `Close: ${title}`, onclick: closed }, "Close")),
    content,
  );
  panel.begin = () => heading.focus({ preventScroll: false });
  return panel;
};

/** A tooltip within a chart. What it says is also in the mark's name, so assistive technology skips it. */
gk.tip = function (chart) {
  const tip = chart.appendChild(gk.el("div", { class: "tip", hidden: true, "aria-hidden": "true" }));
  return {
    show(x, y, title, ...lines) {
      tip.replaceChildren(gk.el("b", {}, title), ...lines.map((line) => gk.el("div", {}, line)));
      tip.hidden = false;
      const [width, height] = [tip.offsetWidth, tip.offsetHeight];
      tip.style.left = `${Math.max(0, Math.min(x + 14, chart.clientWidth - width))}px`;
      tip.style.top = `${y - height - 12 < 0 ? y + 16 : y - height - 12}px`;
    },
    hide: () => (tip.hidden = true),
  };
};

/** One stop for the Tab key among many marks; arrow keys move between them, Home and End to the ends. */
gk.roving = function (marks, onkey) {
  marks.forEach((mark, i) => {
    mark.setAttribute("tabindex", i ? "-1" : "0");
    mark.addEventListener("keydown", (event) => {
      const to = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (onkey && onkey(event, i)) event.preventDefault();
      else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        mark.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      } else if (to !== undefined) {
        event.preventDefault();
        const next = marks[Math.max(0, Math.min(to, marks.length - 1))];
        marks.forEach((other) => other.setAttribute("tabindex", other === next ? "0" : "-1"));
        next.focus();
      }
    });
  });
};

/** A table; a column is [title, is a number]. */
gk.table = function (label, columns, rows) {
  const head = columns.map(([title, num]) => gk.el("th", { scope: "col", class: num ? "num" : null }, title));
  const body = rows.map((row) =>
    gk.el("tr", {}, row.map((cell, i) => gk.el(i ? "td" : "th", { scope: i ? null : "row", class: columns[i][1] ? "num" : null }, cell))));
  return gk.el(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    gk.el("table", {}, gk.el("thead", {}, gk.el("tr", {}, head)), gk.el("tbody", {}, body)),
  );
};

/** "Show as table": what a chart shows, made when it is opened. */
gk.asTable = function (label, make) {
  const details = gk.el("details", { class: "as-table" }, gk.el("summary", {}, "Show as table"));
  details.fill = () => {
    details.querySelector(".scroll")?.remove();
    if (details.open) details.append(gk.table(label, ...make()));
  };
  details.addEventListener("toggle", details.fill);
  return details;
};

/** The axis of steps below a chart, with every step marked where there is room. */
gk.steps = function (svg, run, x, top, bottom) {
  const [from, to] = x.domain();
  const width = x(to) - x(from);
  if (from < 0) {
    svg.append("rect").attr("class", "before").attr("x", x(from)).attr("y", top).attr("width", x(Math.min(0, to)) - x(from)).attr("height", bottom - top);
    if (x(0) - x(from) > 150) svg.append("text").attr("x", x(from) + 6).attr("y", top + 14).text("before the first step");
  }
  if (run.steps && to - from <= width / 9) {
    const inside = d3.range(Math.ceil(Math.max(from, 0)), Math.floor(to) + 1);
    svg.append("g").selectAll("line").data(inside).join("line").attr("class", "grid step")
      .attr("x1", (d) => x(d)).attr("x2", (d) => x(d)).attr("y1", top).attr("y2", bottom);
  }
  const ticks = run.steps ? x.ticks(Math.max(2, Math.floor(width / 80))).filter((t) => Number.isInteger(t) && t >= 0) : [];
  const group = svg.append("g").attr("aria-hidden", "true");
  group.append("line").attr("class", "axis").attr("x1", x(from)).attr("x2", x(to)).attr("y1", bottom).attr("y2", bottom);
  group.selectAll("path").data(ticks).join("path").attr("class", "axis tick").attr("d", (d) => `M${x(d)},${bottom}v5`);
  group.selectAll("text").data(ticks).join("text").attr("x", (d) => x(d)).attr("y", bottom + 18)
    .attr("text-anchor", (d) => (x(d) > x(to) - 24 ? "end" : "middle")).text((d, i) => (i ? "" : "step ") + gk.count(d));
};
