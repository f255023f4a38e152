// Keys, search and copying for the items that were lost. The page is complete without this.
(() => {
  const form = document.getElementById("filter");
  if (!form) return;
  const items = [...document.querySelectorAll("article.lost")];
  const said = document.getElementById("said");
  const texts = items.map((item) => item.textContent.toLowerCase());
  let at = -1;
  const say = (text) => { said.textContent = text; };
  const filter = () => {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { model, column } = Object.fromEntries(new FormData(form));
    let shown = 0;
    items.forEach((item, place) => {
      const fits = (!model || item.dataset.model === model) && (!column || item.dataset.column === column)
        && words.every((word) => texts[place].includes(word));
      item.hidden = !fits;
      shown += fits;
    });
    say(shown === items.length ? "" : `${shown} of ${items.length}`);
  };
  const move = (by) => {
    let place = at + by;
    while (items[place]?.hidden) place += by;
    if (!items[place]) return;
    at = place;
    items[at].focus({ preventScroll: true });
    items[at].scrollIntoView({ block: "start" });
  };
  const copy = async (item) => {
    const code = item?.querySelector(".command code");
    if (!code) return say("no command here");
    try {
      await navigator.clipboard.writeText(code.textContent);
      say("copied: fill in --why and --check");
    } catch {
      getSelection().selectAllChildren(code);
      say(document.execCommand("copy") ? "copied: fill in --why and --check" : "selected: copy it yourself");
    }
  };
  // Where an application serves this page, what was lost can be put before people, and become a badcase.
  const csrf = document.querySelector("meta[name=csrf]")?.content;
  const post = async (path, body) => {
    const token = new URLSearchParams(location.search).get("token");
    const headers = { "Content-Type": "application/json", "X-CSRF-Token": csrf, ...(token ? { "X-Kedge-Token": token } : {}) };
    try {
      const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
      return await answer.json();
    } catch {
      return { error: "the server cannot be reached" };
    }
  };
  const send = async (item) => {
    if (!item?.querySelector("[data-send]")) return;
    const reply = await post("/board/send", { ...item.dataset });
    say(reply.say ?? reply.error);
  };
  const dialog = document.getElementById("badcase");
  const describe = (item) => {
    if (!item?.querySelector("[data-badcase]")) return say("no badcase can be made of it");
    dialog.querySelector("form").reset();
    document.getElementById("badcase-said").textContent = "";
    document.getElementById("badcase-of").textContent = item.getAttribute("aria-label");
    dialog.showModal();
  };
  dialog?.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const reply = await post("/board/badcase", { ...items[at].dataset, ...Object.fromEntries(new FormData(event.target)) });
    if (!reply.say) { document.getElementById("badcase-said").textContent = reply.error; return; }
    dialog.close();
    say(reply.say);
  });
  const bad = (item) => (dialog ? describe(item) : copy(item));
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("focusin", (event) => {
    const place = items.indexOf(event.target.closest?.("article.lost"));
    if (place >= 0) at = place;
  });
  document.addEventListener("click", (event) => {
    if (event.target.matches?.(".command button")) copy(event.target.closest("article"));
    if (event.target.closest?.("[data-send]")) send(event.target.closest("article"));
    if (event.target.closest?.("[data-badcase]")) describe(event.target.closest("article"));
    if (event.target.closest?.("[data-close]")) dialog.close();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog?.open) return;
    if (event.target.matches?.("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = { j: () => move(1), k: () => move(-1), b: () => bad(items[at]), l: () => send(items[at]), "/": () => form.elements.q.focus() }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
})();
