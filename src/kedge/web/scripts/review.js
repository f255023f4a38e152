// Review: a case at a time, decided by the same keys as at work, in the order of the answers that is shown.
(() => {
  const { $, actions, all, isText, post, project, readOrder, say } = kedge;
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
      const articles = cases();
      const at = articles.indexOf(article);
      const following = articles[at + 1] ?? articles[at - 1];
      article.remove();
      if (!following) return location.reload();
      choose(following);
      following.focus();
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

  // The case that keys are for: where the focus is, else the first one.
  const cases = () => all("article[data-item]");
  const current = () => $("article.current") ?? cases()[0];
  const choose = (article) => {
    for (const other of cases()) other.classList.toggle("current", other === article);
  };
  const go = (by) => {
    const articles = cases();
    const article = articles[Math.max(0, Math.min(articles.length - 1, articles.indexOf(current()) + by))];
    choose(article);
    article?.focus({ preventScroll: true });
    article?.scrollIntoView({ block: "start" });
  };
  document.addEventListener("focusin", (event) => {
    const article = event.target.closest("article[data-item]");
    if (article) choose(article);
  });
  choose(cases()[0]);
  const pick = (name, value) => $(`input[name="${name}"][value="${value}"]`, current())?.click();
  const digit = (form, number) => {
    if (form.dataset.kind === "thumb") pick("thumb", { 1: 1, 2: -1 }[number]);
    else if (form.dataset.kind === "pair" && number < 8) pick("step", number - 4);
  };
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isText(target)) { if (key === "Escape") current()?.focus(); return; }
    const form = $("form[data-decide]", current() ?? document);
    const done = () => event.preventDefault();
    if (key === "j" || key === "k") { done(); return go(key === "j" ? 1 : -1); }
    if (key === "m") { done(); return actions.markdown(); }
    if (!form) return;
    if (form.dataset.kind === "rank" && /^[1-9]$/.test(key)) return form.elements.order.focus();
    if (/^[1-9]$/.test(key)) { done(); digit(form, Number(key)); }
    if (key === "t" && form.dataset.kind === "pair") { done(); pick("step", 0); }
    if (key === "b" && form.dataset.kind === "pair") { done(); pick("step", "both_bad"); }
    if (key === "w") { done(); form.elements.why.focus(); }
    if (key === "g") {
      done();
      if (form.elements.why.value.trim()) return $("[data-ask]", form).click();
      say("Say first what the guideline leaves open.", true);
      form.elements.why.focus();
    }
    if (key === "Enter" && !target.matches("button, a, summary")) { done(); form.requestSubmit(); }
  });
})();
