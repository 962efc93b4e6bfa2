"use strict";
// The files in data/ call index, answers, prompts and whole. Texts from them reach the page through textContent alone.
const ROW = 56, TALLEST = 10_000_000, AT_ONCE = 4, KEPT = 12, BINS = 26;
const $ = id => document.getElementById(id);
const number = value => value.toLocaleString("en");
const loaded = { answers: new Map(), prompts: new Map(), whole: new Map() };
const waiting = new Map(), texts = [];
let data, count, group, shown, current = -1, queue = [], loading = 0, redraw = 0;

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Loading: a page on a disk cannot fetch, but a script can be added, which calls one of these.
function keep(kind, place, value) {
  loaded[kind].set(place, value);
  // Prompts are large: only those looked at last are kept.
  if (kind !== "answers" && loaded[kind].size > KEPT) loaded[kind].delete(loaded[kind].keys().next().value);
}
const answers = (place, value) => keep("answers", place, value);
const prompts = (place, value) => keep("prompts", place, value);
const whole = (place, value) => keep("whole", place, value);

function load(kind, place) {
  if (loaded[kind].has(place)) return Promise.resolve(loaded[kind].get(place));
  const name = `data/${kind}-${place}.js`;
  if (!waiting.has(name)) waiting.set(name, new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = name;
    script.onload = () => { script.remove(); waiting.delete(name); done(loaded[kind].get(place)); };
    script.onerror = () => { script.remove(); failed(new Error(`${name} is missing or damaged`)); };
    document.head.append(script);
  }));
  return waiting.get(name);
}

// The chunks of answers, those on the screen first, then those that a search needs.
function pump() {
  while (loading < AT_ONCE && queue.length) {
    const place = queue.shift();
    if (loaded.answers.has(place)) continue;
    loading += 1;
    load("answers", place).catch(error => { loaded.answers.set(place, null); $("summary").textContent = error.message; })
      .finally(() => { loading -= 1; later(); pump(); });
  }
}

function later() {
  if (redraw) return;
  // Filtering after every chunk of a search would take longer than loading it.
  redraw = setTimeout(() => { redraw = 0; if (words().length) filter(true); else draw(); }, words().length ? 100 : 0);
}

const words = () => $("words").value.toLowerCase().split(/\s+/).filter(Boolean);

function textOf(row) {
  if (texts[row] === undefined) {
    const [expected, sides] = loaded.answers.get(Math.floor(row / data.chunk))?.[row % data.chunk] ?? [[], []];
    const strings = [expected, ...sides.filter(Boolean).flatMap(side => [side[0], side[1]])].flat();
    texts[row] = strings.filter(each => typeof each === "string").join("\n").toLowerCase();
  }
  return texts[row];
}

// Filters
const verdict = score => score === null ? "" : score >= 1 ? "right" : score <= 0 ? "wrong" : "partly";
const judged = score => verdict(score) === "partly" ? `${Math.round(1000 * score) / 10} %` : verdict(score);
const percent = share => `${Math.round(1000 * share) / 10} %`;

function choices(id, all, values) {
  $(id).replaceChildren(new Option(all, ""), ...values.map(([value, text]) => new Option(text, value)));
  $(id).hidden = values.length < 2;
}

