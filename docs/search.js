// The order of search results. Sphinx counts no words, and gives each page with a word of the query in some title the same score.
// Here, titles with more words of the query come first, then titles with fewer other words, then the order of the navigation.

function stems(text) {
  const words = text.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(word => word && !stopwords.has(word));
  return new Set(words.map(word => new Stemmer().stemWord(word)));
}
function likeness(title) {
  const query = stems(new URLSearchParams(location.search).get("q"));
  const words = stems(title), found = [...query].filter(word => words.has(word)).length;
  return found && found / query.size + found / words.size / 2;
}
function rank(page) {  // from 0 to 0.1; contributors' pages, the last part of the navigation, come after those of users
  const place = part => [...document.querySelectorAll(part)].findIndex(link => link.getAttribute("href") === page + ".html");
  return place(".sidebar-tree a") / 1000 + (place(".sidebar-tree > ul:last-of-type a") >= 0 ? 1 : 0);
}
var Scorer = {
  objPrio: {},
  score: result => {
    const [page, title, , , , , kind] = result;
    if (kind === "object") return likeness(title.split(".").pop()) - 0.3 - rank(page);
    if (kind !== "text") return likeness(title.split(" > ").pop()) - rank(page);
    const number = Search._index.docnames.indexOf(page);
    let best = likeness(title) && likeness(title) + 0.1;
    for (const [section, places] of Object.entries(Search._index.alltitles)) {
      const [, id] = places.find(place => place[0] === number) ?? [], score = likeness(section);
      if (!id || score <= best) continue;
      best = score;
      if (score > 1) [result[1], result[2]] = [title + " > " + section, "#" + id];  // most words of both: lead to the section
    }
    return best - rank(page);
  },
};
