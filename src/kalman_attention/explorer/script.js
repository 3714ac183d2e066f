"use strict";

const SCORES = {
  nll: {
    name: "Surprise", unit: "nats",
    what: "How unlikely the token was, given those before it: minus the log of its probability.",
  },
  entropy: {
    name: "Entropy", unit: "nats",
    what: "How uncertain the model was before it saw the token. It does not depend on the token itself.",
  },
  max_prob: {
    name: "Top probability", unit: "",
    what: "Probability of the most likely token at this position, right or wrong.",
  },
  log_variance: {
    name: "Log-variance", unit: "", layered: true,
    what: "How uncertain the layer is about its read-out after the token. It depends on how much was observed, never on the values.",
  },
  gain: {
    name: "Gain", unit: "", layered: true,
    what: "Share of the layer's state that this token replaced, mean over channels and slots.",
  },
};
const view = { data: null, score: "nll", layer: -1, channel: null, here: null, pinned: null, known: null };
const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 10000)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/* The filter of one channel, in the letters of the paper. */

function numbers(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function unpack(layer) {
  for (const name of ["q", "k", "precision", "decay", "noise", "variance0", "steps"])
    if (typeof layer[name] === "string") layer[name] = numbers(layer[name]);
}

function runFilter(layer, d) {
  const { slots: N, blocks: G, channels: D, k, q, precision, decay, noise, variance0, steps } = layer;
  const m = N / G, T = precision.length / D;
  const run = { keep: new Float64Array(T * G), s: new Float64Array(T * G), gain: [], variance: [] };
  for (let g = 0; g < G; g++) {
    let s = variance0[g * D + d];
    for (let t = 0; t < T; t++) {
      let a = decay[g * D + d], p = noise[g * D + d];
      if (steps) {
        const gap = steps.length === T ? steps[t] : steps[t * D + d], x = 2 * Math.log(a);
        p *= x === 0 ? gap : Math.expm1(x * gap) / Math.expm1(x);
        a = Math.exp(0.5 * x * gap);
      }
      let norm = 0, asked = 0;
      for (let n = g * m; n < (g + 1) * m; n++) {
        norm += k[t * N + n] ** 2;
        asked += q[t * N + n] ** 2;
      }
      const P = a * (a * s) + p, r = 1 / (1 + norm * precision[t * D + d] * P);
      s = r * P;
      run.keep[t * G + g] = r * a;
      run.s[t * G + g] = s;
      run.gain[t] = (run.gain[t] || 0) + (1 - r) / G;
      run.variance[t] = (run.variance[t] || 0) + asked * s;
    }
  }
  return run;
}

/* Weight of the value of each token in the read-out at token t: the mean is linear in the values. */
function weightsOf(layer, d, t) {
  const { slots: N, blocks: G, channels: D, k, q, precision } = layer;
  const m = N / G, run = runFilter(layer, d), kept = new Float64Array(G).fill(1);
  const found = new Float64Array(t + 1);
  for (let s = t; s >= 0; s--) {
    let sum = 0;
    for (let n = 0; n < N; n++) {
      const g = Math.floor(n / m);
      sum += q[t * N + n] * k[s * N + n] * run.s[s * G + g] * kept[g];
    }
    found[s] = sum * precision[s * D + d];
    for (let g = 0; g < G; g++) kept[g] *= run.keep[s * G + g];
  }
  return found;
}

function weightsAt(t) {
  const layer = view.data.layers[view.layer], key = [view.layer, view.channel, t].join();
  if (!layer || !layer.channels) return null;
  if (view.known?.key === key) return view.known;
  let values = new Float64Array(t + 1);
  if (view.channel !== null) values = weightsOf(layer, view.channel, t);
  else
    for (let d = 0; d < layer.channels; d++)
      weightsOf(layer, d, t).forEach((w, s) => { values[s] += Math.abs(w) / layer.channels; });
  const most = Math.max(...values.map(Math.abs)) || 1;
  view.known = { key, values, most, signed: view.channel !== null };
  return view.known;
}

/* Display. */

function scoreValues(key) {
  if (!SCORES[key].layered) return view.data.scores[key];
  const layer = view.data.layers[view.layer];
  return layer && layer[key] ? layer[key] : view.data.tokens.map(() => null);
}

function rangeOf(values) {
  const known = values.filter((x) => x !== null && Number.isFinite(x)).sort((a, b) => a - b);
  if (!known.length) return [0, 1];
  const at = (share) => known[Math.round(share * (known.length - 1))];
  const [low, high] = [at(0.02), at(0.98)];
  return high > low ? [low, high] : [low - 0.5, low + 0.5];
}

function nodes() { return [...find("text").querySelectorAll(".token")]; }

function clip(x) { return Math.min(1, Math.max(0, x)); }

function paint() {
  const values = scoreValues(view.score), [low, high] = rangeOf(values);
  const read = view.pinned === null ? null : weightsAt(view.pinned);
  nodes().forEach((node, i) => {
    let t = 0, negative = false;
    if (read) {
      const w = i <= view.pinned ? read.values[i] : 0;
      t = Math.abs(w) / read.most;
      negative = w < 0;
    } else if (values[i] !== null) t = clip((values[i] - low) / (high - low));
    node.style.setProperty("--t", t.toFixed(3));
    node.classList.toggle("negative", negative);
    node.classList.toggle("after", view.pinned !== null && i > view.pinned);
    node.classList.toggle("pinned", i === view.pinned);
    node.classList.toggle("here", i === view.here && i !== view.pinned);
    node.setAttribute("aria-pressed", String(i === view.pinned));
    node.setAttribute("aria-label", spoken(i, read, values));
  });
  legend(values, low, high, read);
}

function spoken(i, read, values) {
  const said = `${i}: ${view.data.tokens[i].trim() || "blank"}`;
  if (read) return i <= view.pinned ? `${said}, weight ${short(read.values[i])}` : said;
  return `${said}, ${SCORES[view.score].name.toLowerCase()} ${short(values[i])}`;
}

function legend(values, low, high, read) {
  const { name, unit, what } = SCORES[view.score], ticks = find("ticks");
  find("ramp").classList.toggle("signed", Boolean(read && read.signed));
  const known = values.filter((x) => x !== null);
  const below = Math.min(...known) < low ? "≤ " : "", above = Math.max(...known) > high ? "≥ " : "";
  let shown = [below + short(low), `${short((low + high) / 2)}${unit && ` ${unit}`}`, above + short(high)];
  if (read) shown = [read.signed ? -read.most : 0, read.signed ? 0 : read.most / 2, read.most].map(short);
  ticks.replaceChildren(...shown.map((text) => make("span", {}, text)));
  const where = view.channel === null ? "mean magnitude over channels" : `channel ${view.channel}`;
  const said = `Weight of each token in the read-out at token ${view.pinned}: layer ${view.layer}, ${where}.`;
  find("what").replaceChildren(view.pinned === null ? what : read ? said : "This layer has no weights to show.");
  if (view.pinned !== null) {
    const back = make("button", { type: "button", class: "back" }, `Back to ${name.toLowerCase()}`);
    back.addEventListener("click", release);
    find("what").append(" ", back);
  }
  find("legend").setAttribute("aria-label", `${read ? "Weight" : name}: ${shown.join(", ")}`);
}

function overview() {
  const values = scoreValues(view.score), [low, high] = rangeOf(values), T = values.length, H = 40;
  const y = (x) => H - clip((x - low) / (high - low)) * (H - 3);
  const bars = values.map((x, i) => (x === null ? "" : `M${i} ${H}V${y(x).toFixed(2)}H${i + 0.9}V${H}Z`)).join("");
  const smooth = [];
  for (let i = 0; i < T; i++) {
    const near = values.slice(Math.max(0, i - 7), i + 8).filter((x) => x !== null);
    if (values[i] !== null) smooth.push(`${i + 0.5} ${y(near.reduce((a, b) => a + b) / near.length).toFixed(2)}`);
  }
  const picture = make("svg", { viewBox: `0 0 ${T} ${H}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${SCORES[view.score].name} over the text, each token and the mean of 15` },
  make("path", { class: "bars", d: bars }), make("path", { class: "mean", d: smooth.length ? `M${smooth.join("L")}` : "" }));
  if (view.here !== null) picture.append(cursor(view.here + 0.5, H));
  picture.addEventListener("click", (event) => {
    const box = picture.getBoundingClientRect();
    pin(Math.min(T - 1, Math.floor(((event.clientX - box.left) / box.width) * T)));
  });
  find("overview").replaceChildren(picture);
}

function cursor(x, height) { return make("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: height }); }

function plot(name, values, i) {
  const known = values.filter(Number.isFinite), low = Math.min(...known), high = Math.max(...known);
  const H = 40, span = high - low || 1, y = (x) => H - 2 - ((x - low) / span) * (H - 4);
  const d = values.map((x, t) => `${t ? "L" : "M"}${t + 0.5} ${y(x).toFixed(2)}`).join("");
  const range = `${short(low)} to ${short(high)}`;
  return make("figure", { class: "plot" },
    make("figcaption", {}, make("span", {}, name, " ", make("b", {}, short(values[i]))), make("span", {}, range)),
    make("svg", { viewBox: `0 0 ${values.length} ${H}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${name} over the tokens, ${range}; ${short(values[i])} here` },
    make("path", { class: "line", d }), cursor(i + 0.5, H)));
}

function bars(rows, most) {
  return make("ol", { class: "list" }, ...rows.map(({ name, value, right, place }) => {
    const label = make("span", { class: "name" }, ...named(name));
    if (place !== undefined) label.append(make("small", {}, ` ${place}`));
    const fill = make("span", { class: value < 0 ? "fill negative" : "fill" });
    fill.style.width = `${(100 * Math.abs(value)) / most}%`;
    return make("li", right ? { class: "right" } : {}, label,
      make("span", { class: "track" }, fill), make("span", { class: "value" }, short(value)));
  }));
}

/* A leading space belongs to a token and is hard to see, so it is shown as a faint dot. */
function named(text) {
  const shown = text.replaceAll("\n", "↵").replaceAll("\t", "⇥"), bare = shown.replace(/^ +/, "");
  const lead = "·".repeat(shown.length - bare.length);
  return lead ? [make("span", { class: "space" }, lead), bare] : [bare || "…"];
}

function panel() {
  const i = view.here ?? view.pinned, { data } = view, box = find("panel");
  document.body.classList.toggle("open", i !== null);
  if (i === null) {
    box.replaceChildren(...guide());
    return;
  }
  const head = make("div", { class: "head" }, make("b", {}, ...named(data.tokens[i])),
    make("span", {}, `token ${i} of ${data.tokens.length - 1}`));
  const close = make("button", { type: "button", "aria-label": "Close" }, "×");
  close.addEventListener("click", release);
  head.append(close);
  const grid = make("dl", { class: "numbers" });
  for (const [key, { name }] of Object.entries(SCORES)) {
    const value = scoreValues(key)[i];
    if (value !== null && value !== undefined) grid.append(make("div", {}, make("dt", {}, name), make("dd", {}, short(value))));
  }
  box.replaceChildren(head, grid, ...predicted(i), ...readFrom(i));
}

function guide() {
  const about = make("dl", { class: "guide" });
  for (const [key, { name, what }] of Object.entries(SCORES))
    if (!SCORES[key].layered || view.layer >= 0) about.append(make("dt", {}, name), make("dd", {}, what));
  return [make("p", { class: "note" }, "Hover or focus a token to see what was predicted. Click it, or press Enter, to see what it reads from; arrow keys move, Escape closes."), about];
}

function predicted(i) {
  const { data } = view, rows = data.top[i], wanted = data.wanted[i];
  if (!rows.length) return [];
  const text = data.kind === "text";
  const title = text ? "Predicted in its place" : wanted === null ? "Predicted after it (not scored)" : "Predicted after it";
  const list = rows.map(([name, value]) => ({ name, value, right: name === wanted }));
  if (wanted !== null && !list.some((row) => row.right)) {
    list.pop();
    list.push({ name: wanted, value: Math.exp(-data.scores.nll[i]), right: true });
  }
  return [make("h2", {}, title), bars(list, 1)];
}

function readFrom(i) {
  const layer = view.data.layers[view.layer];
  if (!layer || !layer.channels)
    return [make("p", { class: "note" }, layer
      ? `Layer ${view.layer} is ${layer.kind}: it has no posterior, so it has no variance, gain or Kalman weights.`
      : "No layer of this model is KLA: there is no variance, gain or Kalman weight.")];
  const parts = [], at = view.pinned ?? i, where = view.channel === null ? "mean" : `channel ${view.channel}`;
  if (view.pinned !== null) {
    const { values, most } = weightsAt(at);
    const order = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, 5);
    const rows = order.map((s) => ({ name: view.data.tokens[s], value: values[s], right: s === at, place: s }));
    parts.push(make("h2", {}, `Token ${at} reads from (layer ${view.layer}, ${where})`), bars(rows, most));
  }
  const run = view.channel === null ? null : runFilter(layer, view.channel);
  parts.push(make("h2", {}, `Posterior over time (layer ${view.layer}, ${where})`),
    plot("Gain", run ? run.gain : layer.gain, i),
    plot("Log-variance", run ? run.variance.map(Math.log) : layer.log_variance, i));
  return parts;
}

/* Interaction. */

function show(i) {
  view.here = i;
  nodes().forEach((node, j) => node.classList.toggle("here", j === i && j !== view.pinned));
  overview();
  panel();
}

function pin(i) {
  view.pinned = i;
  view.here = i;
  rove(i);
  refresh();
  reveal(nodes()[i]);
  find("status").textContent = `Token ${i} pinned: ${view.data.tokens[i].trim()}`;
}

/* Scroll only if the token is not visible: above, below, or under the panel of a small screen. */
function reveal(node) {
  const sheet = find("panel"), bar = document.querySelector(".bar"), box = node.getBoundingClientRect();
  const floor = getComputedStyle(sheet).position === "fixed" ? sheet.getBoundingClientRect().top : innerHeight;
  const ceiling = getComputedStyle(bar).position === "sticky" ? bar.getBoundingClientRect().bottom : 0;
  if (box.top < ceiling || box.bottom > floor) scrollBy(0, box.top - ceiling - 0.35 * (floor - ceiling));
}

function release() {
  view.pinned = null;
  view.here = null;
  refresh();
  find("status").textContent = "Nothing pinned";
}

function refresh() { paint(); overview(); panel(); }

function rove(i, focus = false) {
  nodes().forEach((node, j) => { node.tabIndex = j === i ? 0 : -1; });
  if (focus) nodes()[i].focus();
}

function lineAway(i, direction) {
  const all = nodes(), from = all[i].getBoundingClientRect(), x = from.left + from.width / 2;
  let best = i, line = null, distance = Infinity;
  for (let j = i + direction; j >= 0 && j < all.length; j += direction) {
    const box = all[j].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 4) break;
    const away = Math.abs(box.left + box.width / 2 - x);
    if (away < distance) [best, distance] = [j, away];
  }
  return best;
}

function onKey(event) {
  const i = Number(event.target.dataset.i), last = view.data.tokens.length - 1;
  if (Number.isNaN(i)) return;
  const moves = {
    ArrowRight: () => Math.min(last, i + 1), ArrowLeft: () => Math.max(0, i - 1),
    ArrowDown: () => lineAway(i, 1), ArrowUp: () => lineAway(i, -1), Home: () => 0, End: () => last,
  };
  if (event.key in moves) rove(moves[event.key](), true);
  else if (event.key === "Enter" || event.key === " ") pin(i);
  else return;
  event.preventDefault();
}

function fill(data) {
  for (const layer of data.layers) unpack(layer);
  Object.assign(view, { data, here: null, pinned: null, channel: null });
  view.layer = data.layers.findLastIndex((layer) => layer.channels);
  find("title").textContent = data.title;
  find("model").textContent = `${data.model} · ${data.about}`;
  const known = data.scores.nll.filter((x) => x !== null);
  const mean = known.reduce((a, b) => a + b, 0) / Math.max(1, known.length);
  const facts = { "mean surprise": `${short(mean)} nats`, perplexity: short(Math.exp(mean)) };
  find("facts").replaceChildren(...Object.entries(facts).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const offered = Object.keys(SCORES).filter((key) => !SCORES[key].layered || view.layer >= 0);
  if (!offered.includes(view.score)) view.score = "nll";
  find("score").replaceChildren(...offered.map((key) => make("option", { value: key }, SCORES[key].name)));
  find("score").value = view.score;
  find("layer").replaceChildren(...data.layers.map((layer, i) => make("option", { value: i }, `${i} · ${layer.kind}`)));
  find("layer").value = view.layer < 0 ? 0 : view.layer;
  const width = view.layer < 0 ? 0 : data.layers[view.layer].channels;
  Object.assign(find("channel"), { value: "", max: Math.max(0, width - 1), disabled: !width });
  find("text").classList.toggle("task", data.kind === "task");
  find("text").replaceChildren(...data.tokens.map(token));
  rove(0);
  refresh();
}

function token(text, i) {
  const { data } = view, special = data.kind === "text" && i === 0;
  const asked = data.kind === "task" && data.wanted[i] !== null;
  const node = make("span", { class: `token${special ? " special" : ""}${asked ? " asked" : ""}`, role: "button", "data-i": i });
  // The space before a word stays uncoloured and outside the token, so that a line may break there.
  const bare = text.replace(/^ +(?=\S)/, ""), ink = make("span", { class: "ink" });
  (bare || "·").split("\n").forEach((part, j) => {
    if (j) ink.append(make("span", { class: "break", "aria-hidden": "true" }, "↵"), "\n");
    ink.append(part);
  });
  node.append(text.slice(0, text.length - bare.length), ink);
  return node;
}

async function readTyped() {
  const problem = find("problem");
  problem.textContent = "Reading …";
  try {
    const answer = await fetch("look", {
      method: "POST", headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ text: find("typed").value }),
    });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    fill(found);
    problem.textContent = "";
  } catch (error) {
    problem.textContent = error.message;
  }
}