function compared(values) {
  return [...new Set(values.filter(each => each !== null))]
    .sort((a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
}

function bins(depths) {
  const found = compared(depths);
  if (found.length <= BINS) return [found.map(each => [each, percent(each)]), each => each];
  return [Array.from({ length: 10 }, (_, ten) => [ten, `${10 * ten} to ${10 * ten + 10} %`]), each => Math.min(9, Math.floor(10 * each))];
}

function verdicts() {
  const found = [];
  data.sides.forEach((side, place) => {
    const name = data.sides.length > 1 ? `${side.name}: ` : "";
    for (const each of ["right", "partly", "wrong"]) found.push([`${each} ${place}`, name + each, row => verdict(side.score[row]) === each]);
    found.push([`cut ${place}`, `${name}cut off`, row => side.finished[row] === false]);
  });
  if (data.sides.length > 1) {
    const change = row => a[row] === null || b[row] === null ? 0 : b[row] - a[row];
    const [a, b] = data.sides.map(side => side.score), [first, last] = data.sides.map(side => side.name);
    found.unshift(["changed", "changed", row => change(row) !== 0], ["better", `${last} better than ${first}`, row => change(row) > 0],
      ["worse", `${last} worse than ${first}`, row => change(row) < 0]);
    found.push(["alone", "answered by one only", row => a[row] === null || b[row] === null]);
  }
  return found;
}

function orders() {
  const found = [["", "in order of tasks", null], ["tokens", "by prompt tokens", data.tokens]];
  if (data.depth) found.push(["depth", "by depth", data.depth]);
  if (data.difficulty) found.push(["difficulty", "by difficulty", data.difficulty]);
  data.sides.forEach((side, place) => {
    const name = data.sides.length > 1 ? ` of ${side.name}` : "";
    found.push([`score ${place}`, `by score${name}`, side.score], [`new ${place}`, `by answer tokens${name}`, side.new]);
  });
  if (data.sides.length > 1) {
    const [a, b] = data.sides.map(side => side.score);
    found.push(["change", "by change of score", a.map((each, row) => each === null || b[row] === null ? null : b[row] - each)]);
  }
  return found;
}

function filter(stay) {
  const wanted = words(), task = $("task").value, length = $("length").value, depth = $("depth").value, difficulty = $("difficulty").value;
  const right = data.verdicts.find(each => each[0] === $("verdict").value)?.[2];
  const fits = data.groups.map(([name, tokens]) => (!task || name === task) && (!length || String(tokens) === length));
  const found = [], missing = new Set();
  for (let row = 0; row < count; row++) {
    if (!fits[group[row]] || (right && !right(row))) continue;
    if (depth && (data.depth[row] === null || String(data.bin(data.depth[row])) !== depth)) continue;
    if (difficulty && String(data.difficulty[row]) !== difficulty) continue;
    if (wanted.length) {
      const chunk = Math.floor(row / data.chunk);
      if (!loaded.answers.has(chunk)) { missing.add(chunk); continue; }
      const text = textOf(row);
      if (!wanted.every(word => text.includes(word))) continue;
    }
    found.push(row);
  }
  const keys = data.orders.find(each => each[0] === $("order").value)[2], down = $("reverse").getAttribute("aria-pressed") === "true" ? -1 : 1;
  const rank = new Map(keys && keys.some(each => typeof each === "string") ? compared(keys).map((each, place) => [each, place]) : []);
  const key = row => rank.size ? rank.get(keys[row]) ?? null : keys[row];
  // Samples without the value stand last, whichever way.
  if (keys) found.sort((a, b) => (key(a) === null) - (key(b) === null) || down * (key(a) - key(b)) || a - b);
  else if (down < 0) found.reverse();
  shown = found;
  queue = [...missing];
  const scores = data.sides.map(side => {
    const own = shown.filter(row => side.score[row] !== null);
    const mean = own.reduce((sum, row) => sum + side.score[row], 0) / own.length;
    return own.length ? `, ${data.sides.length > 1 ? `${side.name} ` : ""}${percent(mean)}` : "";
  });
  $("summary").textContent = `${number(shown.length)} of ${number(count)} samples${scores.join("")}`
    + (missing.size ? `; searching, ${number(missing.size)} of ${number(Math.ceil(count / data.chunk))} files left` : "");
  $("room").style.height = `${Math.min(TALLEST, ROW * shown.length)}px`;
  if (!stay) $("list").scrollTop = 0;
  draw();
  pump();
}

// The list: only the rows on the screen are in the page. One of millions of rows is higher than browsers allow.
function draw() {
  const list = $("list"), height = Math.min(TALLEST, ROW * shown.length), screen = list.clientHeight;
  const room = Math.max(1, height - screen), all = Math.max(0, ROW * shown.length - screen);
  const top = height < TALLEST ? list.scrollTop : list.scrollTop / room * all;
  const first = Math.max(0, Math.floor(top / ROW) - 2), last = Math.min(shown.length, Math.ceil((top + screen) / ROW) + 2);
  $("rows").style.top = `${list.scrollTop + first * ROW - top}px`;
  $("rows").replaceChildren(...shown.slice(first, last).map(line));
  list.setAttribute("aria-activedescendant", current >= 0 ? `row${current}` : "");
  const needed = new Set(shown.slice(first, last).map(row => Math.floor(row / data.chunk)).filter(place => !loaded.answers.has(place)));
  if (needed.size) {
    queue = [...needed, ...queue.filter(place => !needed.has(place))];
    pump();
  }
}

function line(row) {
  const made = make("div", "row"), [task, length] = data.groups[group[row]], sides = data.sides;
  made.id = `row${row}`;
  made.dataset.row = row;
  made.setAttribute("role", "option");
  made.setAttribute("aria-selected", row === current);
  const facts = [task, number(length), `#${data.sample[row]}`];
  if (data.depth && data.depth[row] !== null) facts.push(`depth ${percent(data.depth[row])}`);
  if (data.difficulty && data.difficulty[row] !== null) facts.push(`difficulty ${data.difficulty[row]}`);
  const scores = make("span");
  sides.forEach((side, place) => {
    if (place) scores.append(" → ");
    scores.append(side.score[row] === null ? make("span", "quiet", "none") : make("span", verdict(side.score[row]), judged(side.score[row])));
  });
  const known = loaded.answers.get(Math.floor(row / data.chunk))?.[row % data.chunk];
  const last = known?.[1].findLast(Boolean)?.[0];
  made.append(make("span", "", facts.join(" · ")), scores, make("span", "preview", last ? String(last[0] ?? "(empty)").slice(0, 200) : " "));
  return made;
}

// One sample
function segments(parts, name, empty) {
  const pre = make("pre", name);
  for (const part of parts) {
    if (typeof part === "string") pre.append(part);
    else if (typeof part === "number") pre.append(make("span", "gap", ` … (${number(part)} characters left out) … `));
    else if (part[0] === "needle") pre.append(make("mark", "", part[1]));
    else pre.append(make("span", "role", part[1]));
  }
  if (!parts.length) pre.append(make("span", "gap", empty));
  return pre;
}

async function open(row) {
  current = row;
  history.replaceState(null, "", `#${row}`);
  draw();
  const chunk = Math.floor(row / data.chunk), place = row % data.chunk, full = data.full.has(row);
  let texts, prompt, everything;
  try {
    [texts, prompt, everything] = await Promise.all([load("answers", chunk), load("prompts", chunk), full ? load("whole", row) : null]);
  } catch (error) {
    if (row === current) $("sample").replaceChildren(make("p", "wrong", error.message));
    return;
  }
  // Another sample may have been chosen in the meantime.
  if (row !== current) return;
  const [task, length] = data.groups[group[row]], [expected, sides] = texts[place], [characters, parts, facts] = prompt[place];
  const back = make("button", "", "Back to the list");
  back.id = "back";
  back.onclick = close;
  const told = [`prompt of ${number(data.tokens[row])} tokens`];
  if (data.depth && data.depth[row] !== null) told.push(`depth ${percent(data.depth[row])}`);
  if (data.difficulty && data.difficulty[row] !== null) told.push(`difficulty ${data.difficulty[row]}`);
  told.push(...facts.map(([name, value]) => `${name} ${value}`));
  const side = make("div", "sides");
  sides.forEach((each, at) => {
    const own = make("section"), { name, score, finished } = data.sides[at], head = make("h3", "", data.sides.length > 1 ? `Answer, ${name} ` : "Answer ");
    own.append(head);
    if (each === null) { own.append(make("p", "quiet", "No answer to this prompt.")); side.append(own); return; }
    head.append(make("span", verdict(score[row]), judged(score[row])));
    const [answer, thoughts, scores] = each, tokens = data.sides[at].new[row];
    const state = finished[row] === false ? "cut off at the token limit" : finished[row] ? "finished" : "";
    own.append(make("p", "facts", [tokens === null ? "" : `${number(tokens)} tokens`, state, ...scores.map(([metric, value]) => `${metric} ${percent(value)}`)].filter(Boolean).join(", ")));
    if (thoughts.length) {
      const fold = make("details");
      fold.append(make("summary", "", "Thoughts"), segments(thoughts));
      own.append(fold);
    }
    own.append(segments(answer, "", "(empty)"));
    side.append(own);
  });
  const title = characters === null ? "Prompt" : `Prompt, ${number(characters)} characters${full ? "" : parts.some(Number.isInteger) ? ", excerpt" : ""}`;
  $("sample").replaceChildren(back, make("h2", "", `${task} at ${number(length)} tokens, sample ${data.sample[row]}`), make("p", "facts", told.join(" · ")),
    make("h3", "", "Expected"), segments(expected, "", "(nothing)"), side, make("h3", "", title),
    segments(full ? everything : parts, "whole", "prompt not kept; --prompts makes it again"));
  $("sample").scrollTop = 0;
}

function close() {
  document.body.classList.remove("open");
  $("list").focus();
  draw();
}

function enter() {
  if (current < 0 && shown.length) open(shown[0]);
  document.body.classList.add("open");
  $("sample").focus();
}

function move(by) {
  if (!shown.length) return;
  const at = shown.indexOf(current), place = at < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, at + by)), list = $("list");
  const height = Math.min(TALLEST, ROW * shown.length), scale = height < TALLEST ? 1 : (height - list.clientHeight) / (ROW * shown.length - list.clientHeight);
  const top = place * ROW * scale;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  open(shown[place]);
}

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input, select");
  if (event.key === "Escape") {
    if (typing) { if (event.target === $("words")) { $("words").value = ""; filter(); } $("list").focus(); } else close();
  } else if (typing && !(event.target === $("words") && event.key === "Enter")) return;
  else if (event.key === "/") $("words").focus();
  else if (event.key === "j" || event.key === "ArrowDown" && !$("sample").contains(document.activeElement)) move(1);
  else if (event.key === "k" || event.key === "ArrowUp" && !$("sample").contains(document.activeElement)) move(-1);
  else if (event.key === "Enter" && !event.target.matches("button, summary")) enter();
  else return;
  event.preventDefault();
});

