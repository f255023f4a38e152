// Files go up one after the other; the audit of each is shown where it was chosen.
(() => {
  const { $, post, say } = kedge;
  const place = $("#audits");
  const token = new URLSearchParams(location.search).get("token");
  const card = (text, isBad) => {
    const line = document.createElement("p");
    line.className = isBad ? "problem" : "soft";
    line.textContent = text;
    place.prepend(line);
    return line;
  };
  const send = async (file) => {
    const line = card(`${file.name}: on its way …`);
    try {
      const answer = await fetch(`/upload?${new URLSearchParams({ name: file.name })}`, {
        method: "POST", body: file, headers: { "Content-Type": "application/octet-stream", "X-Kedge-Token": token },
      });
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error);
      line.textContent = `${told.file}: it is in the project; reading what is in it …`; // minutes, for a large one
      line.outerHTML = (await post("/data/audit", { file: told.file })).html;
    } catch (error) {
      line.className = "problem";
      line.setAttribute("role", "alert");
      line.textContent = `${file.name}: ${error.message}`;
    }
  };
  const sendAll = async (files) => { for (const file of files) await send(file); };
  $("#files").addEventListener("change", async (event) => { await sendAll([...event.target.files]); event.target.value = ""; });
  const zone = $("#upload");
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop") sendAll([...event.dataTransfer.files]);
    });
  }
  document.addEventListener("click", async (event) => {
    const file = event.target.dataset?.audit;
    if (!file) return;
    const line = card(`${file}: reading …`);
    try {
      line.outerHTML = (await post("/data/audit", { file })).html;
      place.scrollIntoView({ block: "nearest" });
    } catch (error) { line.remove(); say(error.message, true); }
  });
})();
