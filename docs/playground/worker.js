// Runs programs under Pyodide, away from the page, so that the page can stop a kernel that does not end.

const PACKAGE = new URL("moe_numba.zip", self.location.href);
let pyodide = null;

const print = (text) => postMessage({ type: "print", text });

async function download(url, remedy = "try again") {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} is missing: ${remedy}`);
  return response.arrayBuffer();
}

async function numpyWheel(base) {
  const { packages } = JSON.parse(new TextDecoder().decode(await download(base + "pyodide-lock.json")));
  return download(base + packages.numpy.file_name);
}

async function load(base) {
  if (!("Suspending" in WebAssembly)) {
    throw new Error("This browser cannot switch between WebAssembly stacks (JSPI), which CUDA threads need. " +
      "Chrome, Edge and other browsers with Chromium 137 or newer can.");
  }
  postMessage({ type: "loading", share: 0.1 });
  const { loadPyodide } = await import(base + "pyodide.mjs");
  const archive = download(PACKAGE, "run `make playground`");
  const numpy = numpyWheel(base);
  postMessage({ type: "loading", share: 0.3 });
  pyodide = await loadPyodide({ indexURL: base, stdout: print, stderr: print });
  postMessage({ type: "loading", share: 0.7 });
  // Pyodide's own loader would also compile those of NumPy's shared libraries that the simulator does not import.
  pyodide.unpackArchive(await numpy, "wheel");
  pyodide.unpackArchive(await archive, "zip", { extractDir: "/lib/moe_numba" });
  await pyodide.runPythonAsync(`
import sys
sys.path.insert(0, "/lib/moe_numba")
import json
from moe_numba.simulator.browser import programs

def run(request):
    return json.dumps(programs.run(folder="/home/pyodide", **json.loads(request)))
`);
  const counters = pyodide.runPython("json.dumps(programs.COUNTERS)");
  postMessage({ type: "ready", counters: JSON.parse(counters) });
}

async function run(request) {
  const started = performance.now();
  const python = pyodide.globals.get("run");
  try {
    const result = JSON.parse(await python.callPromising(JSON.stringify(request)));
    postMessage({ type: "result", ...result, seconds: (performance.now() - started) / 1000 });
  } finally {
    python.destroy();
  }
}

onmessage = async ({ data }) => {
  try {
    await (data.type === "load" ? load(data.base) : run(data.request));
  } catch (error) {
    postMessage({ type: "failed", message: String(error.message ?? error) });
  }
};