// The index is the last script; everything begins with it.
function index(found) {
  data = found;
  count = data.sample.length;
  group = new Uint32Array(count);
  let row = 0;
  data.groups.forEach((each, place) => { group.fill(place, row, row += each[2]); });
  data.full = new Set(data.whole);
  const tasks = [...new Set(data.groups.map(each => each[0]))];
  choices("task", "all tasks", tasks.map(each => [each, each]));
  choices("length", "all lengths", compared(data.groups.map(each => each[1])).map(each => [each, `${number(each)} tokens`]));
  const [depths, bin] = bins(data.depth ?? []);
  data.bin = bin;
  choices("depth", "all depths", data.depth ? depths : []);
  choices("difficulty", "all difficulties", compared(data.difficulty ?? []).map(each => [each, `difficulty ${each}`]));
  data.verdicts = verdicts();
  choices("verdict", "right and wrong", data.verdicts);
  data.orders = orders();
  $("order").replaceChildren(...data.orders.map(([value, text]) => new Option(text, value)));
  $("filters").addEventListener("input", () => filter());
  $("filters").addEventListener("submit", event => event.preventDefault());
  $("reverse").addEventListener("click", () => { $("reverse").setAttribute("aria-pressed", $("reverse").getAttribute("aria-pressed") !== "true"); filter(); });
  $("list").addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  $("list").addEventListener("click", event => {
    const chosen = event.target.closest(".row");
    if (chosen) { open(Number(chosen.dataset.row)); document.body.classList.add("open"); }
  });
  addEventListener("resize", draw);
  filter();
  const asked = /^#(\d+)$/.exec(location.hash);
  if (asked && Number(asked[1]) < count) { open(Number(asked[1])); document.body.classList.add("open"); }
}