function start() {
  const text = find("text"), place = (event) => event.target.closest(".token");
  // On a small screen the panel covers the text: there it opens on a tap, not on hover.
  const hovers = matchMedia("(hover: hover) and (min-width: 901px)");
  text.addEventListener("mouseover", (event) => {
    if (hovers.matches && place(event)) show(Number(place(event).dataset.i));
  });
  text.addEventListener("mouseleave", () => { if (hovers.matches) show(view.pinned); });
  text.addEventListener("focusin", (event) => {
    // Ignore focus caused by a click: anything that appeared now would catch the end of the click.
    if (event.target.matches(".token:focus-visible")) show(Number(event.target.dataset.i));
  });
  text.addEventListener("click", (event) => {
    if (!place(event)) return;
    const i = Number(place(event).dataset.i);
    if (view.pinned === i) release(); else pin(i);
  });
  text.addEventListener("keydown", onKey);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") release(); });
  find("score").addEventListener("change", (event) => { view.score = event.target.value; view.pinned = null; refresh(); });
  find("layer").addEventListener("change", (event) => {
    view.layer = Number(event.target.value);
    view.channel = null;
    const width = view.data.layers[view.layer].channels || 0;
    Object.assign(find("channel"), { value: "", max: Math.max(0, width - 1), disabled: !width });
    refresh();
  });
  find("channel").addEventListener("input", (event) => {
    const { value, max } = event.target, asked = Number(value);
    view.channel = value !== "" && Number.isInteger(asked) && asked >= 0 && asked <= Number(max) ? asked : null;
    refresh();
  });
  find("theme").addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });
  const form = find("live");
  if (form) {
    form.addEventListener("submit", (event) => { event.preventDefault(); readTyped(); });
    form.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey) readTyped(); });
  }
  const data = JSON.parse(find("data").textContent);
  if (form) find("typed").value = data.text ?? "";
  fill(data);
}

start();
