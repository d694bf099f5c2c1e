// Returns what is wrong with the page as it is shown now: [[kind, text], ...]. `pages.py` calls it.
async () => {
  await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
  const SMALLEST = 9;
  const found = [];
  const report = (kind, text) => found.push([kind, text]);
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const named = (element) => {
    const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 40);
    return `<${element.tagName.toLowerCase()}${element.className ? " " + (element.className.baseVal ?? element.className) : ""}> ${text}`;
  };

  // The page itself scrolls down, never sideways.
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) {
    const wide = [...document.body.querySelectorAll("*")].filter((e) => {
      if (!shown(e) || e.getBoundingClientRect().right <= root.clientWidth + 1) return false;
      for (let p = e.parentElement; p && p !== root; p = p.parentElement)
        if (/auto|scroll|hidden|clip/.test(getComputedStyle(p).overflowX)) return false;
      return true;
    });
    report("sideways", `${root.scrollWidth} px in ${root.clientWidth}: ${wide.slice(0, 3).map(named).join(" | ")}`);
  }

  const scrolls = (element, until = root) => {
    for (let p = element; p && p !== until; p = p.parentElement) if (/auto|scroll/.test(getComputedStyle(p).overflowX)) return true;
    return false;
  };

  // Nor does the column of text: what is wide scrolls on its own.
  for (const column of document.querySelectorAll("main, article, .bd-article-container"))
    if (column.scrollWidth > column.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(column).overflowX)) {
      const wide = [...column.querySelectorAll("*")].filter((e) => shown(e) && !scrolls(e.parentElement, column)
        && e.getBoundingClientRect().right > column.getBoundingClientRect().right + 1);
      report("sideways", `the column has ${column.scrollWidth} px in ${column.clientWidth}: ${wide.slice(-3).map(named).join(" | ")}`);
    }

  // Nor is text cut off where nothing scrolls: by the window, or by a box that hides what does not fit.
  const is_cut = (element, right) => {
    for (let p = element; p && p !== root; p = p.parentElement) {
      const { overflowX } = getComputedStyle(p);
      if (/auto|scroll/.test(overflowX)) return false;
      if (/hidden|clip/.test(overflowX) && p.clientWidth > 1 && right > p.getBoundingClientRect().right + 1) return true;
    }
    return right > root.clientWidth + 1;
  };
  const main = document.querySelector("main") || document.body;
  const range = document.createRange();
  const texts = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  const cut = [];
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || element.closest("svg, script, style, dialog") || !shown(element)) continue;
    range.selectNodeContents(texts.currentNode);
    const { left, right, width } = range.getBoundingClientRect();
    if (width > 1 && left < root.clientWidth && is_cut(element, right)) cut.push(element);
  }
  if (cut.length) report("cut", `${cut.length} texts, such as ${cut.slice(0, 3).map(named).join(" | ")}`);

  // What scrolls shows that it does: it fades out, or has a bar. An editor scrolls with its caret.
  const unmarked = [...main.querySelectorAll("*")].filter((e) => {
    const style = getComputedStyle(e), borders = parseFloat(style.borderTopWidth) + parseFloat(style.borderBottomWidth);
    return /auto|scroll/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 1 && shown(e)
      && !e.matches("svg *, article, .bd-article-container, :has(textarea)") && style.maskImage === "none"
      && e.offsetHeight - e.clientHeight - borders < 1;
  });
  if (unmarked.length) report("unmarked", `${unmarked.length} boxes, such as ${unmarked.slice(0, 3).map(named).join(" | ")}`);

  for (const image of document.images)
    if (image.complete && !image.naturalWidth && (image.currentSrc || image.src)) report("image", image.currentSrc || image.src);

  // Text: what the reader sees is its font size, times the scale at which an SVG is shown.
  const scale = (element) => {
    const m = element.getScreenCTM();
    return m ? Math.sqrt(Math.abs(m.a * m.d - m.b * m.c)) : 1;
  };
  const small = new Map();
  const measure = (element, size, where) => {
    if (size && size < SMALLEST - 0.05) {  // 0: for screen readers alone
      const key = where;
      const old = small.get(key);
      if (!old || size < old.size) small.set(key, { size, text: named(element), count: (old?.count || 0) + 1 });
    }
  };
  const svg_texts = (svg, where) => {
    for (const text of svg.querySelectorAll("text, tspan")) {
      if (!shown(text) || ![...text.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
      measure(text, parseFloat(getComputedStyle(text).fontSize) * scale(text), where);
    }
    // matplotlib draws text as paths: glyphs of 100 units, scaled.
    for (const group of svg.querySelectorAll("g[id^=text_] > g[transform*=scale]")) {
      if (shown(group)) measure(group.parentElement, 100 * scale(group), where);
    }
  };
  for (const svg of document.querySelectorAll("svg"))
    if (!svg.parentElement.closest("svg") && shown(svg)) svg_texts(svg, `svg ${svg.getAttribute("class") || ""}`);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || /^(SCRIPT|STYLE|TEMPLATE|NOSCRIPT|TITLE|OPTION)$/i.test(element.tagName)) continue;
    if (element.closest("svg") || !shown(element)) continue;
    measure(element, parseFloat(getComputedStyle(element).fontSize), "text");
  }
  for (const [where, { size, text, count }] of small)
    report("small", `${where}: ${size.toFixed(1)} px, ${count} times, such as ${text}`);

  // Code: an i is as wide as an M.
  const context = document.createElement("canvas").getContext("2d");
  const fonts = new Map();
  for (const code of document.querySelectorAll("pre, code, kbd, textarea")) {
    if (!shown(code)) continue;
    const style = getComputedStyle(code), font = `${style.fontSize} ${style.fontFamily}`;
    if (!fonts.has(font)) fonts.set(font, code);
  }
  for (const [font, code] of fonts) {
    context.font = font;
    if (Math.abs(context.measureText("iiiiii").width - context.measureText("MMMMMM").width) > 0.5)
      report("proportional", `${font}: ${named(code)}`);
  }

  return found;
}
