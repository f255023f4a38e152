// A chat: Enter sends; answers become data, badcases, or questions to people; models are waited for while they load.
(() => {
  const { $, post, say } = kedge;
  const talk = $("#talk"), dialog = $("#case"), form = $("#case-form");
  const token = new URLSearchParams(location.search).get("token");
  const isLoading = () => $('[data-state="loading"]', talk);
  const wait = async () => {
    if (isLoading()) {
      const answer = await fetch(`/chat/state?${new URLSearchParams({ token })}`).catch(() => null);
      if (answer?.ok) talk.innerHTML = (await answer.json()).html;
    }
    setTimeout(wait, 1000);
  };
  wait();
  talk.addEventListener("filled", () => {
    $("#say").value = "";
    say(""); // of what went wrong before
    const last = talk.lastElementChild;
    if (last && !isLoading()) last.scrollIntoView({ block: "nearest" });
  });
  $("#say").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("#compose").requestSubmit(); }
  });
  const send = async (path, body) => { talk.innerHTML = (await post(path, body)).html; say(""); };
  let answer = null;
  talk.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button");
    const place = button?.closest("[data-turn]");
    if (!place) return;
    answer = { chat: $("[name=chat]", talk).value, turn: Number(place.dataset.turn), side: Number(place.dataset.side) };
    try {
      if (button.dataset.thumb) await send("/chat/thumb", { ...answer, is_good: button.dataset.thumb === "true" });
      else if (button.dataset.prefer !== undefined) await send("/chat/prefer", answer);
      else if (button.dataset.ask !== undefined) await send("/chat/ask", answer);
      else { form.reset(); $(".problem", form).hidden = true; dialog.showModal(); }
    } catch (error) { say(error.message, true); }
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { why, check, value } = form.elements, line = $(".problem", form);
    try {
      await send("/chat/badcase", { ...answer, why: why.value, check: check.value, value: value.value });
      dialog.close();
      say("Kept as a badcase.");
    } catch (error) { line.textContent = error.message; line.hidden = false; }
  });
})();
