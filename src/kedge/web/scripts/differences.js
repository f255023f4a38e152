// How answers differ, word by word, and answers that scroll together.
Object.assign(kedge, (() => {
  const { all, markdown, press, pressed, say } = kedge;
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
  return { diff, link };
})());
