"use strict";
/* The page: which rank is shown, light or dark, and the range of steps that both charts share. */

/** What the charts of one run share: the range of steps, sizes, and words for moments. */
gk.time = function (run, id, root) {
  const whole = [run.first, run.last];
  const time = { id, range: whole, draws: [] };
  const bound = (value) => Math.max(run.first, Math.min(value, run.last));
  time.number = (x) => (run.steps ? (x < 0 ? "before 0" : d3.format(",.4~f")(Math.round(x * 100) / 100)) : d3.format(".0%")(x));
  time.when = (x) => (run.steps ? (x < 0 ? "before the first step" : `step ${time.number(Math.min(Math.floor(x), run.steps - 1))}`) : `${time.number(x)} of all saved tensors`);
  time.size = (height) => {
    const width = Math.max(root.clientWidth, 240);
    return { width, height: Math.min(height, Math.max(220, width * 0.6)), left: width < 560 ? 58 : 68, right: 10 };
  };
  time.draw = () => time.draws.forEach((draw) => draw());
  time.set = (from, to, drawBrush = true) => {
    const least = run.steps ? Math.min(1, run.last - run.first) : 0.01;
    let [low, high] = [bound(Math.min(from, to)), bound(Math.max(from, to))];
    if (high - low < least) [low, high] = [Math.min(low, run.last - least), Math.min(low, run.last - least) + least];
    time.range = [low, high];
    fields.forEach((field, i) => { field.value = String(Math.round(time.range[i] * 100) / 100); });
    if (drawBrush) place();
    time.draw();
  };
  const field = (i, text) => {
    const input = gk.el("input", { type: "number", min: run.first, max: run.last, step: run.steps ? "1" : "any" });
    input.addEventListener("change", () => {
      const value = Number(input.value);
      const other = time.range[1 - i];
      time.set(...(i ? [other, Number.isFinite(value) && input.value ? value : run.last] : [Number.isFinite(value) && input.value ? value : run.first, other]));
    });
    return [input, gk.el("label", {}, `${text} `, input)];
  };
  const made = [field(0, run.steps ? "Steps from" : "From"), field(1, "to")];
  const fields = made.map(([input]) => input);
  const overview = gk.el("div", { class: "chart overview", "aria-hidden": "true" });
  let place = () => {};

  /** All of the run in a narrow strip; dragging over it chooses a range, as the two fields do. */
  function strip() {
    const { width, left, right } = time.size(0);
    const height = 34;
    const x = d3.scaleLinear(whole, [left, width - right]);
    const y = d3.scaleLinear([0, d3.max(run.bands.total) || 1], [height, 2]);
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height);
    const shown = gk.visible(run.bands, whole, width);
    svg.append("path").attr("d", d3.area((i) => x(run.bands.x[i]), height, (i) => y(run.bands.total[i]))(shown.high));
    const brush = d3.brushX().extent([[left, 0], [width - right, height]]).on("brush end", (event) => {
      if (!event.sourceEvent) return;
      if (event.selection) time.set(...event.selection.map(x.invert), false);
      else if (event.type === "end") time.set(...whole);
    });
    const group = svg.append("g").call(brush);
    overview.replaceChildren(svg.node());
    place = () => {
      const all = time.range[0] === run.first && time.range[1] === run.last;
      group.call(brush.move, all ? null : time.range.map(x));
    };
    place();
  }
  const quick = (text, from) => gk.el("button", { type: "button", onclick: () => time.set(from, run.last) }, text);
  root.append(
    gk.el("div", { class: "controls" }, made.map(([, label]) => label), quick("All", run.first), run.steps > 40 ? quick("Last 20", run.steps - 20) : null),
    overview, gk.bands(run, time), gk.lives(run, time),
  );
  time.resize = () => { strip(); time.draw(); };
  return time;
};

gk.show = function (section) {
  if (section.started) return;
  section.started = true;
  const run = gk.load(section.querySelector("script[type='application/json']"));
  const root = section.querySelector("[data-part='time']");
  if (run.bands.x.length || run.lives.bars.length || run.alive.holders.length) {
    const time = gk.time(run, section.id, root);
    time.set(run.first, run.last, false);
    let width = 0;
    new ResizeObserver(() => {
      if (!root.clientWidth || root.clientWidth === width) return;
      width = root.clientWidth;
      time.resize();
    }).observe(root);
  } else root.append(gk.el("p", { class: "lead" }, "Nothing was recorded over time."));
  const place = section.querySelector("[data-part='table']");
  if (run.sites.size) place.replaceChildren(gk.saved(run, "Saved tensors"));
};

gk.start = function () {
  const root = document.documentElement;
  root.classList.add("js");
  const sections = [...document.querySelectorAll(".run")];
  const rank = document.getElementById("rank");
  const choose = (index) => {
    sections.forEach((section, i) => { section.hidden = i !== index; });
    if (sections[index]) gk.show(sections[index]);
  };
  rank?.addEventListener("change", () => choose(rank.selectedIndex));
  choose(Math.max(rank?.selectedIndex ?? 0, 0));

  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const said = () => theme.setAttribute("aria-pressed", String(dark()));
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; said(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", said);
  said();

  // in a frame made of a text, a link to a part of the page would lead to the page around it
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
};

gk.start();
