import { escape, highlight } from "./highlight.js";

// With bytecode in place of sources, so that Python need not compile its library.
const PYODIDE = "https://cdn.jsdelivr.net/pyodide/v0.27.7/pyc/";
const $ = (id) => document.getElementById(id);
const source = $("source"), LANES = 32;

let worker = null, ready = false, running = false, counters = {};
let examples = [], seed = 0, races = true;
let marks = []; // lines to mark

// --- the editor ---------------------------------------------------------------------------------------------------

function paint() {
  const lines = highlight(source.value);
  const kind = (number) => (number === marks[0] ? "marked" : marks.includes(number) ? "marked2" : "");
  $("colours").innerHTML = lines.map((line, i) => `<div class="${kind(i + 1)}">${line}</div>`).join("");
  $("gutter").innerHTML = lines.map((_, i) => `<div class="${kind(i + 1)}">${i + 1}</div>`).join("");
}

function show(text) {
  source.value = text;
  marks = [];
  paint();
  $("code").scrollTo(0, 0);
}

function goTo(number, focus = true) {
  const line = $("colours").children[number - 1];
  if (!line) return;
  const code = $("code"), top = line.offsetTop - code.clientHeight / 2;
  code.scrollTo({ top, behavior: "smooth" });
  if (!focus) return;
  const start = source.value.split("\n").slice(0, number - 1).join("\n").length + (number > 1 ? 1 : 0);
  source.focus({ preventScroll: true });
  source.setSelectionRange(start, start + line.textContent.length);
}

function insert(text) {
  // Through the browser's own command, so that undo works.
  if (!document.execCommand("insertText", false, text)) source.setRangeText(text, source.selectionStart, source.selectionEnd, "end");
}

