// Colours for Python, one line at a time; only strings in triple quotes reach from one line into the next.

const KEYWORDS = new Set(("False None True and as assert async await break class continue def del elif else except finally " +
  "for from global if import in is lambda nonlocal not or pass raise return try while with yield").split(" "));
const TOKEN = /(#.*)|((?:[rbfRBF]{0,2})(?:"""|'''))|((?:[rbfRBF]{0,2})(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?))|(@[\w.]+)|\b(0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?)\b|([A-Za-z_]\w*)/g;

export function escape(text) {
  return text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
}

const span = (kind, text) => `<span class="${kind}">${escape(text)}</span>`;

/** Return the lines of a program as HTML. */
export function highlight(source) {
  let quote = null; // of a string that is open
  return source.split("\n").map((line) => {
    let html = "", position = 0, before = "";
    if (quote) {
      const end = line.indexOf(quote);
      if (end < 0) return span("s", line);
      position = end + 3;
      html = span("s", line.slice(0, position));
      quote = null;
    }
    TOKEN.lastIndex = position;
    for (let match; (match = TOKEN.exec(line)); position = TOKEN.lastIndex) {
      html += escape(line.slice(position, match.index));
      const [text, comment, triple, string, decorator, number, name] = match;
      if (comment) html += span("c", text);
      else if (triple) {
        const mark = text.slice(-3), end = line.indexOf(mark, TOKEN.lastIndex);
        if (end < 0) { quote = mark; html += span("s", line.slice(match.index)); return html; }
        TOKEN.lastIndex = end + 3;
        html += span("s", line.slice(match.index, end + 3));
      } else if (string) html += span("s", text);
      else if (decorator) html += span("f", text);
      else if (number) html += span("n", text);
      else if (KEYWORDS.has(name)) html += span("k", text);
      else if (before === "def" || before === "class") html += span("f", text);
      else if (name === "cuda" || line[match.index - 1] === "." && /cuda(\.\w+)*\.$/.test(line.slice(0, match.index))) html += span("a", text);
      else html += escape(text);
      before = text;
    }
    return html + escape(line.slice(position));
  });
}
