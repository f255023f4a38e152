// What all pages share: messages to the server, forms, places that are loaded, views.
const kedge = (() => {
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
      place?.dispatchEvent(new CustomEvent("filled", { bubbles: true }));
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

  const isText = (target) => target.matches?.("textarea, input:not([type=radio], [type=checkbox], #order)");
  return { $, actions, all, go, isText, markdown, page, post, press, pressed, project, readOrder, say };
})();