source.addEventListener("input", () => { marks = []; paint(); });
source.addEventListener("keydown", (event) => {
  const { value, selectionStart: at } = source;
  const line = value.slice(value.lastIndexOf("\n", at - 1) + 1, at);
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  else if (event.key === "Tab" && !event.shiftKey) { event.preventDefault(); insert("    "); }
  else if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    insert("\n" + line.match(/^ */)[0] + (/:\s*(#.*)?$/.test(line) ? "    " : ""));
  } else if (event.key === "Backspace" && source.selectionEnd === at && /^( {4})+$/.test(line)) {
    event.preventDefault();
    source.setSelectionRange(at - 4, at);
    insert("");
    if (source.selectionEnd > source.selectionStart) source.setRangeText("");
    paint();
  } else if (event.key === "Escape") source.blur(); // lets Tab leave the editor
});

// --- status and results -------------------------------------------------------------------------------------------

function lanes(share, kind = "") {
  const warp = $("warp");
  warp.className = `warp ${kind}`;
  [...warp.children].forEach((lane, i) => lane.classList.toggle("on", i < share * LANES));
}

function clear() {
  $("report").hidden = true;
  $("output").textContent = "";
  $("counters").innerHTML = "";
  marks = [];
  paint();
}

function linked(text) {
  return escape(text).replace(/\bline (\d+)/g, '<a data-line="$1">line $1</a>');
}

function report(kind, message) {
  const sentence = (text) => text[0].toUpperCase() + text.slice(1);
  const paragraphs = message.replace("; ", ".\n\n").split("\n\n").filter(Boolean).map(sentence); // what happened, what to do
  $("report").innerHTML = `<strong>${escape(kind)}</strong>` + paragraphs.map((text) => `<p>${linked(text)}</p>`).join("");
  $("report").hidden = false;
}

function table(kernel) {
  const used = Object.keys(counters).filter((name) => kernel.lines.some((line) => line[name]));
  const most = Object.fromEntries(used.map((name) => [name, Math.max(...kernel.lines.map((line) => line[name] ?? 0))]));
  const least = Math.min(...kernel.lines.map((line) => line.executions));
  const text = source.value.split("\n");
  const cell = (name, value) => {
    if (value === null || (value === 0 && name !== "executions")) return "<td></td>";
    const shown = name === "divergence" ? `${Math.round(100 * value)} %` : Number.isInteger(value) ? value : value.toFixed(1);
    const hot = (name === "bank_conflicts" || name === "contention") && value > 1 && value === most[name];
    return `<td${hot ? ' class="hot"' : ""}>${shown}</td>`;
  };
  const rows = kernel.lines.map((line) => {
    const heat = most.executions > least ? (0.24 * (line.executions - least)) / (most.executions - least) : 0;
    return `<tr style="background: rgba(var(--heat), ${heat.toFixed(3)})"><td><a data-line="${line.line}">${line.line}</a></td>` +
      used.map((name) => cell(name, line[name])).join("") + `<td>${escape((text[line.line - 1] ?? "").trim())}</td></tr>`;
  });
  const heads = used.map((name) => `<th title="${escape(counters[name][1])}">${counters[name][0]}</th>`);
  return `<h2>${escape(kernel.kernel)} <small>${kernel.launch}</small></h2>
    <table><thead><tr><th>line</th>${heads.join("")}<th></th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
}

function finish({ error, profile, seconds }) {
  running = false;
  buttons();
  const how = `${seconds.toFixed(2)} s, seed ${seed}`;
  lanes(1, error ? "bad" : "");
  if (error) {
    report(error.kind, error.message);
    marks = error.lines;
    paint();
    if (marks.length) goTo(marks[0], false);
    $("status").textContent = `Stopped after ${how}`;
  } else {
    $("status").textContent = `Finished in ${how}${races && !profile ? ", no race" : ""}`;
    if (!$("output").textContent && !profile) $("output").textContent = "(the program printed nothing)";
  }
  if (profile) $("counters").innerHTML = profile.map(table).join("") || "<p>No kernel was launched.</p>";
}

document.addEventListener("click", (event) => {
  const line = event.target.closest("[data-line]");
  if (line) goTo(Number(line.dataset.line));
});

// --- running ------------------------------------------------------------------------------------------------------

function base() {
  const other = new URLSearchParams(location.search).get("pyodide");
  if (!other) return PYODIDE;
  const url = new URL(other.replace(/\/?$/, "/"), location.href);
  if (url.origin !== location.origin) throw new Error("?pyodide= must name a folder of this site");
  return url.href;
}

function start() {
  worker?.terminate();
  ready = running = false;
  buttons();
  lanes(0);
  $("status").textContent = "Loading Python …";
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => receive[data.type](data);
  worker.onerror = (event) => receive.failed({ message: event.message || "the worker did not start" });
  worker.postMessage({ type: "load", base: base() });
}

let wanted = null; // a run that waits for Python

const receive = {
  loading: ({ share }) => lanes(share),
  ready: (data) => {
    ready = true;
    counters = data.counters;
    buttons();
    lanes(1);
    $("status").textContent = "Ready";
    if (wanted) { const profile = wanted.profile; wanted = null; run(profile); }
  },
  print: ({ text }) => { $("output").textContent += text + "\n"; },
  result: finish,
  failed: ({ message }) => {
    running = false;
    lanes(1, "bad");
    $("status").textContent = ready ? "Stopped" : "Python did not start";
    report(ready ? "Internal error" : "The playground could not start", message);
    if (ready) start(); else buttons();
  },
};

function run(profile = false) {
  if (running) { start(); $("status").textContent = "Stopped; loading Python again …"; return; }
  if (!ready) return;
  clear();
  running = true;
  buttons();
  lanes(0, "busy");
  $("status").textContent = profile ? "Profiling …" : "Running …";
  worker.postMessage({ type: "run", request: { source: source.value, races, seed, profile } });
}

function buttons() {
  $("run").textContent = running ? "Stop" : "Run";
  $("run").disabled = !ready;
  $("profile").disabled = !ready || running;
  $("races").setAttribute("aria-pressed", races);
  $("seed").textContent = `Seed ${seed}`;
}

$("run").onclick = () => run();
$("profile").onclick = () => run(true);
$("races").onclick = () => { races = !races; buttons(); };
$("seed").onclick = () => { seed = (seed + 1) % 100; buttons(); if (ready && !running) run(); };
$("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark");
};

// --- examples and links -------------------------------------------------------------------------------------------

async function bytes(stream) {
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function pack(text) {
  const packed = await bytes(new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw")));
  return btoa(String.fromCharCode(...packed)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
  return new TextDecoder().decode(await bytes(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"))));
}

$("share").onclick = async () => {
  const options = new URLSearchParams({ code: await pack(source.value), seed, races: Number(races) });
  history.replaceState(null, "", `#${options}`);
  let said = "Link copied";
  try { await navigator.clipboard.writeText(location.href); } catch { said = "Link in the address bar"; }
  $("share").textContent = said;
  setTimeout(() => { $("share").textContent = "Share"; }, 2000);
};

async function choose(file) {
  const text = await (await fetch(`examples/${file}`)).text();
  show(text.trimEnd() + "\n");
  $("examples").value = file;
  history.replaceState(null, "", `#example=${file.replace(".py", "")}`);
}

$("examples").onchange = async () => {
  await choose($("examples").value);
  begin(examples.find(({ file }) => file === $("examples").value));
};

async function open() {
  const options = new URLSearchParams(location.hash.slice(1));
  if (options.has("code")) {
    seed = Number(options.get("seed")) || 0;
    races = options.get("races") !== "0";
    buttons();
    $("examples").value = "";
    try { show(await unpack(options.get("code"))); return; } catch { report("Link", "the link does not hold a program"); }
  }
  const example = examples.find(({ file }) => file === `${options.get("example")}.py`) ?? examples[0];
  await choose(example.file);
  begin(example); // programs of links, on the other hand, run only when they are asked to
}

function begin({ profile = false }) {
  if (!ready) wanted = { profile };
  else if (!running) run(profile);
}

for (let lane = 0; lane < LANES; lane++) {
  const i = document.createElement("i");
  i.style.setProperty("--lane", lane);
  $("warp").append(i);
}
buttons();
try { start(); } catch (error) { receive.failed({ message: error.message }); }
examples = await (await fetch("examples/examples.json")).json();
const groups = Map.groupBy ? Map.groupBy(examples, ({ group }) => group) : new Map([["Examples", examples]]);
$("examples").innerHTML = '<option value="" disabled>your program</option>' + [...groups].map(([group, members]) =>
  `<optgroup label="${group}">${members.map(({ file, title }) => `<option value="${file}">${title}</option>`).join("")}</optgroup>`).join("");
await open();
window.addEventListener("hashchange", open);
document.documentElement.dataset.opened = "yes"; // for tests
