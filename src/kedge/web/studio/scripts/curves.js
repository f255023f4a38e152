// Runs and metrics that were picked, drawn by the server; dragging across the chart asks for a part of it.
(() => {
  const { $, all } = kedge;
  const form = $("#curves");
  if (!form) return;
  const token = new URLSearchParams(location.search).get("token");
  const list = $("#metrics"), chart = $("#chart"), whole = $("#zoom-out");
  const usual = ["reward/mean", "train/loss", "heldout/loss"]; // picked until the reader picks
  let zoom = null, revision = -1, isPicked = false;
  const runs = () => all("[name=run]:checked", form).map((box) => ["run", box.value]);
  const values = () => [
    ...runs(), ...[...list.selectedOptions].map((option) => ["metric", option.value]),
    ["smoothing", form.elements.smoothing.value], ["is_scaled", form.elements.is_scaled.checked],
    ...(zoom ? [["first", zoom[0]], ["last", zoom[1]]] : []), ["token", token],
  ];
  const draw = async () => {
    const answer = await fetch(`/curves/chart?${new URLSearchParams(values())}`).catch(() => null);
    if (answer?.ok) chart.innerHTML = await answer.text();
    whole.hidden = !zoom;
  };
  const refresh = async (isForced) => {
    const answer = await fetch(`/curves/metrics?${new URLSearchParams([...runs(), ["token", token]])}`).catch(() => null);
    if (!answer?.ok) return;
    const news = await answer.json();
    const names = news.metrics;
    if (names.join() !== [...list.options].map((option) => option.value).join()) {
      const picked = isPicked ? [...list.selectedOptions].map((option) => option.value) : usual;
      list.replaceChildren(...names.map((name) => new Option(name, name, false, picked.includes(name))));
      if (!list.selectedOptions.length && list.options.length) list.options[0].selected = true;
    }
    if (isForced || news.revision !== revision) { revision = news.revision; await draw(); }
  };
  const look = async () => {
    if (!document.hidden && !document.querySelector("#chart svg:hover, #chart svg:focus")) await refresh(false);
    setTimeout(look, 2000);
  };
  let redrawing;
  form.addEventListener("input", (event) => {
    if (event.target === list) isPicked = true;
    const width = form.elements.smoothing.value;
    $("output", form).textContent = width > 1 ? `mean of ${width} steps` : "off";
    clearTimeout(redrawing);
    redrawing = setTimeout(() => refresh(true), 120);
  });
  form.addEventListener("click", (event) => {
    const kind = event.target.dataset?.export;
    if (kind) location.assign(`/curves/export.${kind}?${new URLSearchParams(values())}`);
  });
  whole.addEventListener("click", () => { zoom = null; draw(); });

  // From a place on the screen to a step: the frame of the chart says where its axis begins and ends.
  const stepAt = (svg, clientX) => {
    const frame = $("[data-first]", chart).dataset, box = svg.getBoundingClientRect();
    const x = (clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const share = Math.max(0, Math.min(1, (x - frame.left) / (frame.right - frame.left)));
    return Number(frame.first) + share * (frame.last - frame.first);
  };
  let drag = null;
  chart.addEventListener("pointerdown", (event) => {
    const svg = event.target.closest?.("svg");
    if (!svg || event.button) return;
    drag = { svg, from: event.clientX, mark: document.createElement("div") };
    drag.mark.className = "zoom";
    chart.append(drag.mark);
  });
  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const home = chart.getBoundingClientRect(), box = drag.svg.getBoundingClientRect();
    const left = Math.min(drag.from, event.clientX) - home.left;
    drag.mark.style.cssText = `left:${left}px;width:${Math.abs(event.clientX - drag.from)}px;top:${box.top - home.top}px;height:${box.height}px`;
  });
  document.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { svg, from, mark } = drag;
    drag = null;
    mark.remove();
    if (Math.abs(event.clientX - from) < 8) return;
    zoom = [stepAt(svg, Math.min(from, event.clientX)), stepAt(svg, Math.max(from, event.clientX))];
    draw();
  });
  look();
})();
