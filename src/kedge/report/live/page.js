// Asks for news once a second and puts them in; draws the metrics that were picked; searches samples as one types.
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const ask = (path, values) => fetch(`${path}?${new URLSearchParams([...values, ["token", token]])}`);
  const runs = document.getElementById("runs");
  const state = document.getElementById("state");
  const samples = document.getElementById("samples");
  const form = document.getElementById("search");
  const picker = document.getElementById("overlay");
  const chart = document.getElementById("overlay-chart");
  const usual = ["reward/mean", "gold/mean", "train/loss", "heldout/loss"]; // picked until the reader picks
  let revision = -1;
  const chosen = []; // the stage that was clicked on, by run

  const put = (html) => {
    const open = [...runs.querySelectorAll("details[open]")].map((details) => details.dataset.keep);
    runs.innerHTML = html;
    for (const details of runs.querySelectorAll("details")) details.open = open.includes(details.dataset.keep);
  };
  // A chart that is being read stays as it is until the pointer or the focus leaves it.
  const isRead = () => document.querySelector("svg:hover, svg:focus");
  const stages = () => [...chosen].map((stage) => ["stage", stage ?? ""]);
  const smoothing = () => picker.elements.smoothing.value;
  const offer = (names) => {
    const list = picker.elements.metric;
    if (names.join() === [...list.options].map((option) => option.value).join()) return;
    const picked = list.options.length ? [...list.selectedOptions].map((option) => option.value) : usual;
    list.replaceChildren(...names.map((name) => new Option(name, name, false, picked.includes(name))));
  };
  const draw = async () => {
    const picked = [...picker.elements.metric.selectedOptions].map((option) => ["metric", option.value]);
    const values = [...picked, ...stages(), ["smoothing", smoothing()], ["is_scaled", picker.elements.is_scaled.checked]];
    const answer = await ask("overlay", values).catch(() => null); // the line at the top says that it has ended
    if (answer?.ok) chart.innerHTML = await answer.text();
  };
  let redrawing;
  picker.addEventListener("input", () => {
    picker.querySelector("output").textContent = smoothing() > 1 ? `mean of ${smoothing()} steps` : "off";
    clearTimeout(redrawing);
    redrawing = setTimeout(() => { revision = -2; draw(); refresh(); }, 120);
  });
  picker.addEventListener("submit", (event) => event.preventDefault());
  const look = async () => {
    if (!document.hidden && !isRead()) await refresh();
    setTimeout(look, 1000);
  };
  const refresh = async () => {
    try {
      const answer = await ask("live", [["since", revision], ...stages(), ["smoothing", smoothing()]]);
      if (answer.status === 200) {
        const news = await answer.json();
        const isFirst = revision === -1;
        revision = news.revision;
        put(news.html);
        offer(news.metrics);
        draw();
        state.textContent = news.is_running ? "live" : "nothing is running any more";
        if (isFirst) find(0);
      } else if (answer.status !== 204) {
        state.textContent = `the server answered ${answer.status}`;
      }
    } catch {
      state.textContent = "kedge watch has ended; this is the last that was seen";
    }
  };
  runs.addEventListener("click", (event) => {
    const { run, stage } = event.target.dataset;
    if (stage === undefined) return;
    chosen[run] = stage;
    revision = -2; // ask for everything again
    refresh();
  });

  let lastSearch = 0;
  const find = async (first) => {
    const mine = ++lastSearch;
    const values = [["run", form.elements.run?.value ?? 0], ["q", form.elements.q.value], ["first", first]];
    const answer = await ask("samples", values).catch(() => null); // the line at the top says that it has ended
    if (mine === lastSearch && answer?.ok) samples.innerHTML = await answer.text();
  };
  let waiting;
  form.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => find(0), 150); });
  form.addEventListener("submit", (event) => { event.preventDefault(); find(0); });
  samples.addEventListener("click", (event) => {
    if (event.target.dataset.first !== undefined) find(event.target.dataset.first);
  });
  look();
})();
