// Asks once a second what is new of a run; what it writes is followed while its end is in sight.
(() => {
  const { $, all, post, say } = kedge;
  const run = $(".run-page").dataset.run;
  const token = new URLSearchParams(location.search).get("token");
  const ask = (path, values) => fetch(`${path}?${new URLSearchParams({ ...values, token })}`);
  const log = $("#log"), live = $("#live"), stop = $("#stop"), resume = $("#resume"), status = $("#status");
  let since = "", stage = "", at = "", verdictOf = "";
  const isRead = () => document.querySelector("svg:hover, svg:focus");
  const append = (news) => {
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
    if (news.is_log_new) log.textContent = news.log; else log.append(news.log);
    if (news.log && isAtEnd) log.scrollTop = log.scrollHeight;
    at = news.log_at;
  };
  const refresh = async () => {
    try {
      const answer = await ask("/run/live", { name: run, since, stage, log: at });
      const news = await answer.json();
      if (!answer.ok) return say(news.error, true);
      if (status.textContent !== news.status) { status.textContent = news.status; status.className = `state ${news.status}`; }
      stop.hidden = !news.is_alive;
      stop.textContent = ["Stop", "Stop at once", "End by force"][Math.min(news.presses, 2)];
      resume.hidden = !news.can_resume;
      $("#outcome").textContent = news.outcome;
      for (const part of all(".needs-folder")) part.hidden = !news.since && !since;
      if (news.log || news.is_log_new) append(news);
      if (news.html !== undefined && !isRead()) { live.innerHTML = news.html; since = news.since; }
      if (!news.is_alive && $("#doctor").open && verdictOf !== since) examine();
      if ($("#state").classList.contains("bad")) say("");
    } catch {
      say("The studio cannot be reached; the run goes on without it.", true);
    }
  };
  const look = async () => {
    if (!document.hidden) await refresh();
    setTimeout(look, 1000);
  };
  const examine = async () => {
    verdictOf = since;
    const answer = await ask("/run/doctor", { name: run }).catch(() => null);
    if (answer?.ok) $("#verdict").innerHTML = await answer.text();
  };
  $("#doctor").addEventListener("toggle", () => { if ($("#doctor").open) examine(); });
  live.addEventListener("click", (event) => {
    if (event.target.dataset?.stage === undefined) return;
    stage = event.target.dataset.stage;
    since = "";
    refresh();
  });
  const tell = (path) => async () => {
    try { say((await post(path, { name: run })).say); refresh(); } catch (error) { say(error.message, true); }
  };
  stop.addEventListener("click", tell("/run/stop"));
  resume.addEventListener("click", tell("/run/resume"));
  look();
})();
