"use strict";
/* Saved tensors by line, module or op: filter, sort, and the source in place. */

gk.saved = function (run, label) {
  const most = 100;
  const kinds = {
    line: { title: "Line", one: "line", of: (site) => run.place(site), key: (site) => `${site.file}:${site.line}` },
    module: { title: "Module", one: "module", of: (site) => site.module || "(no module)" },
    op: { title: "Op", one: "op", of: (site) => site.op || "(not asked)" },
  };
  const columns = [["tensors", "Tensors"], ["bytes", "Saved"], ["peak", "At the peak"], ["live", "Held last"], ["byBackward", "Freed by backward"], ["byCount", "by count"]];
  const state = { by: "line", sort: [...run.sites.values()].some((site) => site.bytes) ? "bytes" : "peak", up: false, all: false };
  const filter = gk.el("input", { type: "search", placeholder: "file, function, module, op", oninput: () => draw() });
  const status = gk.el("span", { class: "caption", role: "status" });
  const buttons = Object.entries(kinds).map(([by, kind]) => gk.el(
    "button", { type: "button", "data-by": by, onclick: () => { state.by = by; draw(); } }, kind.one));
  const heads = new Map();
  const body = gk.el("tbody", {});
  const more = gk.el("button", { type: "button", onclick: () => { state.all = true; draw(); } });
  for (const [key, title] of [["name", ""], ...columns]) {
    const button = gk.el("button", { type: "button", onclick: () => sort(key) }, title);
    heads.set(key, gk.el("th", { scope: "col", class: key === "name" ? null : "num" }, button));
  }
  const table = gk.el("table", {}, gk.el("thead", {}, gk.el("tr", {}, [...heads.values()])), body);

  function sort(key) {
    state.up = state.sort === key ? !state.up : key === "name";
    state.sort = key;
    draw();
  }

  function rows() {
    const kind = kinds[state.by];
    const found = new Map();
    for (const site of run.sites.values()) {
      if (!site.tensors && !site.bytes && !site.peak && !site.end) continue;
      const key = (kind.key || kind.of)(site);
      if (!found.has(key)) found.set(key, { name: kind.of(site), ids: [], words: new Set(), file: site.file, line: site.line, ...Object.fromEntries(columns.map(([c]) => [c, 0])) });
      const row = found.get(key);
      row.ids.push(site.id);
      for (const word of [site.function, site.module, site.op, run.place(site)]) if (word) row.words.add(word);
      for (const [column] of columns) row[column] += site[column];
    }
    return [...found.values()];
  }

  function draw() {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.by === state.by)));
    heads.get("name").firstChild.textContent = kinds[state.by].title;
    for (const [key, head] of heads) {
      if (key === state.sort) head.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    const all = rows();
    const wanted = filter.value.trim().toLowerCase();
    const kept = all.filter((row) => [...row.words].some((word) => word.toLowerCase().includes(wanted)));
    const order = state.sort === "name" ? (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }) : (a, b) => a[state.sort] - b[state.sort] || b.bytes - a.bytes;
    kept.sort((a, b) => (state.up ? order(a, b) : order(b, a)));
    const shown = state.all ? kept : kept.slice(0, most);
    body.replaceChildren(...shown.map(line));
    more.hidden = shown.length === kept.length;
    more.textContent = `Show all ${gk.count(kept.length)}`;
    status.textContent = wanted ? `${gk.count(kept.length)} of ${gk.many(all.length, kinds[state.by].one)}` : gk.many(all.length, kinds[state.by].one);
  }

  function line(row) {
    const button = gk.el("button", { type: "button", "aria-expanded": "false", onclick: () => toggle(row, button) }, gk.el("code", {}, row.name));
    const others = [...row.words].filter((word) => word !== row.name);
    const small = state.by === "line" ? gk.el("small", {}, " " + gk.cut(others.join(", "), 90)) : null;
    const cells = columns.map(([key]) => gk.el("td", { class: "num" }, ["bytes", "live", "peak"].includes(key) ? gk.bytes(row[key]) : gk.count(row[key])));
    return gk.el("tr", {}, gk.el("th", { scope: "row" }, button, small), cells);
  }

  function toggle(row, button) {
    const tr = button.closest("tr");
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) tr.nextElementSibling.remove();
    else tr.after(gk.el("tr", { class: "detail" }, gk.el("td", { colspan: String(columns.length + 1) }, gk.places(run, row.ids, 12))));
  }

  draw();
  return gk.el(
    "div", {},
    gk.el(
      "div", { class: "controls" },
      gk.el("fieldset", {}, gk.el("legend", {}, "Rows by"), buttons), gk.el("label", {}, "Filter ", filter), status,
    ),
    run.sites_left ? gk.el("p", { class: "caption" }, `${gk.many(run.sites_left, "more place")} with the fewest bytes are not on this page.`) : null,
    gk.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table),
    more,
  );
};
