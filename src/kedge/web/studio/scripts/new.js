// A new run: what is wrong is said at its field.
(() => {
  const { $, all, go, post, say } = kedge;
  $("#new").addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.target;
    const body = { template: form.elements.template.value, name: form.elements.name.value, model: form.elements.model.value };
    for (const place of all("[data-problem]")) place.hidden = true;
    try {
      const reply = await post("/new", body);
      if (reply.go) return go(reply.go);
      for (const [name, text] of Object.entries(reply.problems)) {
        const place = $(`[data-problem="${name}"]`);
        place.textContent = text;
        place.hidden = false;
      }
      $("[data-problem]:not([hidden])")?.scrollIntoView({ block: "center" });
    } catch (error) { say(error.message, true); }
  });
})();
