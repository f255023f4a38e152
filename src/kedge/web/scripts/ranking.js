// An order of cards, drawn as it is typed and moved by arrows.
Object.assign(kedge, (() => {
  const { $, all, readOrder } = kedge;
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
  return { drawOrder, move };
})());
