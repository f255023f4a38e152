// The script of all pages: messages to the server, forms, and the desk on which items are judged by keys.
(() => {
  const { page, project } = document.body.dataset;
  const token = new URLSearchParams(location.search).get("token");
  const csrf = document.querySelector("meta[name=csrf]").content;
  const $ = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const state = $("#state");
  const say = (text, isBad = false) => { state.textContent = text; state.classList.toggle("bad", isBad); };
  const go = (path) => {
    const target = new URL(path, location.href);
    if (token) target.searchParams.set("token", token);
    location.assign(target);
  };
  if (token) for (const link of all('a[href^="/"]')) link.search += `${link.search ? "&" : "?"}token=${encodeURIComponent(token)}`;

  // The reply, or an error whose `status` is 0 where nothing came back.
  const post = async (path, body) => {
    const headers = { "Content-Type": "application/json", "X-CSRF-Token": csrf, ...(token ? { "X-Kedge-Token": token } : {}) };
    let answer;
    try {
      answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    } catch {
      throw Object.assign(new Error("the server cannot be reached"), { status: 0 });
    }
    if (answer.ok) return (answer.headers.get("Content-Type") ?? "").startsWith("application/json") ? answer.json() : answer;
    const told = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(told.error ?? `the server answered ${answer.status}`), { status: answer.status });
  };

  // Forms and buttons that say where they send what: data-post, and data-then for the page after it.
  const values = (form) => {
    const body = {};
    for (const field of form.elements) {
      if (!field.name || (field.type === "radio" && !field.checked)) continue;
      const value = field.type === "checkbox" ? field.checked : field.value;
      const plain = field.dataset.number !== undefined ? Number(value) : value;
      if (field.dataset.list !== undefined) (body[field.dataset.list] ??= []).push(plain);
      else body[field.name] = plain;
    }
    return body;
  };
  const deliver = async (element, body) => {
    const buttons = element.matches("button") ? [element] : all("button", element);
    for (const button of buttons) button.disabled = true;
    try {
      const reply = await post(element.dataset.post, body);
      if (reply instanceof Response) return await save(reply);
      if (reply.say) say(reply.say);
      const place = element.dataset.into && $(element.dataset.into);
      if (place && reply.html !== undefined) place.innerHTML = reply.html;
      if (element.dataset.clear !== undefined) element.reset();
      if (place?.id === "talk") talked();
      if (reply.go || element.dataset.then) go(reply.go ?? element.dataset.then);
    } catch (error) {
      say(error.message, true);
    } finally {
      for (const button of buttons) button.disabled = false;
    }
  };
  const save = async (reply) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await reply.blob());
    link.download = /filename="([^"]+)"/.exec(reply.headers.get("Content-Disposition") ?? "")?.[1] ?? "labels.jsonl";
    link.click();
    URL.revokeObjectURL(link.href);
  };
  document.addEventListener("submit", (event) => {
    event.preventDefault(); // nothing is ever posted as a form
    const form = event.target;
    if (!form.dataset.post) return;
    const body = values(form);
    if (form.dataset.hash !== undefined) body[form.dataset.hash] = location.hash.slice(1);
    if (project && !("project" in body) && form.dataset.alone === undefined) body.project = project;
    deliver(form, body);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button");
    if (button?.dataset.close !== undefined) button.closest("dialog").close();
    if (button?.dataset.post) {
      deliver(button, { ...JSON.parse(button.dataset.body ?? "{}"), ...(project && button.dataset.body ? { project } : {}) });
    }
  });
  for (const place of all("[data-load]")) {
    const target = new URL(place.dataset.load, location.href);
    if (token) target.searchParams.set("token", token);
    fetch(target).then(async (answer) => { if (answer.ok) place.innerHTML = await answer.text(); })
      .catch(() => { place.textContent = "the server cannot be reached"; });
  }

  // "2 1=3 4": places of the answers, or what is wrong with it.
  const readOrder = (text, answers) => {
    const groups = text.trim().split(/[\s>]+/).filter(Boolean).join(" ").replace(/\s*=\s*/g, "=").split(" ").filter(Boolean)
      .map((group) => group.split("=").filter(Boolean).map(Number));
    const ranking = Array(answers).fill(0);
    let before = 0;
    for (const group of groups) {
      for (const answer of group) {
        if (!(answer >= 1 && answer <= answers)) return { problem: `There is no answer ${answer}.`, ranking };
        if (ranking[answer - 1]) return { problem: `Answer ${answer} is there twice.`, ranking };
        ranking[answer - 1] = before + 1;
      }
      before += group.length;
    }
    const missing = ranking.flatMap((rank, place) => (rank ? [] : [place + 1]));
    return { ranking, problem: missing.length ? `Still to place: ${missing.join(", ")}.` : "" };
  };
  // Views
  const pressed = (name) => $(`.views [data-do="${name}"]`)?.getAttribute("aria-pressed") === "true";
  const press = (name, value) => $(`.views [data-do="${name}"]`)?.setAttribute("aria-pressed", value);
  const markdown = (value) => {
    document.body.classList.toggle("shows-markdown", value);
    press("markdown", value);
    localStorage.setItem("kedge-markdown", value);
    if (value && pressed("diff")) actions.diff();
  };
  const actions = { markdown: () => markdown(!pressed("markdown")) };
  document.addEventListener("click", (event) => actions[event.target.closest?.("[data-do]")?.dataset.do]?.());
  try { markdown(localStorage.getItem("kedge-markdown") === "true"); } catch { /* a browser that keeps nothing */ }

  // Review: a decision in the order of the answers that is shown.
  const chosenIn = (form, name) => $(`input[name="${name}"]:checked`, form)?.value;
  const ruling = (form) => {
    const reason = form.elements.why.value.trim();
    const why = reason ? { reason } : {};
    if (form.dataset.kind === "rank") {
      const { ranking, problem } = readOrder(form.elements.order.value, all(".answer", form.closest("article")).length);
      return problem || { verdict: "ranking", ranking, ...why };
    }
    const value = chosenIn(form, form.dataset.kind === "thumb" ? "thumb" : "step");
    if (value === undefined) return "Choose first what is right.";
    if (value === "both_bad") return { verdict: "both_bad", ...why };
    return { verdict: form.dataset.kind === "thumb" ? "thumb" : "step", outcome: Number(value), ...why };
  };
  const settle = async (form, path, body) => {
    try {
      say((await post(path, { project, item: form.dataset.item, ...body })).say);
      const article = form.closest("article");
      const following = article.nextElementSibling ?? article.previousElementSibling;
      article.remove();
      if (!$("article[data-item]")) location.reload();
      else $("input", following)?.focus();
    } catch (error) { say(error.message, true); }
  };
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.dataset.decide === undefined) return;
    const decision = ruling(form);
    if (typeof decision === "string") say(decision, true);
    else settle(form, "/review/decide", { decision });
  });
  document.addEventListener("click", (event) => {
    if (event.target.dataset?.ask === undefined) return;
    const form = event.target.form;
    settle(form, "/review/ask", { words: form.elements.why.value });
  });

  // Chat: Enter sends, digits choose a step where nothing is being written.
  const talked = () => {
    say("");
    const vote = $(".vote");
    if (vote) { vote.scrollIntoView({ block: "end" }); $("input", vote).focus({ preventScroll: true }); } else $("#say").focus();
  };
  if (page === "chat") {
    document.addEventListener("keydown", (event) => {
      const { key, target } = event;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.id === "say" && key === "Enter" && !event.shiftKey) { event.preventDefault(); $("#compose").requestSubmit(); }
      if (target.matches("textarea, input:not([type=radio])")) return;
      if (/^[1-7]$/.test(key)) { event.preventDefault(); all(".vote .steps input")[key - 1]?.click(); }
      if (key === "b") $('.vote input[value="both_bad"]')?.click();
      if (key === "m") actions.markdown();
    });
  }

  const isText = (target) => target.matches?.("textarea, input:not([type=radio], [type=checkbox], #order)");
  const place = $("#place");
  if (!place) return;

  // The desk: one item at a time.
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

  const drawOrder = () => {
    const field = $("#order");
    if (!field) return;
    const cards = all(".answer");
    const { ranking, problem } = readOrder(field.value, cards.length);
    cards.forEach((card, number) => {
      const rank = ranking[number];
      const ties = rank && ranking.filter((other) => other === rank).length > 1;
      $(".place", card).textContent = rank ? `${ties ? "tied " : ""}${rank}.` : "";
      card.classList.toggle("best", rank === 1);
    });
    $("#order-said").textContent = field.value.trim() ? problem || "Complete: Enter sends it." : "";
  };
  // With the arrows a card goes one place up or down; = ties it with the one before.
  const move = (card, by, isTie) => {
    const cards = all(".answer");
    const { ranking } = readOrder($("#order").value, cards.length);
    const places = [...new Set(ranking.filter(Boolean))].sort((a, b) => a - b);
    const groups = places.map((rank) => ranking.flatMap((other, number) => (other === rank ? [number + 1] : [])));
    const answer = Number(card.dataset.answer);
    let from = groups.findIndex((group) => group.includes(answer));
    if (from < 0) { groups.push([answer]); from = groups.length - 1; by = 0; }
    if (isTie) {
      if (from > 0) { groups[from - 1].push(answer); groups[from] = groups[from].filter((other) => other !== answer); }
    } else if (by) {
      const isAlone = groups[from].length === 1;
      groups[from] = groups[from].filter((other) => other !== answer);
      groups.splice(Math.max(0, isAlone ? from + by + (by > 0) : from + (by > 0)), 0, [answer]);
    }
    $("#order").value = groups.filter((group) => group.length).map((group) => group.join("=")).join(" ");
    drawOrder();
  };

  // Word by word
  const diff = (value) => {
    press("diff", value);
    if (value && pressed("markdown")) markdown(false);
    const texts = all(".answer").map((answer) => all(".text", answer));
    for (const text of texts.flat()) text.textContent = text.textContent;
    if (!value || texts.length < 2) return;
    const words = texts.map((parts) => parts.flatMap((part) => part.textContent.match(WORDS) ?? []));
    texts.slice(1).forEach((parts, number) => {
      const kept = common(words[0], words[number + 1]);
      if (!kept) return say("These answers are too long to compare word by word.");
      if (texts.length === 2) mark(texts[0], kept[0], "gone");
      mark(parts, kept[1], "new");
    });
  };
  // Which words of both are in their longest common sequence.
  const common = (first, second) => {
    const [n, m] = [first.length, second.length];
    if (n * m > 9e6) return null;
    const best = Array.from({ length: n + 1 }, () => new Uint16Array(m + 1));
    for (let i = n - 1; i >= 0; i--) for (let j = m - 1; j >= 0; j--) {
      best[i][j] = first[i] === second[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    }
    const kept = [Array(n).fill(false), Array(m).fill(false)];
    for (let i = 0, j = 0; i < n && j < m;) {
      if (first[i] === second[j]) { kept[0][i++] = kept[1][j++] = true; }
      else if (best[i + 1][j] >= best[i][j + 1]) i++;
      else j++;
    }
    return kept;
  };
  const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
  const mark = (parts, kept, name) => {
    let at = 0;
    for (const part of parts) {
      const words = (part.textContent.match(WORDS) ?? []).map((word) => [word, !kept[at++]]);
      const nodes = [];
      words.forEach(([word, isChanged], number) => {
        // A space between two changed words is marked with them.
        const isMarked = word.trim() ? isChanged : (words[number - 1]?.[1] && words[number + 1]?.[1]);
        const lastNode = nodes.at(-1);
        if (lastNode && lastNode.isMarked === Boolean(isMarked)) lastNode.text += word;
        else nodes.push({ text: word, isMarked: Boolean(isMarked) });
      });
      part.replaceChildren(...nodes.map(({ text, isMarked }) => (isMarked
        ? Object.assign(document.createElement("mark"), { className: name, textContent: text }) : document.createTextNode(text))));
    }
  };
  let isFollowing = false;
  const link = (value) => press("link", value);
  document.addEventListener("scroll", (event) => {
    const from = event.target;
    if (!pressed("link") || isFollowing || !from.matches?.(".answer .said")) return;
    isFollowing = true;
    const share = from.scrollTop / Math.max(1, from.scrollHeight - from.clientHeight);
    for (const other of all(".answer .said")) {
      if (other !== from) other.scrollTop = share * (other.scrollHeight - other.clientHeight);
    }
    requestAnimationFrame(() => { isFollowing = false; });
  }, { capture: true, passive: true });

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
    if (field) $("#spoken").textContent = field.closest("label").textContent; // chosen from afar: told to who cannot see it
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
