// The form and its YAML, kept alike by the server: a change of either goes there, and both show what came of it.
(() => {
  const { $, all, go, post, say } = kedge;
  const root = $(".editor");
  const form = $("#form"), yaml = $("#yaml"), verdict = $("#verdict"), plan = $("#plan"), start = $("#start");
  const state = { base: root.dataset.base, shape: root.dataset.shape, saved: yaml.value, typing: false };
  const file = root.dataset.file;
  const pathOf = (element) => element.closest("[data-path]").dataset.path;
  const places = () => new Map(all("[data-path]", form).map((place) => [place.dataset.path, place]));

  // One message at a time, in the order of the changes: each names the text that it is a change of.
  let queue = Promise.resolve();
  const inOrder = (work) => (queue = queue.then(work).catch((error) => {
    say(error.message, true);
  }));

  const show = (problems, top, { warnings = {} } = {}) => {
    for (const line of all(".problem", form)) { line.hidden = true; line.textContent = ""; line.classList.remove("warning"); }
    for (const place of all(".is-bad", form)) place.classList.remove("is-bad");
    const known = places();
    const put = (path, texts, isWarning) => {
      const place = known.get(path);
      if (!place) return;
      const line = $(":scope > .problem", place);
      line.textContent = [line.textContent, ...texts].filter(Boolean).join("\n");
      line.hidden = false;
      line.classList.toggle("warning", isWarning);
      $("[data-set]", place)?.setAttribute("aria-invalid", String(!isWarning));
      if (isWarning) return;
      place.classList.add("is-bad");
      for (let outer = place; outer; outer = outer.parentElement?.closest("details")) if (outer.tagName === "DETAILS") { outer.open = true; outer.classList.add("is-bad"); }
    };
    for (const control of all("[aria-invalid]", form)) control.removeAttribute("aria-invalid");
    for (const [path, texts] of Object.entries(warnings)) put(path, texts, true);
    for (const [path, texts] of Object.entries(problems)) put(path, texts, false);
    const list = $("#top-problems");
    list.replaceChildren(...top.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
    list.hidden = !top.length;
    return Object.keys(problems).length + top.length;
  };

  const redraw = (html) => {
    const open = new Map(all("details[data-path]", form).map((group) => [group.dataset.path, group.open]));
    const active = document.activeElement;
    const held = active && form.contains(active) ? { path: pathOf(active), value: active.value, kind: active.dataset } : null;
    form.innerHTML = html;
    for (const group of all("details[data-path]", form)) if (open.has(group.dataset.path)) group.open = open.get(group.dataset.path);
    if (!held) return;
    const control = [...places()].find(([path]) => path === held.path)?.[1];
    const next = control && ("set" in held.kind ? $("[data-set]", control) : $("select, input", control));
    if (next) { if ("set" in held.kind && state.typing) next.value = held.value; next.focus({ preventScroll: true }); }
  };

  const apply = (reply, { fromYaml = false } = {}) => {
    if (reply.refused) { show({ ...state.problems, ...reply.refused }, state.top ?? []); return; }
    state.base = reply.hash;
    state.problems = reply.problems;
    state.top = reply.top;
    form.classList.toggle("stale", !reply.is_readable);
    $(".yaml").classList.toggle("bad", !reply.is_readable);
    if (reply.is_readable) {
      if (reply.html !== undefined) redraw(reply.html);
      state.shape = reply.shape;
      for (const [path, place] of places()) {
        const control = $(":scope > .control > [data-set]", place);
        if (!control || !(path in reply.values) || (control === document.activeElement && state.typing)) continue;
        const value = reply.values[path];
        if (control.tagName === "SELECT" && ![...control.options].some((option) => option.value === value)) control.add(new Option(value, value));
        control.value = value;
      }
    }
    if (!fromYaml) yaml.value = reply.text;
    state.saved = reply.text;
    const wrong = show(reply.problems, reply.top);
    verdict.textContent = wrong ? `${wrong} to put right` : "checking data and models …";
    if (wrong) plan.innerHTML = ""; else soon();
  };

  const change = (operation, path, text = "") => inOrder(async () => {
    apply(await post("/recipe/change", { file, base: state.base, shape: state.shape, operation, path: JSON.parse(path), text }));
  });

  form.addEventListener("input", (event) => { state.typing = event.target.dataset.set !== undefined && event.target.tagName !== "SELECT"; });
  form.addEventListener("change", (event) => {
    const target = event.target, data = target.dataset;
    state.typing = false;
    if (data.set !== undefined) change("set", pathOf(target), target.value);
    else if (data.kind !== undefined) change("kind", pathOf(target), target.value);
    else if (data.on !== undefined) change(target.checked ? "on" : "off", pathOf(target));
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("input[data-set]")) { event.preventDefault(); event.target.blur(); }
  });
  form.addEventListener("click", (event) => {
    if (event.target.dataset?.remove !== undefined) change("remove_stage", pathOf(event.target));
  });
  $("#add-stage").addEventListener("submit", (event) => {
    event.preventDefault();
    const { stage, kind } = event.target.elements, line = $(".problem", event.target);
    line.hidden = true;
    inOrder(async () => {
      const path = ["stages", stage.value];
      const reply = await post("/recipe/change", { file, base: state.base, shape: state.shape, operation: "add_stage", path, text: kind.value });
      if (reply.refused) { line.textContent = Object.values(reply.refused).flat().join("\n"); line.hidden = false; return; }
      stage.value = "";
      apply(reply);
    });
  });

  let typing;
  yaml.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(saveYaml, 500);
  });
  yaml.addEventListener("blur", () => { clearTimeout(typing); saveYaml(); });
  const saveYaml = () => inOrder(async () => {
    const text = yaml.value;
    if (text === state.saved) return;
    apply(await post("/recipe/text", { file, base: state.base, shape: state.shape, text }), { fromYaml: true });
  });

  // What takes longer: data and models. It waits until nothing has changed for a moment, and never runs twice at once.
  let waiting, isChecking = false, isAgain = false;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(check, 700); };
  const check = async () => {
    if (isChecking) { isAgain = true; return; }
    isChecking = true;
    const base = state.base;
    try {
      const reply = await post("/recipe/check", { file, base });
      if (state.base === base) report(reply);
    } catch (error) {
      if (error.status !== 409) verdict.textContent = error.message;
    }
    isChecking = false;
    if (isAgain || state.base !== base) { isAgain = false; if (!Object.keys(state.problems ?? {}).length && !state.top?.length) soon(); }
  };
  const report = (reply) => {
    const wrong = show(reply.problems, reply.top, { warnings: reply.warnings });
    verdict.textContent = wrong ? `${wrong} to put right` : "fit to run";
    if (reply.plan !== undefined) plan.innerHTML = reply.plan;
    return wrong;
  };

  start.addEventListener("click", () => inOrder(async () => {
    start.disabled = true;
    verdict.textContent = "checking, then starting …";
    try {
      const reply = await post("/run/start", { file, base: state.base });
      if (reply.go) return go(reply.go);
      report(reply);
      ($(".is-bad .problem:not([hidden])", form) ?? $("#top-problems")).scrollIntoView({ block: "center" });
    } catch (error) { verdict.textContent = ""; throw error; } finally { start.disabled = false; }
  }));

  state.problems = JSON.parse($("#problems").textContent);
  state.top = all("#top-problems li").map((line) => line.textContent);
  if (matchMedia("(max-width: 47rem)").matches) $(".yaml").open = false;
  if (show(state.problems, state.top)) verdict.textContent = "some settings are to put right"; else { verdict.textContent = "checking data and models …"; soon(); }
})();
