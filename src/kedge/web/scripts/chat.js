// Chat: Enter sends, digits choose a step where nothing is being written.
(() => {
  const { $, actions, all, say } = kedge;
  document.addEventListener("filled", (event) => {
    if (event.target.id !== "talk") return;
    say("");
    const vote = $(".vote");
    if (vote) { vote.scrollIntoView({ block: "end" }); $("input", vote).focus({ preventScroll: true }); } else $("#say").focus();
  });
  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.id === "say" && key === "Enter" && !event.shiftKey) { event.preventDefault(); $("#compose").requestSubmit(); }
    if (target.matches("textarea, input:not([type=radio])")) return;
    if (/^[1-7]$/.test(key)) { event.preventDefault(); all(".vote .steps input")[key - 1]?.click(); }
    if (key === "b") $('.vote input[value="both_bad"]')?.click();
    if (key === "m") actions.markdown();
  });
})();
