// Filters and sorts what the page already holds. Text of the run is only ever set as text, never parsed as HTML.
"use strict";
(() => {
  const PAGE_SIZE = 40;
  const samples = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("filters");
  const list = document.getElementById("samples");
  const more = document.getElementById("more");
  const count = document.getElementById("count");
  let found = [];
  let shown = 0;

  const element = (name, fields, ...children) => {
    const made = Object.assign(document.createElement(name), fields);
    made.append(...children);
    return made;
  };
  const number = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(4))));
  const seconds = (value) => (value === null ? "-" : value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(1)} s`);
  const place = (sample) => `${sample.step} ${sample.lane}`;
  const laneName = (lane) => (lane === "eval" ? "evaluation" : "training");
  const isInvalid = (sample, reward) => sample.rewards.some((each) => !each.valid && (!reward || each.name === reward));
  const scoreOf = (sample, reward) => {
    if (!reward) return sample.score;
    const result = sample.rewards.find((each) => each.name === reward);
    return result && result.valid ? result.score : null;
  };
  const latency = (sample) => Math.max(0, ...sample.rewards.map((each) => each.latency || 0));

  // The best, or the worst, sample of each step; ties go to the first.
  const extremes = (candidates, reward, sign) => {
    const chosen = new Map();
    for (const sample of candidates) {
      const score = scoreOf(sample, reward);
      if (score === null) continue;
      const other = chosen.get(place(sample));
      if (!other || sign * score > sign * scoreOf(other, reward)) chosen.set(place(sample), sample);
    }
    return [...chosen.values()];
  };

  const select = () => {
    const value = Object.fromEntries(new FormData(form));
    const text = value.text.toLowerCase();
    const low = value.low === "" ? null : Number(value.low);
    const high = value.high === "" ? null : Number(value.high);
    let kept = samples.filter((sample) => {
      if (value.step && place(sample) !== value.step) return false;
      if (value.reward && !sample.rewards.some((each) => each.name === value.reward)) return false;
      if (value.show === "invalid" && !isInvalid(sample, value.reward)) return false;
      if (value.show === "truncated" && !sample.truncated) return false;
      if (text && !`${sample.prompt}\n${sample.completion}`.toLowerCase().includes(text)) return false;
      if (low === null && high === null) return true;
      const score = scoreOf(sample, value.reward);
      return score !== null && (low === null || score >= low) && (high === null || score <= high);
    });
    if (value.show === "best") kept = extremes(kept, value.reward, 1);
    if (value.show === "worst") kept = extremes(kept, value.reward, -1);
    const keys = {
      high: (sample) => -(scoreOf(sample, value.reward) ?? -Infinity),
      low: (sample) => scoreOf(sample, value.reward) ?? Infinity,
      long: (sample) => -sample.tokens,
      slow: (sample) => -latency(sample),
    };
    const key = keys[value.order];
    if (key) kept = kept.map((sample) => [key(sample), sample]).sort((a, b) => (a[0] === b[0] ? 0 : a[0] - b[0])).map((pair) => pair[1]);
    return kept;
  };

  const textBlock = (title, text) => [
    element("h4", { textContent: title }),
    element("pre", { textContent: text, tabIndex: 0 }),
  ];

  const rewardRow = (result) => {
    const parts = Object.entries(result.components).map(([name, value]) => `${name} ${number(value)}`);
    const details = result.valid ? parts.join(", ") : [result.reason, result.message].filter(Boolean).join(": ");
    const cells = [result.valid ? number(result.score) : "invalid", details, seconds(result.latency), result.attempts ?? "-"];
    return element(
      "tr", {}, element("th", { scope: "row", textContent: result.name }),
      ...cells.map((cell) => element("td", { textContent: cell })),
    );
  };

  const card = (sample) => {
    const title = `Step ${sample.step}, ${laneName(sample.lane)}, group ${sample.group}, sample ${sample.sample}`;
    const facts = element("p", { className: "facts" });
    facts.append(`score ${number(sample.score)}, advantage ${number(sample.advantage)}, ${sample.tokens} tokens`);
    for (const [name, holds] of [["invalid", isInvalid(sample)], ["truncated", sample.truncated]])
      if (holds) facts.append(element("span", { className: `badge ${name}`, textContent: name }));
    const prompt = element("div", {}, ...textBlock("Prompt", sample.prompt));
    if (sample.truth !== null) prompt.append(...textBlock("Ground truth", sample.truth));
    const completion = element("div", {}, ...textBlock("Completion", sample.completion));
    const head = element("tr", {}, ...["reward", "score", "components, or why it is invalid", "latency", "attempts"].map(
      (name) => element("th", { scope: "col", textContent: name })));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...sample.rewards.map(rewardRow)));
    return element(
      "article", { className: "sample", tabIndex: -1 }, element("h3", { textContent: title }), facts,
      element("div", { className: "texts" }, prompt, completion), table,
    );
  };

  const showMore = () => {
    list.append(...found.slice(shown, shown + PAGE_SIZE).map(card));
    shown = Math.min(found.length, shown + PAGE_SIZE);
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(PAGE_SIZE, found.length - shown)} more`;
  };

  const refresh = () => {
    found = select();
    shown = 0;
    list.replaceChildren();
    showMore();
    count.textContent = `${found.length} of ${samples.length} samples match`;
  };

  const addOptions = (name, values) => {
    for (const [value, text] of values) form.elements[name].append(element("option", { value, textContent: text }));
  };
  addOptions("step", new Map(samples.map((sample) => [place(sample), `${sample.step}, ${laneName(sample.lane)}`])));
  addOptions("reward", new Map(samples.flatMap((sample) => sample.rewards.map((each) => [each.name, each.name]))));
  form.addEventListener("input", refresh);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(refresh));
  more.addEventListener("click", showMore);
  refresh();

  // j and k move between samples, unless a field has the focus.
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !["j", "k"].includes(event.key)) return;
    const cards = [...list.children];
    const current = cards.indexOf(document.activeElement.closest(".sample"));
    const next = cards[event.key === "j" ? Math.min(current + 1, cards.length - 1) : Math.max(current - 1, 0)];
    if (next) next.focus();
  });

  // Sortable tables: a button in each column's head; a second click reverses the order.
  const cellValue = (row, index) => {
    const cell = row.cells[index];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, index) => {
      const button = element("button", { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const isAscending = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
        const sign = isAscending ? 1 : -1;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const [left, right] = [cellValue(a, index), cellValue(b, index)];
          if (typeof left === typeof right) return left < right ? -sign : left > right ? sign : 0;
          return typeof left === "number" ? -sign : sign;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
