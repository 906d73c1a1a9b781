// Filters and sorts what the page already holds; a live page asks its server instead, and shows what changes. Text of
// the run is only ever set as text. What a live page replaces is its own template, rendered and escaped by its server.
"use strict";
(() => {
  const PAGE_SIZE = 40;
  const SCORED = 100;
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = data.live ?? null;
  const samples = data.samples ?? [];
  const form = document.getElementById("filters");
  const list = document.getElementById("samples");
  const more = document.getElementById("more");
  const count = document.getElementById("count");
  let found = [];
  let shown = 0;
  let matching = 0;
  let asked = 0;

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
  const latency = (sample, reward) =>
    Math.max(0, ...sample.rewards.filter((each) => !reward || each.name === reward).map((each) => each.latency || 0));

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
      if (value.reason && !sample.rewards.some((each) => each.reason === value.reason && (!value.reward || each.name === value.reward))) return false;
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
      slow: (sample) => -latency(sample, value.reward),
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
      ...cells.map((cell, index) => element("td", { textContent: cell, className: index === 1 ? "prose" : "" })),
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

  const updateMore = () => {
    more.hidden = shown >= matching;
    more.textContent = `Show ${Math.min(PAGE_SIZE, matching - shown)} more`;
  };

  const showMore = async () => {
    if (live) return ask();
    list.append(...found.slice(shown, shown + PAGE_SIZE).map(card));
    shown = Math.min(found.length, shown + PAGE_SIZE);
    updateMore();
  };

  // A live page gets its samples page by page; an answer that a newer question has overtaken is dropped.
  const ask = async () => {
    const number = ++asked;
    const query = new URLSearchParams(new FormData(form));
    query.set("offset", shown);
    query.set("limit", PAGE_SIZE);
    count.textContent = "searching";
    let answer;
    try {
      const response = await fetch(`samples?${live.query}&${query}`);
      answer = response.ok ? await response.json() : { error: await response.text() };
    } catch (error) {
      answer = { error: "the server does not answer" };
    }
    if (number !== asked) return;
    if (answer.error) {
      count.textContent = answer.error;
      return;
    }
    if (shown === 0) list.replaceChildren();
    list.append(...answer.samples.map(card));
    shown += answer.samples.length;
    matching = answer.samples.length ? answer.matching : shown;
    updateMore();
    count.textContent = `${answer.matching} of ${answer.total} samples match`;
  };

  const refresh = () => {
    shown = 0;
    if (live) return ask();
    found = select();
    matching = found.length;
    list.replaceChildren();
    showMore();
    count.textContent = `${found.length} of ${samples.length} samples match`;
  };

  let typing;
  form.addEventListener("input", (event) => {
    clearTimeout(typing);
    if (live && event.target.tagName === "INPUT") typing = setTimeout(refresh, 300);
    else refresh();
  });
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

  // A point of a curve leads to the samples of its step, or of the nearest one that has some.
  const showStep = (step, lane, run) => {
    if (run && live && run !== live.run) {
      location.href = `?${new URLSearchParams({ run })}#step=${step} ${lane}`;
      return;
    }
    const places = [...form.elements.step.options].map((option) => option.value).filter(Boolean);
    const distance = (value) => Math.abs(parseInt(value, 10) - step) + (value.endsWith(lane) ? 0 : 0.25);
    const nearest = places.reduce((best, value) => (best === null || distance(value) < distance(best) ? value : best), null);
    if (nearest === null) return;
    form.elements.step.value = nearest;
    refresh();
    const title = document.getElementById("trajectories-title");
    title.tabIndex = -1;
    title.focus();
    title.scrollIntoView();
  };
  document.getElementById("curves").addEventListener("click", (event) => {
    const button = event.target.closest("button.step");
    const { lane = "train", run = "" } = (button ?? event.target).dataset;
    if (button) return showStep(Number(button.dataset.step), lane, run);
    const chart = event.target.closest("svg[data-steps]");
    if (!chart) return;
    const [low, left, high, right] = chart.dataset.steps.split(" ").map(Number);
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
    const isPoint = event.target.matches("circle");
    const x = isPoint ? Number(event.target.getAttribute("cx")) : point.x;
    const share = right === left ? 0 : Math.min(1, Math.max(0, (x - left) / (right - left)));
    const hasTraining = chart.querySelector("polyline.line:not(.held-out), rect.area") !== null;
    showStep(low + share * (high - low), isPoint || hasTraining ? lane : "eval", run);
  });

  // Sortable tables: a button in each column's head; a second click reverses the order.
  const cellValue = (row, index) => {
    const cell = row.cells[index];
    const text = cell.dataset.value ?? cell.textContent.trim();
    return text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text;
  };
  const makeSortable = (table) => {
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
  };
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  if (live) follow();

  // What changes: the server sends what the page does not have; the browser reconnects by itself, with its cursor.
  function follow() {
    const announce = document.getElementById("announce");
    const scored = document.getElementById("scored").tBodies[0];
    const pause = document.getElementById("pause");
    const waiting = [];
    let isPaused = false;
    let replacing = null;

    const sections = ["runs", "summary", "curves", "time", "failures", "versions"];
    const current = new Map(sections.map((id) => [id, document.getElementById(id).innerHTML]));

    // A section is replaced when it differs, unless the reader is in it; open details stay open.
    const replaceSection = (id, other) => {
      const own = document.getElementById(id);
      if (other === null || own.contains(document.activeElement)) return false;
      if (current.get(id) === other.innerHTML) return true;
      if ([...own.querySelectorAll("input[type=checkbox]")].some((each) => each.checked !== each.defaultChecked)) return true;
      const isOpen = [...own.querySelectorAll("details")].map((each) => each.open);
      current.set(id, other.innerHTML);
      own.replaceChildren(...other.childNodes);
      own.querySelectorAll("details").forEach((each, index) => (each.open = isOpen[index] ?? false));
      own.querySelectorAll("table.sortable").forEach(makeSortable);
      return true;
    };

    // The run that is shown is in sight, however long the list.
    const showRun = () => {
      const row = document.querySelector("#runs [aria-current]").closest("tr");
      const list = row.closest(".list");
      const [inner, outer] = [row.getBoundingClientRect(), list.getBoundingClientRect()];
      list.scrollTop += inner.top - outer.top - (outer.height - inner.height) / 2;
    };
    showRun();

    const replaceAll = async () => {
      replacing = null;
      const response = await fetch(live.page).catch(() => null);
      if (!response?.ok) return;
      const other = new DOMParser().parseFromString(await response.text(), "text/html");
      document.querySelector("h1").replaceChildren(...other.querySelector("h1").childNodes);
      document.title = other.title;
      for (const name of ["step", "reward", "reason"]) {
        const value = form.elements[name].value;
        form.elements[name].replaceChildren(...other.querySelector(`#filters [name=${name}]`).childNodes);
        form.elements[name].value = value;
      }
      const isDone = sections.map((id) => replaceSection(id, other.getElementById(id)));
      if (isDone.includes(false)) document.addEventListener("focusout", replaceSoon, { once: true });
    };
    const replaceSoon = () => {
      replacing ??= setTimeout(replaceAll, 2000);
    };

    const scoredRow = (sample) => {
      const reasons = sample.rewards.filter((each) => each.reason).map((each) => `${each.name}: ${each.reason}`);
      const known = sample.rewards.filter((each) => each.latency !== null);
      const slowest = known.reduce((best, each) => (best === null || each.latency > best.latency ? each : best), null);
      const texts = element("details", {}, element("summary", { textContent: sample.completion.slice(0, 200).trim() || "(empty)" }));
      texts.addEventListener("toggle", () => {
        if (texts.open && texts.children.length === 1) texts.append(card(sample));
      });
      const cells = [
        number(sample.score), slowest ? `${seconds(slowest.latency)} (${slowest.name})` : "-", reasons.join(", ") || "-",
      ].map((textContent) => element("td", { textContent }));
      const name = `${sample.step}, ${laneName(sample.lane)}, ${sample.group}/${sample.sample}`;
      return element("tr", {}, element("th", { scope: "row", textContent: name }), ...cells, element("td", { className: "rest" }, texts));
    };

    const actions = {
      records: ({ lines }) => {
        announce.textContent = lines.at(-1) ?? "";
        replaceSoon();
      },
      restarted: () => {
        announce.textContent = "the run continues from an earlier step";
        replaceSoon();
      },
      samples: ({ samples: rows, lost }) => {
        document.getElementById("none-scored").hidden = true;
        document.getElementById("feed").hidden = false;
        scored.prepend(...rows.slice(-SCORED).reverse().map(scoredRow));
        while (scored.rows.length > SCORED) scored.lastElementChild.remove();
        if (lost) document.getElementById("lost").textContent = `${lost} samples were scored meanwhile that are not shown`;
      },
      status: ({ is_running: isRunning, rows }) => {
        const shownRows = isRunning ? rows : [["head", "none answers: the run has ended, or another user or machine runs it"]];
        document.getElementById("waits").tBodies[0].replaceChildren(...shownRows.map(([who, what]) =>
          element("tr", {}, element("th", { scope: "row", textContent: who }), element("td", { textContent: what }))));
      },
    };
    const act = (kind, text) => (isPaused ? keep(kind, text) : actions[kind](JSON.parse(text)));
    // However long the page pauses: of what replaces an earlier one the last, and as many samples as the page shows.
    const keep = (kind, text) => {
      const earlier = kind === "samples" ? -1 : waiting.findIndex((each) => each[0] === kind);
      if (earlier >= 0) waiting.splice(earlier, 1);
      waiting.push([kind, text]);
      if (waiting.length > SCORED + 3) waiting.splice(waiting.findIndex((each) => each[0] === "samples"), 1);
    };
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.setAttribute("aria-pressed", String(isPaused));
      pause.textContent = isPaused ? "Continue" : "Pause";
      if (!isPaused) waiting.splice(0).forEach(([kind, text]) => act(kind, text));
    });

    const source = new EventSource(`events?${live.query}&after=${encodeURIComponent(live.cursor)}`);
    for (const kind of Object.keys(actions)) source.addEventListener(kind, (event) => act(kind, event.data));
    source.addEventListener("open", () => (announce.textContent = "live"));
    source.addEventListener("error", () => (announce.textContent = "connection lost; trying again"));
    const [, step, lane] = /^#step=([\d.]+) (train|eval)$/.exec(decodeURIComponent(location.hash)) ?? [];
    if (step) showStep(Number(step), lane, "");
  }
})();
