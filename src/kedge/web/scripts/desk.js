// The desk: one item at a time, judged by keys.
(() => {
  const { $, actions, all, diff, drawOrder, go, isText, link, move, page, post, pressed, project, readOrder, say } = kedge;
  const place = $("#place");
  if (!place) return;

  const isPractice = page === "start";
  const routes = isPractice ? { next: "/start/next", judge: "/start/practise" } : { next: "/work/next", judge: "/work/judge" };
  const asked = () => ({ project, guideline, ...(page === "rank" ? { kind: "rank" } : {}) });
  const KEPT = `kedge-judgment-${page}-${project}`;
  const mine = $("#mine");
  let guideline = 0;
  let pending = null; // a judgment that is not acknowledged yet
  let last = null; // the one before, which can be undone
  let flags = {};
  let clock = { active: 0, idle: 0, at: performance.now(), touched: performance.now() };
  let isPaused = false;
  let today = Number(mine?.dataset.today ?? 0);

  const task = () => $("#task");
  const form = () => $("#judge");
  const tick = () => {
    const now = performance.now();
    const isActive = !document.hidden && !isPaused && now - clock.touched < 60000;
    clock[isActive ? "active" : "idle"] += (now - clock.at) / 1000;
    clock.at = now;
  };
  setInterval(tick, 1000);
  for (const name of ["keydown", "pointerdown", "pointermove", "wheel", "scroll"]) {
    document.addEventListener(name, () => { clock.touched = performance.now(); }, { capture: true, passive: true });
  }
  const count = (by) => {
    today = Math.max(0, today + by);
    if (!mine) return;
    $("b", mine).textContent = today;
    $("progress", mine).value = Math.min(today, mine.dataset.goal);
  };
  const show = (reply, filled = null) => {
    if (reply.go) return go(reply.go);
    if (reply.guideline) {
      if (guideline && !isPractice) say("The guideline is new: press ? to read it.");
      guideline = reply.guideline.number;
      $("#guideline").innerHTML = reply.guideline.html;
    }
    place.setAttribute("aria-busy", "false");
    flags = {};
    if (!reply.task) {
      place.innerHTML = '<div class="thanks"><h2>Nothing is left to do</h2><p class="soft">Thank you. New items appear here when there are some; load the page again later.</p><button type="button" data-do="undo">Undo the last one <kbd>u</kbd></button></div>';
    } else {
      place.innerHTML = reply.task.html;
      if (filled) refill(filled);
      task().focus({ preventScroll: true });
    }
    scrollTo(0, 0);
    if (reply.progress) $("#practice").textContent = reply.progress;
    for (const button of all('[data-do="undo"]')) button.disabled = !last;
    clock = { active: 0, idle: 0, at: performance.now(), touched: performance.now() };
    for (const name of ["diff", "link"]) if (pressed(name)) ({ diff, link })[name](true);
    drawOrder();
  };
  const refill = (decision) => {
    const pick = (name, value) => { const field = $(`input[name="${name}"][value="${value}"]`, form()); if (field) field.checked = true; };
    if (decision.verdict === "step") pick("step", decision.outcome);
    if (decision.verdict === "both_bad") pick("step", "both_bad");
    if (decision.verdict === "thumb") pick("thumb", decision.outcome);
    for (const [axis, step] of Object.entries(decision.axes ?? {})) pick(`axis-${axis}`, step);
    if (decision.edit && $("#edit")) { openEdit(); $("#edit").value = decision.edit; }
    if (decision.order && $("#order")) $("#order").value = decision.order;
    keepFlags(decision.flags ?? {});
  };
  const next = async () => {
    try { show(await post(routes.next, asked())); } catch (error) { trouble(error, next); }
  };
  const trouble = (error, again) => {
    if (error.status === 401) return say("You are logged out. Log in again in another tab, then press Enter here.", true);
    if (error.status && error.status < 500 && error.status !== 429) return say(error.message, true);
    say(pending ? "Offline: your judgment is kept here, and is sent once the server is back." : "The server cannot be reached; trying again.", true);
    setTimeout(again, 2000);
  };

  // What the person has decided; a text where something is missing.
  const decided = () => {
    const { kind } = task().dataset;
    const chosen = (name) => $(`input[name="${name}"]:checked`, form())?.value;
    const edit = $("#edit") && !$(".edit").hidden ? $("#edit").value.trim() : "";
    const decision = { flags, ...(edit && edit !== $("#edit").dataset.from ? { edit } : {}) };
    if (kind === "pair") {
      const step = chosen("step");
      if (step === undefined) return "Choose a step first: 1 to 7, t for a tie, b where both are bad.";
      if (step === "both_bad") return { ...decision, verdict: "both_bad" };
      const axes = all("[data-scale^=axis-]", form()).flatMap((scale) => {
        const value = chosen(scale.dataset.scale);
        return value === undefined ? [] : [[scale.dataset.scale.slice(5), Number(value)]];
      });
      return { ...decision, verdict: "step", outcome: Number(step), ...(axes.length ? { axes: Object.fromEntries(axes) } : {}) };
    }
    if (kind === "thumb") {
      const thumb = chosen("thumb");
      return thumb === undefined ? "Choose first: 1 good, 2 bad." : { ...decision, verdict: "thumb", outcome: Number(thumb) };
    }
    if (kind === "write") return edit ? { ...decision, verdict: "written", edit } : "Write an answer first.";
    const { ranking, problem } = readOrder($("#order").value, all(".answer").length);
    return problem ? problem : { ...decision, verdict: "ranking", ranking, order: $("#order").value };
  };
  const send = (decision = decided()) => {
    if (pending) return attempt();
    if (!task() || !$("#feedback").hidden) return isPractice && goOn();
    if (typeof decision === "string") return say(decision, true);
    tick();
    const { order, ...sent } = decision;
    const timed = { ...sent, seconds: clock.active, idle_seconds: clock.idle };
    pending = { body: { ...asked(), assignment: task().dataset.assignment, decision: timed }, decision };
    sessionStorage.setItem(KEPT, JSON.stringify(pending));
    attempt();
  };
  // The id of the assignment makes it harmless to send the same judgment again.
  let isSending = false;
  const attempt = async () => {
    if (isSending || !pending) return;
    isSending = true;
    document.body.classList.add("is-waiting");
    try {
      const reply = await post(routes.judge, pending.body);
      last = isPractice || pending.decision.verdict === "skip" ? last : { assignment: pending.body.assignment, decision: pending.decision };
      settled();
      say("");
      if (isPractice) feedback(reply.feedback);
      else { count(1); show(reply); }
    } catch (error) {
      if (error.status && error.status < 500 && ![401, 429].includes(error.status)) settled();
      trouble(error, attempt);
    } finally {
      isSending = false;
      document.body.classList.remove("is-waiting");
    }
  };
  const settled = () => { pending = null; sessionStorage.removeItem(KEPT); };
  const undo = async () => {
    if (!last || pending) return say("There is nothing to undo.");
    const { assignment, decision } = last;
    try {
      const reply = await post("/work/undo", { ...asked(), assignment, current: task()?.dataset.assignment ?? "" });
      last = null;
      count(-1);
      show(reply, decision);
      say("Undone: decide again.");
    } catch (error) { say(error.message, true); }
  };
  const feedback = (html) => {
    $("#feedback").innerHTML = html;
    $("#feedback").hidden = false;
    document.body.classList.add("has-feedback");
    $("#feedback").focus({ preventScroll: true });
  };
  const goOn = () => { $("#feedback").hidden = true; document.body.classList.remove("has-feedback"); next(); };

  const openEdit = () => {
    const box = $(".edit");
    if (!box) return say("This project asks for no better answers.");
    if (box.hidden) {
      box.hidden = false;
      $('[data-do="edit"]')?.setAttribute("aria-expanded", "true");
      const step = Number($('input[name="step"]:checked', form())?.value ?? 0);
      const better = all(".answer")[step > 0 ? 1 : 0];
      const from = better ? all(".text", better).map((text) => text.textContent).join("\n\n") : "";
      Object.assign($("#edit"), { value: from });
      $("#edit").dataset.from = from.trim();
    }
    $("#edit").focus();
    box.scrollIntoView({ block: "center" });
  };
  const keepFlags = (given) => {
    flags = given;
    if ($("#flags")) $("#flags").textContent = Object.keys(flags).length || "";
  };
  const ask = (name) => {
    const dialog = $(`#${name}`);
    if (name === "flag" || name === "skip") $("form", dialog).reset();
    if (name === "flag") for (const field of all("input[type=checkbox]", dialog)) field.checked = field.name in flags;
    dialog.showModal();
  };
  $("#flag form").addEventListener("submit", () => {
    const words = $("#flag-words").value;
    keepFlags(Object.fromEntries(all("#flag input:checked").map((field) => [field.name, words])));
    $("#flag").close();
  });
  $("#skip form").addEventListener("submit", () => {
    const reason = $("#skip-words").value.trim() || $("#skip input:checked")?.value;
    if (!reason) return;
    $("#skip").close();
    send({ verdict: "skip", reason, flags });
  });
  $("#pause").addEventListener("close", () => { tick(); isPaused = false; clock.touched = performance.now(); });

  Object.assign(actions, {
    unfold: () => { const open = $(".prompt").classList.toggle("open"); $(".unfold")?.setAttribute("aria-expanded", open); },
    edit: openEdit, undo,
    flag: () => ask("flag"), skip: () => !isPractice && ask("skip"), help: () => ask("help"),
    pause: () => { tick(); isPaused = true; ask("pause"); },
    diff: () => diff(!pressed("diff")), link: () => link(!pressed("link")),
    next: goOn,
  });
  document.addEventListener("submit", (event) => { if (event.target.id === "judge") send(); });
  document.addEventListener("input", (event) => { if (event.target.id === "order") drawOrder(); });

  const LETTERS = { e: "edit", d: "diff", f: "flag", s: "skip", u: "undo", m: "markdown", l: "link", o: "unfold", p: "pause", "?": "help" };
  const pick = (name, value) => {
    const field = $(`input[name="${name}"][value="${value}"]`, form());
    field?.click();
    if (field && !field.disabled) $("#spoken").textContent = field.closest("label").textContent; // chosen from afar: told to who cannot see it
    return field;
  };
  const digit = (number) => {
    const dialog = $("dialog[open]");
    if (dialog) return void all("input[type=radio], input[type=checkbox]", dialog)[number - 1]?.click();
    const { kind } = task()?.dataset ?? {};
    if (kind === "thumb") return void pick("thumb", { 1: 1, 2: -1 }[number]);
    if (kind !== "pair") return;
    const axis = document.activeElement.closest("[data-scale^=axis-]")?.dataset.scale;
    if (number > 7) return;
    const field = pick(axis ?? "step", number - 4);
    if (axis) field.focus();
  };
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (key === "Enter" && event.ctrlKey && target.id === "edit") return send();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isText(target)) { if (key === "Escape" && target.id === "edit") { event.preventDefault(); task().focus(); } return; }
    const dialog = $("dialog[open]");
    const done = () => event.preventDefault();
    if (/^[1-9]$/.test(key) && (dialog || !$("#order"))) { done(); return digit(Number(key)); }
    if (dialog) {
      if (key === "Enter" && !target.matches("button") && $("form", dialog)) { done(); $("form", dialog).requestSubmit(); }
      return;
    }
    const card = target.matches(".answer") && $("#order") ? target : null;
    if (card && /^Arrow/.test(key)) { done(); return move(card, /Up|Left/.test(key) ? -1 : 1, false); }
    if (card && key === "=") { done(); return move(card, 0, true); }
    if ($("#order") && /^[1-9=> ]$/.test(key) && target.id !== "order" && !target.matches("button, a, summary")) return $("#order").focus();
    if (key === "Tab" && !event.shiftKey && $(".axes") && (target === document.body || target === task())) {
      done();
      $(".axes").open = true;
      const scale = $(".axes fieldset");
      return ($("input:checked", scale) ?? $("input", scale)).focus();
    }
    if (key === "Enter") { if (!target.matches("button, a, summary")) { done(); send(); } return; }
    if (key === "t" && task()?.dataset.kind === "pair") { done(); return void pick("step", 0); }
    if (key === "b" && task()?.dataset.kind === "pair") { done(); return void pick("step", "both_bad"); }
    if (LETTERS[key]) { done(); actions[LETTERS[key]](); }
  });
  addEventListener("online", attempt);

  const kept = sessionStorage.getItem(KEPT);
  if (kept) { pending = JSON.parse(kept); attempt(); } else next();
})();
