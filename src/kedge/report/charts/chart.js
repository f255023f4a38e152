// Values under the pointer, or with the arrow keys once a chart has the focus. The charts are complete without this.
(() => {
  const point = (svg, place) => {
    const data = svg.hover ??= JSON.parse(svg.dataset.hover);
    if (!data.x.length) return;
    svg.place = Math.max(0, Math.min(data.x.length - 1, place));
    const values = data.lines.filter((line) => line.values[svg.place] !== null)
      .map((line) => (data.lines.length > 1 ? `${line.name} ` : "") + line.values[svg.place]);
    const cursor = svg.querySelector(".cursor");
    cursor.setAttribute("x1", data.x[svg.place]);
    cursor.setAttribute("x2", data.x[svg.place]);
    cursor.setAttribute("visibility", "visible");
    svg.parentElement.querySelector(".reading").textContent = `${data.at[svg.place]}: ${values.join(" · ") || "–"}`;
  };
  const nearest = (svg, clientX) => {
    const data = svg.hover ??= JSON.parse(svg.dataset.hover);
    const box = svg.getBoundingClientRect();
    const x = (clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    data.x.forEach((at, place) => { if (Math.abs(at - x) < Math.abs(data.x[best] - x)) best = place; });
    return best;
  };
  const clear = (svg) => {
    svg.place = undefined;
    svg.querySelector(".cursor").setAttribute("visibility", "hidden");
    svg.parentElement.querySelector(".reading").textContent = "";
  };
  const chart = (event) => event.target.closest?.("svg[data-hover]");
  document.addEventListener("pointermove", (event) => {
    const svg = chart(event);
    if (svg) point(svg, nearest(svg, event.clientX));
  });
  document.addEventListener("pointerout", (event) => {
    const svg = chart(event);
    if (svg && !svg.contains(event.relatedTarget)) clear(svg);
  });
  document.addEventListener("keydown", (event) => {
    const svg = chart(event);
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!svg || move === undefined) return;
    event.preventDefault();
    const last = JSON.parse(svg.dataset.hover).x.length - 1;
    point(svg, svg.place === undefined ? (move < 0 ? last : 0) : svg.place + move);
  });
  // A link to a part that is folded unfolds it.
  const unfold = () => {
    const part = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (part?.tagName === "DETAILS") part.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();
  document.addEventListener("focusout", (event) => { const svg = chart(event); if (svg) clear(svg); });
})();
