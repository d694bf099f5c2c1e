// The order of what a search finds: Sphinx's scores, and then the lesson or function of that name before other pages.
const sought = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
const mentions_everything = /^(changelog|claims|compilers|contributing|course|measurements|project|records)$/;
var Scorer = {
  score: ([page, title, , , score]) => {
    const named = sought.some((word) => title.toLowerCase().includes(word));
    const taught = /^(course|api)\//.test(page);
    return score + 10 * named + 10 * taught - 20 * mentions_everything.test(page);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
