(() => {
  "use strict";
  const all = [...document.querySelectorAll("[data-l]")], keysOf = (element) => element.dataset.l.split(" ");
  const byKey = new Map();
  for (const element of all) for (const key of keysOf(element)) byKey.set(key, [...(byKey.get(key) ?? []), element]);
  const panes = [...document.querySelectorAll(".pane")];
  let kept = null;
  for (const drawn of document.querySelectorAll(".drawing")) drawn.scrollLeft = (drawn.scrollWidth - drawn.clientWidth) / 2;

  // Lights up everything with a key of an element, and shows the first of it in the other panes.
  const light = (from) => {
    const lit = new Set(from ? keysOf(from).flatMap((key) => byKey.get(key)) : []);
    for (const element of all) {
      element.classList.toggle("on", lit.has(element));
      if (element.tabIndex === 0) element.setAttribute("aria-pressed", String(kept !== null && lit.has(element)));
    }
    for (const pane of panes) {
      const first = [...lit].find((element) => pane.contains(element));
      if (first && !pane.contains(from)) pane.scrollTop = first.offsetTop - pane.clientHeight / 3;
    }
  };
  const keep = (element) => light((kept = kept === element ? null : element));
  const target = (event) => event.target.closest?.("[data-l]");

  document.addEventListener("pointerover", (event) => {
    if (!kept && event.pointerType === "mouse") light(target(event));
  });
  document.addEventListener("focusin", (event) => {
    if (!kept && target(event)) light(target(event));
  });
  document.addEventListener("click", (event) => {
    if (target(event)) keep(target(event));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") light((kept = null));
    if (!target(event) || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    keep(target(event));
  });
})();
